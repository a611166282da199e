"""GenEval: a score for the objects, numbers, colours and positions of the prompt, by a detector and CLIP."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from lit_vgrpo.core.batches import filled
from lit_vgrpo.core.pixels import to_pil, to_uint8
from lit_vgrpo.core.ranges import ClosedUnitInterval, checked
from lit_vgrpo.errors import shortened
from lit_vgrpo.rewards.clip import HUB_CHECKPOINT as HUB_CLIP
from lit_vgrpo.rewards.clip import CLIPEncoder, clip_model, clip_processor
from lit_vgrpo.rewards.geneval_rules import (
    CLASSES,
    COLORS,
    Detection,
    Objects,
    judge,
    objects_by_class,
    objects_to_color,
    official_name,
    row_error,
)
from lit_vgrpo.rewards.model import Dtype, ModelReward, unit
from lit_vgrpo.system.hub import file_at_hand, load_network, loading, source_of

HUB_DETECTOR = "facebook/mask2former-swin-small-coco-instance"
SEGMENTERS = frozenset({"mask2former"})
TEMPLATES = ("a photo of a {color} {label}", "a photo of a {color}-colored {label}", "a photo of a {color} object")
BACKGROUND = (0x99, 0x99, 0x99)  # of objects with a mask


@checked
@dataclass(eq=False)
class GenEval(ModelReward):
    """Score of an image against the requirements of its row, in [0, 1]: rules applied to a detector's objects.

    A row has the official metadata: ``tag``, ``include`` and optionally ``exclude``. Rules, thresholds, prompts and
    grey background are those of the official evaluation, as are the two default models (in mmdet and open_clip there).

    ``score="strict"`` is the official 0 or 1. Most images of an untrained model then score 0, and a group of equal
    scores gives no gradient. The default ``"partial"`` averages over the requirements the share that is met (of the
    requested objects; colours and positions once all objects are present), and subtracts a share for each object in
    excess of ``exclude``. It is 1 exactly when the strict score is. Flow-GRPO's score is similar, but penalises every
    surplus object, even if the row does not exclude it.

    Args:
        detector: Hub name or local folder of an object detection model, or of an instance ``Mask2Former``. Detectors
            differ in their confidences: tune the thresholds for any other than the default.
        clip: Hub name or local folder of a ``CLIPModel`` with its processor.
        score: ``"partial"`` or ``"strict"``.
        threshold: Minimum confidence of an object.
        counting_threshold: The same for rows with the tag ``counting``.
        batch_size: Images or crops per forward pass; smaller batches are padded.
        dtype: Dtype of the weights.
        device: Device of the models; ``"auto"`` follows the images.

    Source:
        arXiv 2310.11513 and its evaluation code; the shares after arXiv 2505.05470 (Flow-GRPO).
    """

    name = "geneval"
    weight_files = (("detector", "config.json"), ("clip", "config.json"))

    detector: str = HUB_DETECTOR
    clip: str = HUB_CLIP
    score: Literal["partial", "strict"] = "partial"
    threshold: ClosedUnitInterval = 0.3
    counting_threshold: ClosedUnitInterval = 0.9

    def _build(self) -> nn.Module:
        self._objects = ObjectDetector(self.detector, self.dtype, self.option("detector"))
        option = self.option("clip")
        clip = clip_model(self.clip, self.dtype, option)
        self._encoder = CLIPEncoder(clip, clip_processor(self.clip, option, self.clip))
        self._directions: dict[str, Tensor] = {}
        return nn.ModuleList([self._objects.model, self._encoder.model])

    @cached_property
    def _known(self) -> frozenset[str]:
        """The detector's classes; COCO's if its files are not on this machine."""
        names = _detector_config(self.detector).get("id2label", {}).values()
        return frozenset(map(official_name, names) if names else CLASSES)

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        error = row_error(row, self._known)
        return None if error is None else f'Prompt "{shortened(prompt)}": {error}'

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        errors = [self.prompt_error(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
        self.failure = next(filter(None, errors), None)
        scores = torch.full((len(rows),), math.nan)
        valid = [index for index, error in enumerate(errors) if error is None]
        for index, share in zip(valid, self.judge(images[valid], [rows[i] for i in valid]), strict=True):
            scores[index] = float(share == 1) if self.score == "strict" else share
        return scores

    @torch.no_grad()
    def judge(self, images: Tensor, rows: list[dict[str, Any]]) -> list[float]:
        """Return the share of each valid row's requirements that its image meets, in [0, 1]; images as in the call."""
        if not rows:
            return []
        self.load_for(images)
        least = min(self.threshold, self.counting_threshold)
        thresholds = [self.counting_threshold if row.get("tag") == "counting" else self.threshold for row in rows]
        detections: list[list[Detection]] = []
        for batch in to_uint8(images).cpu().split(self.batch_size):
            detections += self._objects.find(filled(batch, self.batch_size), least)[: len(batch)]
        objects = [objects_by_class(*one) for one in zip(detections, thresholds, strict=True)]
        self._set_colors(images, objects, rows)
        return [judge(one, row) for one, row in zip(objects, rows, strict=True)]

    def _set_colors(self, images: Tensor, objects: list[Objects], rows: list[dict[str, Any]]) -> None:
        """Set the colour of the objects of each image for which its row asks."""
        asked = [objects_to_color(one, row) for one, row in zip(objects, rows, strict=True)]
        pictures = {i: to_pil(images[i : i + 1])[0] for i, detections in enumerate(asked) if detections}
        todo = [(pictures[i], detection) for i, detections in enumerate(asked) for detection in detections]
        for start in range(0, len(todo), self.batch_size):
            batch = todo[start : start + self.batch_size]
            full = batch + batch[-1:] * (self.batch_size - len(batch))
            names = self.colors([object_crop(*one) for one in full], [detection.label for _, detection in full])
            for (_, detection), name in zip(batch, names, strict=False):
                detection.color = name

    def colors(self, crops: list[Image.Image], labels: list[str]) -> list[str]:
        """Return the colour of each object: the one whose prompts are closest to its crop, of any size."""
        for label in labels:
            if label not in self._directions:
                texts = [template.format(color=color, label=label) for color in COLORS for template in TEMPLATES]
                embeddings = self._encoder.encode_texts(texts).view(len(COLORS), len(TEMPLATES), -1)
                self._directions[label] = unit(embeddings.mean(1))
        features = self._encoder.encode_images(crops)
        directions = torch.stack([self._directions[label] for label in labels]).to(features.device)
        nearest = torch.einsum("bd,bcd->bc", features, directions).argmax(1)
        return [COLORS[index] for index in nearest.tolist()]


class ObjectDetector:
    """Detector of objects with class, box and, from a segmenter, mask; ``what_to_set`` is the checkpoint's option."""

    def __init__(self, checkpoint: str, dtype: Dtype, what_to_set: str) -> None:
        from transformers import AutoImageProcessor, AutoModelForObjectDetection, AutoModelForUniversalSegmentation

        self.segments = _detector_config(checkpoint).get("model_type") in SEGMENTERS
        family = AutoModelForUniversalSegmentation if self.segments else AutoModelForObjectDetection
        remedy = f"Set {what_to_set} to a folder with a complete detector and its image processor."
        with loading(checkpoint, remedy):
            self._processor: Any = AutoImageProcessor.from_pretrained(source_of(checkpoint))
        self.model = load_network(family, checkpoint, remedy, dtype=getattr(torch, dtype))
        self._names = {int(number): official_name(label) for number, label in self.model.config.id2label.items()}

    def find(self, images: Tensor, threshold: float) -> list[list[Detection]]:
        """Return the objects above a confidence in images ``(b, 3, H, W)``, uint8, on the CPU: resized as PIL does."""
        inputs = self._processor(images=list(images), return_tensors="pt").to(self.model.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        outputs = self.model(**inputs)
        for key in ("logits", "pred_boxes", "class_queries_logits", "masks_queries_logits"):
            if key in outputs:
                outputs[key] = outputs[key].float()
        sizes = [tuple(images.shape[-2:])] * len(images)
        return (self._from_masks if self.segments else self._from_boxes)(outputs, threshold, sizes)

    def _from_boxes(self, outputs: Any, threshold: float, sizes: list[Any]) -> list[list[Detection]]:
        result = []
        for picture in self._processor.post_process_object_detection(outputs, threshold=threshold, target_sizes=sizes):
            columns = zip(*(picture[key].tolist() for key in ("labels", "scores", "boxes")), strict=True)
            result.append([Detection(self._names[label], score, tuple(box)) for label, score, box in columns])
        return result

    def _from_masks(self, outputs: Any, threshold: float, sizes: list[Any]) -> list[list[Detection]]:
        from torchvision.ops import masks_to_boxes

        result: list[list[Detection]] = []
        for picture in self._processor.post_process_instance_segmentation(
            outputs, threshold=threshold, target_sizes=sizes, return_binary_maps=True
        ):
            segments = picture["segments_info"]
            masks = picture["segmentation"].bool().cpu() if segments else torch.zeros(0, *sizes[0], dtype=torch.bool)
            boxes = masks_to_boxes(masks)
            boxes[:, 2:] += 1  # to include the last pixel
            result.append(
                [
                    Detection(self._names[segment["label_id"]], segment["score"], tuple(box), mask.numpy())
                    for segment, box, mask in zip(segments, boxes.tolist(), masks, strict=True)
                ]
            )
        return result


def _detector_config(checkpoint: str) -> dict[str, Any]:
    """Return a checkpoint's ``config.json``, empty if it is not on this machine."""
    path = file_at_hand(checkpoint, "config.json")
    return {} if path is None else dict(json.loads(path.read_text(encoding="utf-8")))


def object_crop(picture: Image.Image, detection: Detection) -> Image.Image:
    """Crop an object to its box, on grey if it has a mask; at least one pixel wide and high."""
    if detection.mask is not None:
        grey = Image.new("RGB", picture.size, BACKGROUND)
        picture = Image.composite(picture, grey, Image.fromarray(detection.mask))
    left, top, right, bottom = (round(side) for side in detection.box)
    left, top = (min(max(low, 0), size - 1) for low, size in zip((left, top), picture.size, strict=True))
    right, bottom = max(left + 1, min(right, picture.width)), max(top + 1, min(bottom, picture.height))
    return picture.crop((left, top, right, bottom))
