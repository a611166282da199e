"""CLIP image similarity: how much an edited image resembles the picture it was made from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lit_vgrpo.core.batches import BATCH_SIZE, in_batches
from lit_vgrpo.core.pictures import picture_error
from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.ranges import BatchSize, checked
from lit_vgrpo.rewards.clip import clip_error, clip_model, embedding
from lit_vgrpo.rewards.clipscore import HUB_CHECKPOINT
from lit_vgrpo.rewards.model import Dtype, ModelReward, device_for, unit
from lit_vgrpo.rewards.weights import unloadable
from lit_vgrpo.system.hub import explain_unloadable, source_of


@checked
class CLIPImageSimilarity(ModelReward):
    """The cosine similarity of the CLIP embeddings of an image and of the picture that its prompt edits, -1 to 1.

    An unchanged copy scores 1: use it beside a reward for the edit, such as CLIPScore, to keep what the prompt does not
    name.

    Args:
        checkpoint: hub name or local folder of a ``CLIPModel`` with its image processor.
        batch_size: images per forward pass; smaller batches are padded.
        dtype: of the weights; scores are float32.
        device: where the model runs; ``"auto"`` follows the images.
    """

    name = "clip_image"
    weight_files = (("checkpoint", "config.json"),)

    def __init__(
        self,
        checkpoint: str = HUB_CHECKPOINT,
        batch_size: BatchSize = BATCH_SIZE,
        dtype: Dtype = "float32",
        device: str = "auto",
    ) -> None:
        super().__init__(checkpoint, batch_size, dtype, device)
        self._processor: Any = None

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        return picture_error(prompt, row)

    @torch.no_grad()
    def __call__(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        self.load()
        assert self._model is not None
        self._model.to(device_for(images, self.device))
        if references is None:
            return torch.full((len(images),), torch.nan, device=images.device)
        given = in_batches(self._embedded, self.batch_size, to_uint8(references).cpu())
        return in_batches(self._score, self.batch_size, to_uint8(images).cpu(), given).to(images.device)

    def _embedded(self, images: Tensor) -> Tensor:
        model: Any = self._model
        # uint8, because the processor would divide a float tensor by 255
        pixels = self._processor(list(images), return_tensors="pt")["pixel_values"]
        return unit(embedding(model.get_image_features(pixels.to(model.device, model.dtype))))

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        return (self._embedded(images) * texts).sum(-1)  # of embeddings of pictures instead of texts

    def _file_errors(self) -> list[str | None]:
        key = self.option("checkpoint")
        return [explain_unloadable(self.checkpoint, "config.json", key) or clip_error(self.checkpoint, key)]

    def _build(self) -> nn.Module:
        from transformers import CLIPImageProcessor

        try:
            self._processor = CLIPImageProcessor.from_pretrained(source_of(self.checkpoint))
        except Exception as error:  # the library may raise anything on other files
            remedy = f"Set {self.option('checkpoint')} to a folder with a complete CLIP image processor."
            raise unloadable(self.checkpoint, error, remedy) from error
        return clip_model(self.checkpoint, self.dtype, self.option("checkpoint"))
