"""Object detection with a transformers detector or instance segmenter."""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from torch import Tensor, nn

from lit_vgrpo.rewards.geneval_rules import Detection, official_name
from lit_vgrpo.rewards.model import Dtype
from lit_vgrpo.system.hub import explain_unloadable, file_at_hand, loading, local_folder, source_of

SEGMENTERS = frozenset({"mask2former"})


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
        pictures = self._processor.post_process_object_detection(outputs, threshold=threshold, target_sizes=sizes)
        return [
            [
                Detection(self._names[label], score, tuple(box))
                for label, score, box in zip(
                    *(picture[key].tolist() for key in ("labels", "scores", "boxes")), strict=True
                )
            ]
            for picture in pictures
        ]

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
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path is not None else None
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def class_names(config: dict[str, Any]) -> list[str]:
    """Return the classes in a detector's configuration by their GenEval names."""
    return [official_name(label) for label in config.get("id2label", {}).values()]


def detector_error(checkpoint: str, what_to_set: str) -> str | None:
    """Return why a checkpoint's configuration is not a detector's, in one line, or None."""
    error = explain_unloadable(checkpoint, "config.json", what_to_set)
    if error is not None:
        return error
    config = detector_config(checkpoint)
    if config is None:
        return None if local_folder(checkpoint) is None else f"{checkpoint} holds no readable config.json."
    from transformers.models.auto.modeling_auto import MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES

    family = config.get("model_type")
    if family in SEGMENTERS or family in MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES:
        return None
    return (
        f"{checkpoint} holds a model of type {family!r}, which is not an object detector. "
        f"Set {what_to_set} to a detector, such as an instance mask2former, detr, rt_detr or yolos."
    )
