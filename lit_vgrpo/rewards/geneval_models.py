"""GenEval's models: a detector or instance segmenter of transformers, and CLIP as a classifier of colours."""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from lit_vgrpo.rewards.clip import CLIPEncoder, clip_model, clip_processor
from lit_vgrpo.rewards.geneval_rules import COLORS, Detection, official_name
from lit_vgrpo.rewards.model import Dtype, unit
from lit_vgrpo.system.hub import file_at_hand, loading, source_of

SEGMENTERS = frozenset({"mask2former"})
TEMPLATES = ("a photo of a {color} {label}", "a photo of a {color}-colored {label}", "a photo of a {color} object")
BACKGROUND = (0x99, 0x99, 0x99)  # of objects with a mask


class ObjectDetector:
    """Detector of objects with class, box and, from a segmenter, mask.

    Args:
        checkpoint: hub name or local folder of an object detection model, or of an instance ``Mask2Former``.
        dtype: of the weights.
        what_to_set: the recipe's key of the checkpoint, for messages.

    Raises:
        LoadError: the checkpoint is not a complete detector.
    """

    def __init__(self, checkpoint: str, dtype: Dtype, what_to_set: str) -> None:
        from transformers import (
            AutoImageProcessor,
            AutoModelForObjectDetection,
            AutoModelForUniversalSegmentation,
        )

        self.segments = (detector_config(checkpoint) or {}).get("model_type") in SEGMENTERS
        family = AutoModelForUniversalSegmentation if self.segments else AutoModelForObjectDetection
        with loading(checkpoint, f"Set {what_to_set} to a folder with a complete detector and its image processor."):
            self._processor: Any = AutoImageProcessor.from_pretrained(source_of(checkpoint))
            self.model: nn.Module = family.from_pretrained(source_of(checkpoint), dtype=getattr(torch, dtype))
        labels = cast(Any, self.model).config.id2label
        self._names = {int(number): official_name(label) for number, label in labels.items()}

    def find(self, images: Tensor, threshold: float) -> list[list[Detection]]:
        """Return each image's objects above a confidence.

        Args:
            images: shape ``(b, 3, H, W)``, uint8, on the CPU, where resizing rounds as PIL does.
            threshold: the confidence, 0 to 1.
        """
        parameter = next(self.model.parameters())
        inputs = self._processor(images=list(images), return_tensors="pt").to(parameter.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(parameter.dtype)
        outputs = self.model(**inputs)
        for key in ("logits", "pred_boxes", "class_queries_logits", "masks_queries_logits"):
            if key in outputs:
                outputs[key] = outputs[key].float()
        sizes = [tuple(images.shape[-2:])] * len(images)
        return (self._from_masks if self.segments else self._from_boxes)(outputs, threshold, sizes)

    def _from_boxes(self, outputs: Any, threshold: float, sizes: list[Any]) -> list[list[Detection]]:
        found = []
        for picture in self._processor.post_process_object_detection(outputs, threshold=threshold, target_sizes=sizes):
            columns = (picture[key].tolist() for key in ("labels", "scores", "boxes"))
            found.append(
                [Detection(self._names[label], score, tuple(box)) for label, score, box in zip(*columns, strict=True)]
            )
        return found

    def _from_masks(self, outputs: Any, threshold: float, sizes: list[Any]) -> list[list[Detection]]:
        from torchvision.ops import masks_to_boxes

        pictures = self._processor.post_process_instance_segmentation(
            outputs, threshold=threshold, target_sizes=sizes, return_binary_maps=True
        )
        found: list[list[Detection]] = []
        for picture in pictures:
            segments = picture["segments_info"]
            if not segments:
                found.append([])
                continue
            masks = picture["segmentation"].bool().cpu()
            boxes = masks_to_boxes(masks)
            boxes[:, 2:] += 1  # to include the last pixel
            found.append(
                [
                    Detection(self._names[segment["label_id"]], segment["score"], tuple(box), mask.numpy())
                    for segment, box, mask in zip(segments, boxes.tolist(), masks, strict=True)
                ]
            )
        return found


def detector_config(checkpoint: str) -> dict[str, Any] | None:
    """Return a checkpoint's ``config.json``, or None if it is not available locally."""
    path = file_at_hand(checkpoint, "config.json")
    return None if path is None else cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))


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
