"""GenEval: whether an image shows the objects, numbers, colours and positions of its prompt."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_vgrpo.core.batches import BATCH_SIZE, filled
from lit_vgrpo.core.pixels import to_pil, to_uint8
from lit_vgrpo.core.ranges import BatchSize, ClosedUnitInterval, checked
from lit_vgrpo.rewards.clip import HUB_CHECKPOINT as HUB_CLIP
from lit_vgrpo.rewards.geneval_models import ColorClassifier, ObjectDetector, detector_config, object_crop
from lit_vgrpo.rewards.geneval_rules import CLASSES, Detection, GenEvalRules, official_name, row_error
from lit_vgrpo.rewards.model import Dtype, ModelReward, device_for

HUB_DETECTOR = "facebook/mask2former-swin-small-coco-instance"
Score = Literal["partial", "strict"]


@checked
class GenEval(ModelReward):
    """Score of an image against the requirements of its row, in [0, 1]: rules applied to a detector's objects.

    A row has the official metadata: ``tag``, ``include`` and optionally ``exclude``. Rules, thresholds, prompts and
    grey background are those of the official evaluation, as are the two default models (in mmdet and open_clip there).

    ``score="strict"`` is the official 0 or 1. Most images of an untrained model then score 0, and a group of equal
    scores gives no gradient. The default ``"partial"`` averages over the requirements the share that is met (of the
    requested objects; colours and positions once all objects are present), and subtracts a share for each object in
    excess of ``exclude``. It is 1 exactly where the strict score is. Flow-GRPO's score is similar, but penalises every
    surplus object, even if the row does not exclude it.

    Args:
        detector: hub name or local folder of an object detection model, or of an instance ``Mask2Former``. Detectors
            differ in their confidences: tune the thresholds for any other than the default.
        clip: hub name or local folder of a ``CLIPModel`` with its processor.
        score: ``"partial"`` or ``"strict"``.
        threshold: minimum confidence of an object.
        counting_threshold: the same for rows with the tag ``counting``.
        batch_size: images or crops per forward pass; smaller batches are padded.
        dtype: of the weights.
        device: where the models run; ``"auto"`` follows the images.

    Raises:
        ValueError: an argument out of range.

    Source:
        arXiv 2310.11513 and its evaluation code; the shares after arXiv 2505.05470 (Flow-GRPO).
    """

    name = "geneval"
    weight_files = (("detector", "config.json"), ("clip", "config.json"))
    _detector: ObjectDetector
    _colors: ColorClassifier

    def __init__(
        self,
        detector: str = HUB_DETECTOR,
        clip: str = HUB_CLIP,
        score: Score = "partial",
        threshold: ClosedUnitInterval = 0.3,
        counting_threshold: ClosedUnitInterval = 0.9,
        batch_size: BatchSize = BATCH_SIZE,
        dtype: Dtype = "float32",
        device: str = "auto",
    ) -> None:
        super().__init__(detector, batch_size=batch_size, dtype=dtype, device=device)
        self.rules = GenEvalRules(threshold, counting_threshold)
        self.detector = detector
        self.clip = clip
        self.score = score
        self._known: frozenset[str] | None = None

    def _build(self) -> nn.Module:
        self._detector = ObjectDetector(self.detector, self.dtype, self.option("detector"))
        self._colors = ColorClassifier(self.clip, self.dtype, self.option("clip"))
        return nn.ModuleList([self._detector.model, self._colors.model])

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        """Refuse a row without ``include``, or with classes or relations unknown to the detector or the rules."""
        if self._known is None:
            names = (detector_config(self.detector) or {}).get("id2label", {}).values()
            self._known = frozenset(map(official_name, names)) or frozenset(CLASSES)
        error = row_error(row, self._known)
        return None if error is None else f'Prompt "{prompt}": {error}'

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        errors = [self.prompt_error(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
        self.failure = next((error for error in errors if error is not None), None)
        scores = torch.full((len(rows),), math.nan)
        sound = [index for index, error in enumerate(errors) if error is None]
        for index, share in zip(sound, self.judge(images[sound], [rows[i] for i in sound]), strict=True):
            scores[index] = float(share == 1) if self.score == "strict" else share
        return scores

    @torch.no_grad()
    def judge(self, images: Tensor, rows: list[dict[str, Any]]) -> list[float]:
        """Return the share of each row's requirements that is met, in [0, 1].

        Args:
            images: shape ``(B, 3, H, W)``, float in [0, 1].
            rows: B valid rows.
        """
        if not rows:
            return []
        self.load()
        assert self._model is not None
        self._model.to(device_for(images, self.device))
        pixels = to_uint8(images).cpu()
        objects: list[dict[str, list[Detection]]] = []
        for start in range(0, len(rows), self.batch_size):
            found = self._detector.find(
                filled(pixels[start : start + self.batch_size], self.batch_size), self.rules.least_threshold
            )
            objects += [self.rules.keep(one, row) for one, row in zip(found, rows[start:], strict=False)]
        colored = self._colored(images, objects, rows)
        return [self.rules.judge(one, row) for one, row in zip(colored, rows, strict=True)]

    def _colored(
        self, images: Tensor, objects: list[dict[str, list[Detection]]], rows: list[dict[str, Any]]
    ) -> list[dict[str, list[Detection]]]:
        """Return the objects, those whose color is asked for with their color."""
        asked = [self.rules.to_color(one, row) for one, row in zip(objects, rows, strict=True)]
        pictures = {i: to_pil(images[i : i + 1])[0] for i, detections in enumerate(asked) if detections}
        todo = [(pictures[i], detection) for i, detections in enumerate(asked) for detection in detections]
        seen: dict[int, Detection] = {}
        for start in range(0, len(todo), self.batch_size):
            batch = todo[start : start + self.batch_size]
            full = batch + batch[-1:] * (self.batch_size - len(batch))
            crops = [object_crop(picture, detection) for picture, detection in full]
            names = self._colors.name(crops, [detection.label for _, detection in full])
            seen |= {id(one): replace(one, color=name) for (_, one), name in zip(batch, names, strict=False)}
        return [{label: [seen.get(id(one), one) for one in found] for label, found in o.items()} for o in objects]
