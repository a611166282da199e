"""ImageReward: BLIP on image and prompt, trained on human rankings."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lit_vgrpo.core.pixels import centre_cropped
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.rewards.model import ModelReward, ScoreHead, longer_than, weights_file
from lit_vgrpo.system.hub import loading, read_weights, source_of, tokenizer_error

HUB_CHECKPOINT = "THUDM/ImageReward"
FILENAME = "ImageReward.pt"
HUB_TOKENIZER = "google-bert/bert-base-uncased"
BLIP_TOKENS = ["[DEC]", "[ENC]"]  # BLIP appends them to BERT's vocabulary, in this order
MAX_LENGTH = 35  # tokens of a prompt
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # published with the model, to standardise its raw scores
HEAD_WIDTH = 64  # of every attention head, in BERT and the ViT: the only size that the weights do not reveal

# Published names and those in transformers' Blip classes. Other weights outside these parts do not affect the score:
# the projections of BLIP's contrastive loss.
NAMES = {
    r"blip\.visual_encoder\.cls_token": "vision.embeddings.class_embedding",
    r"blip\.visual_encoder\.pos_embed": "vision.embeddings.position_embedding",
    r"blip\.visual_encoder\.patch_embed\.proj\.(\w+)": r"vision.embeddings.patch_embedding.\1",
    r"blip\.visual_encoder\.norm\.(\w+)": r"vision.post_layernorm.\1",
    r"blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.(\w+)": r"vision.encoder.layers.\1.layer_norm\2.\3",
    r"blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.(\w+)": r"vision.encoder.layers.\1.self_attn.qkv.\2",
    r"blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.(\w+)": r"vision.encoder.layers.\1.self_attn.projection.\2",
    r"blip\.visual_encoder\.blocks\.(\d+)\.mlp\.(fc[12])\.(\w+)": r"vision.encoder.layers.\1.mlp.\2.\3",
    r"(blip\.visual_encoder\..+)": r"\1",  # which the model does not have
    r"blip\.text_encoder\.((?!embeddings\.position_ids).+)": r"text.\1",
    r"mlp\.(.+)": r"head.\1",
}


@checked
@dataclass(eq=False)
class ImageReward(ModelReward):
    """Standardised human preference, including prompt alignment; most scores are between -2.3 and 2.

    Args:
        checkpoint: Hub name, local folder with ``ImageReward.pt``, or such a file, which determines the sizes.
        tokenizer: Hub name or local folder of BERT's tokenizer.
        batch_size: Images per forward pass; smaller batches are padded.
        dtype: Dtype of BLIP's weights; the head and the scores are float32.
        device: Device of the model; ``"auto"`` follows the images.

    Source:
        arXiv 2304.05977; github.com/THUDM/ImageReward, ImageReward/ImageReward.py; github.com/salesforce/BLIP,
        models/vit.py and models/med.py.
    """

    name = "image_reward"
    differentiable = True
    weight_files = (("checkpoint", FILENAME), ("tokenizer", "tokenizer_config.json"))

    checkpoint: str = HUB_CHECKPOINT
    tokenizer: str = HUB_TOKENIZER

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import BertTokenizer

        tokenizer: Any = BertTokenizer.from_pretrained(source_of(self.tokenizer))
        tokenizer.add_tokens(BLIP_TOKENS, special_tokens=True)
        return tokenizer

    def truncated(self, prompts: list[str]) -> tuple[list[bool], int]:
        return longer_than(MAX_LENGTH, self._tokenizer, prompts), MAX_LENGTH

    def _build(self) -> nn.Module:
        with loading(self.checkpoint, f"Set {self.option('checkpoint')} to {FILENAME}."):
            weights = renamed(read_weights(weights_file(self.checkpoint, FILENAME)))
            model = blip_modules(weights)
            model.load_state_dict(weights)
        with loading(self.tokenizer, f"Set {self.option('tokenizer')} to a folder with BERT's tokenizer."):
            if error := tokenizer_error(self._tokenizer, len(weights["text.embeddings.word_embeddings.weight"])):
                raise ValueError(f"its tokenizer {error}")
        for part in ("vision", "text"):
            model[part].to(getattr(torch, self.dtype))
        return model

    def _read(self, prompts: list[str]) -> Tensor:
        """Return tokens and attention mask, ``(N, 2, 35)``."""
        text = self._tokenizer(
            prompts, padding="max_length", truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
        )
        return torch.stack([text["input_ids"], text["attention_mask"]], dim=1).to(self._model["vision"].device)

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        vision, text, head = (self._model[part] for part in ("vision", "text", "head"))
        pixels = centre_cropped(images, vision.config.image_size)
        patches = vision(pixels.to(vision.device, vision.dtype)).last_hidden_state
        words = text(texts[:, 0], attention_mask=texts[:, 1], encoder_hidden_states=patches).last_hidden_state
        scores: Tensor = head(words[:, 0])
        return (scores - MEAN) / STD


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the published weights under their names in :func:`blip_modules`."""
    result = {}
    for name, weight in weights.items():
        for pattern, new in NAMES.items():
            if match := re.fullmatch(pattern, name):
                result[match.expand(new)] = weight
                break
    return result


def blip_modules(weights: Mapping[str, Tensor]) -> nn.ModuleDict:
    """Build ``vision``, ``text`` and ``head`` with the sizes of renamed weights; raise KeyError if one is missing."""
    from transformers import BlipTextConfig, BlipVisionConfig
    from transformers.models.blip.modeling_blip import BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    def layers(prefix: str) -> int:
        return len({name.removeprefix(prefix).split(".")[0] for name in weights if name.startswith(prefix)})

    width, _, patch, _ = weights["vision.embeddings.patch_embedding.weight"].shape
    positions = weights["vision.embeddings.position_embedding"].shape[1] - 1  # the first is the class token's
    vision = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=weights["vision.encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=layers("vision.encoder.layers."),
        num_attention_heads=max(1, width // HEAD_WIDTH),
        image_size=patch * math.isqrt(positions),
        patch_size=patch,
        layer_norm_eps=1e-6,  # the ViT's; the class's default differs
    )
    vocabulary, width = weights["text.embeddings.word_embeddings.weight"].shape
    text = BlipTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        encoder_hidden_size=weights["text.encoder.layer.0.crossattention.self.key.weight"].shape[1],
        intermediate_size=weights["text.encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=layers("text.encoder.layer."),
        num_attention_heads=max(1, width // HEAD_WIDTH),
        max_position_embeddings=weights["text.embeddings.position_embeddings.weight"].shape[0],
        layer_norm_eps=1e-12,
    )
    text_model = BlipTextModel(text, add_pooling_layer=False)
    return nn.ModuleDict({"vision": BlipVisionModel(vision), "text": text_model, "head": ScoreHead(width)})
