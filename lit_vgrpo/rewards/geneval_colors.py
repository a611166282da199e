"""Colours of objects, by zero-shot CLIP classification of their crops."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from lit_vgrpo.rewards.clip import clip_error, clip_model, embedding
from lit_vgrpo.rewards.geneval_rules import COLORS, Detection
from lit_vgrpo.rewards.model import Dtype, unit
from lit_vgrpo.rewards.weights import unloadable
from lit_vgrpo.system.hub import explain_unloadable, source_of

TEMPLATES = ("a photo of a {color} {label}", "a photo of a {color}-colored {label}", "a photo of a {color} object")
BACKGROUND = (0x99, 0x99, 0x99)  # of objects with a mask


class ColorClassifier:
    """Classifier of an object's colour: the one whose prompts are closest to its crop.

    Args:
        checkpoint: hub name or local folder of a ``CLIPModel`` with its processor.
        dtype: of the weights.
        what_to_set: the recipe's key of the checkpoint, for messages.

    Raises:
        LoadError: the checkpoint is not a complete CLIP model.
    """

    def __init__(self, checkpoint: str, dtype: Dtype, what_to_set: str) -> None:
        from transformers import CLIPProcessor

        try:
            self._processor: Any = CLIPProcessor.from_pretrained(source_of(checkpoint))
        except Exception as error:  # the library may raise anything on other files
            raise unloadable(checkpoint, error, f"Set {what_to_set} to a folder with its CLIP processor.") from error
        self.model: nn.Module = clip_model(checkpoint, dtype, what_to_set)
        self._directions: dict[str, Tensor] = {}

    def name(self, crops: list[Image.Image], labels: list[str]) -> list[str]:
        """Return the colour of each crop.

        Args:
            crops: images of single objects, of any size.
            labels: their classes.
        """
        model: Any = self.model
        pixels = self._processor.image_processor(crops, return_tensors="pt")["pixel_values"]
        features = unit(embedding(model.get_image_features(pixels.to(model.device, model.dtype))))
        directions = torch.stack([self._directions_of(label) for label in labels]).to(features.device)
        nearest = torch.einsum("bd,bcd->bc", features, directions).argmax(1)
        return [COLORS[index] for index in nearest.tolist()]

    def _directions_of(self, label: str) -> Tensor:
        """Return the unit-length means over the templates, ``(colours, D)``, float32."""
        if label not in self._directions:
            model: Any = self.model
            texts = [template.format(color=color, label=label) for color in COLORS for template in TEMPLATES]
            length = min(self._processor.tokenizer.model_max_length, model.config.text_config.max_position_embeddings)
            tokens = self._processor(
                text=texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
            ).to(model.device)
            features = embedding(model.get_text_features(tokens["input_ids"], attention_mask=tokens["attention_mask"]))
            self._directions[label] = unit(unit(features).view(len(COLORS), len(TEMPLATES), -1).mean(1))
        return self._directions[label]


def object_crop(picture: Image.Image, detection: Detection) -> Image.Image:
    """Crop an object to its box, on grey if it has a mask; at least one pixel wide and high."""
    if detection.mask is not None:
        grey = Image.new("RGB", picture.size, BACKGROUND)
        picture = Image.composite(picture, grey, Image.fromarray(detection.mask))
    left, top, right, bottom = (round(side) for side in detection.box)
    left, top = (min(max(low, 0), size - 1) for low, size in zip((left, top), picture.size, strict=True))
    right, bottom = max(left + 1, min(right, picture.width)), max(top + 1, min(bottom, picture.height))
    return picture.crop((left, top, right, bottom))


def color_model_error(checkpoint: str, what_to_set: str) -> str | None:
    """Return what is wrong with a CLIP checkpoint without loading it, in one line, or None."""
    return (
        explain_unloadable(checkpoint, "config.json", what_to_set)
        or clip_error(checkpoint, what_to_set)
        or explain_unloadable(checkpoint, "tokenizer_config.json", what_to_set)
    )
