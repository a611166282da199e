"""Colours of objects, by zero-shot CLIP classification of their crops."""

from __future__ import annotations

import torch
from PIL import Image
from torch import Tensor

from lit_vgrpo.rewards.clip import CLIPEncoder, clip_model, clip_processor
from lit_vgrpo.rewards.geneval_rules import COLORS, Detection
from lit_vgrpo.rewards.model import Dtype, unit

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
        encoder = CLIPEncoder(clip_model(checkpoint, dtype, what_to_set), clip_processor(checkpoint, what_to_set))
        self._encoder, self.model = encoder, encoder.model
        self._directions: dict[str, Tensor] = {}

    def name(self, crops: list[Image.Image], labels: list[str]) -> list[str]:
        """Return the colour of each crop.

        Args:
            crops: images of single objects, of any size.
            labels: their classes.
        """
        features = self._encoder.of_images(crops)
        directions = torch.stack([self._directions_of(label) for label in labels]).to(features.device)
        nearest = torch.einsum("bd,bcd->bc", features, directions).argmax(1)
        return [COLORS[index] for index in nearest.tolist()]

    def _directions_of(self, label: str) -> Tensor:
        """Return the unit-length means over the templates, ``(colours, D)``, float32."""
        if label not in self._directions:
            texts = [template.format(color=color, label=label) for color in COLORS for template in TEMPLATES]
            features = self._encoder.of_texts(texts).view(len(COLORS), len(TEMPLATES), -1)
            self._directions[label] = unit(features.mean(1))
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
