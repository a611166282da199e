"""ImageReward: BLIP on image and prompt, trained on human rankings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lit_vgrpo.core.pixels import centre_cropped
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.rewards.blip import blip_modules, renamed
from lit_vgrpo.rewards.model import ModelReward
from lit_vgrpo.rewards.weights import file_error, fill, read_weights, weights_path
from lit_vgrpo.system.hub import LoadError, explain_unloadable, loading, local_folder, source_of

HUB_CHECKPOINT = "THUDM/ImageReward"
FILENAME = "ImageReward.pt"
HUB_TOKENIZER = "google-bert/bert-base-uncased"
BLIP_TOKENS = ["[DEC]", "[ENC]"]  # BLIP appends them to BERT's vocabulary, in this order
MAX_LENGTH = 35  # tokens of a prompt
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # published with the model, to standardise its raw scores


@checked
@dataclass(eq=False)
class ImageReward(ModelReward):
    """Standardised human preference, including prompt alignment; most scores are between -2.3 and 2.

    Args:
        checkpoint: hub name, local folder with ``ImageReward.pt``, or such a file, which determines the sizes.
        tokenizer: hub name or local folder of BERT's tokenizer; None uses the checkpoint's folder if it has one,
            else ``google-bert/bert-base-uncased``.
        batch_size: images per forward pass; smaller batches are padded.
        dtype: of BLIP's weights; the head and the scores are float32.
        device: where the model runs; ``"auto"`` follows the images.

    Source:
        arXiv 2304.05977; github.com/THUDM/ImageReward, ImageReward/ImageReward.py; github.com/salesforce/BLIP,
        models/vit.py and models/med.py.
    """

    name = "image_reward"
    weight_files = (("checkpoint", FILENAME), ("tokenizer", "tokenizer_config.json"))

    checkpoint: str = HUB_CHECKPOINT
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokenizer = self.tokenizer or _tokenizer_beside(self.checkpoint)

    def _file_errors(self) -> list[str | None]:
        tokenizer = explain_unloadable(str(self.tokenizer), "tokenizer_config.json", self.option("tokenizer"))
        return [file_error(self.checkpoint, FILENAME, self.option("checkpoint")), tokenizer]

    def _build(self) -> nn.Module:
        from transformers import BertTokenizer

        tokenizer = str(self.tokenizer)
        with loading(tokenizer, f"Set {self.option('tokenizer')} to a folder with BERT's tokenizer."):
            self._tokenizer: Any = BertTokenizer.from_pretrained(source_of(tokenizer))
        self._tokenizer.add_tokens(BLIP_TOKENS, special_tokens=True)
        key = self.option("checkpoint")
        path = weights_path(self.checkpoint, FILENAME, key)
        weights = renamed(read_weights(path, key))
        try:
            model = blip_modules(weights)
        except KeyError as error:
            raise LoadError(f"Cannot load {path}: it has no {error.args[0]}. Set {key} to {FILENAME}.") from error
        fill(model, weights, path, key)
        for part in ("vision", "text"):
            model[part].to(getattr(torch, self.dtype))
        return model

    def _read(self, prompts: list[str]) -> Tensor:
        """Return tokens and attention mask, ``(N, 2, 35)``."""
        text = self._tokenizer(
            prompts, padding="max_length", truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
        )
        return torch.stack([text["input_ids"], text["attention_mask"]], dim=1).to(self._blip["vision"].device)

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        vision, text, head = (self._blip[part] for part in ("vision", "text", "head"))
        pixels = centre_cropped(images, vision.config.image_size)
        patches = vision(pixels.to(vision.device, vision.dtype)).last_hidden_state
        words = text(texts[:, 0], attention_mask=texts[:, 1], encoder_hidden_states=patches).last_hidden_state
        scores: Tensor = head(words[:, 0])
        return (scores - MEAN) / STD

    @property
    def _blip(self) -> Any:
        return cast(Any, self._model)


def _tokenizer_beside(checkpoint: str) -> str:
    folder: Path | None = local_folder(checkpoint)
    if folder is not None and not folder.is_dir():
        folder = folder.parent
    return str(folder) if folder is not None and (folder / "tokenizer_config.json").is_file() else HUB_TOKENIZER
