"""Shared code of the rewards that compare image and prompt with a transformers CLIP model."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lit_vgrpo.core.ranges import BatchSize, checked
from lit_vgrpo.rewards.model import Dtype, ModelReward, unit
from lit_vgrpo.rewards.weights import unloadable
from lit_vgrpo.system.hub import LoadError, explain_unloadable, local_folder, source_of

if TYPE_CHECKING:
    from transformers import CLIPModel, CLIPProcessor


@checked
class CLIPReward(ModelReward):
    """The cosine similarity of image and prompt embeddings, scaled by a subclass.

    Resizing, cropping and normalisation follow the checkpoint's processor; long prompts are truncated to the context.

    Args:
        checkpoint: hub name or local folder of a ``CLIPModel``.
        processor: hub name or local folder of its ``CLIPProcessor``; None uses ``checkpoint``.
        batch_size: images per forward pass; smaller batches are padded.
        dtype: of the weights; scores are float32.
        device: where the model runs; ``"auto"`` follows the images.
    """

    weight_files = (("checkpoint", "config.json"), ("processor", "tokenizer_config.json"))

    def __init__(
        self, checkpoint: str, processor: str | None, batch_size: BatchSize, dtype: Dtype, device: str
    ) -> None:
        super().__init__(checkpoint, batch_size, dtype, device)
        self.processor = processor or checkpoint
        self._processor: CLIPProcessor | None = None

    @abstractmethod
    def _scaled(self, cosines: Tensor) -> Tensor:
        """Return the scores of cosines, shape ``(b,)``, float32."""

    def _file_errors(self) -> list[str | None]:
        model_error = explain_unloadable(self.checkpoint, "config.json", self.option("checkpoint"))
        errors = [model_error or clip_error(self.checkpoint, self.option("checkpoint"))]
        if not (model_error and self.processor == self.checkpoint):
            # the only file of a saved processor that both transformers 4 and 5 write
            errors.append(explain_unloadable(self.processor, "tokenizer_config.json", self.option("processor")))
        return errors

    def _build(self) -> nn.Module:
        from transformers import CLIPProcessor

        try:
            self._processor = CLIPProcessor.from_pretrained(source_of(self.processor))
        except Exception as error:  # the library may raise anything on other files
            remedy = f"Set {self.option('processor')} to a folder with a complete CLIP processor."
            raise unloadable(self.processor, error, remedy) from error
        return clip_model(self.checkpoint, self.dtype, self.option("checkpoint"))

    def _read(self, prompts: list[str]) -> Tensor:
        assert self._processor is not None
        model = self._clip
        length = min(self._processor.tokenizer.model_max_length, model.config.text_config.max_position_embeddings)
        text = self._processor(
            text=prompts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).to(model.device)
        return unit(embedding(model.get_text_features(text["input_ids"], attention_mask=text["attention_mask"])))

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        assert self._processor is not None
        model = self._clip
        # uint8, because the processor would divide a float tensor by 255
        pixels = self._processor.image_processor(list(images), return_tensors="pt")["pixel_values"]
        features = embedding(model.get_image_features(pixels.to(model.device, model.dtype)))
        return self._scaled((unit(features) * texts).sum(-1))

    @property
    def _clip(self) -> Any:
        return cast(Any, self._model)


def clip_model(checkpoint: str, dtype: Dtype, what_to_set: str) -> CLIPModel:
    """Load a ``CLIPModel``.

    Raises:
        LoadError: the checkpoint is incomplete.
    """
    from transformers import CLIPModel

    remedy = f"Set {what_to_set} to a folder with a complete CLIP checkpoint."
    library = cast(Any, CLIPModel)  # its annotation omits the second value
    try:
        model, found = library.from_pretrained(
            source_of(checkpoint), dtype=getattr(torch, dtype), output_loading_info=True
        )
    except Exception as error:  # the library may raise anything on other files
        raise unloadable(checkpoint, error, remedy) from error
    if missing := sorted(found["missing_keys"]):  # the library would continue with random ones
        raise LoadError(f"Cannot load {checkpoint}: {len(missing)} weights missing, such as {missing[0]}. {remedy}")
    return cast("CLIPModel", model)


def clip_error(checkpoint: str, what_to_set: str) -> str | None:
    """Return why a local folder's ``config.json`` is not a CLIP model's, in one line, or None."""
    folder = local_folder(checkpoint)
    if folder is None:
        return None
    remedy = f"Set {what_to_set} to a folder of a CLIP model."
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        return f"{folder / 'config.json'} is not JSON ({error}). {remedy}"
    family = config.get("model_type") if isinstance(config, dict) else None
    if family != "clip":
        return f"{folder} holds a model of type {family!r}, not 'clip'. {remedy}"
    return None


def embedding(features: Any) -> Tensor:
    """Return the tensor of ``get_image_features``, which transformers 5 wraps in an output object."""
    return features if isinstance(features, Tensor) else cast(Tensor, features.pooler_output)
