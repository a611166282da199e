"""GenEval: whether an image shows the objects, numbers, colours and positions of its prompt."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lit_vgrpo.core.batches import BATCH_SIZE, filled
from lit_vgrpo.core.pixels import to_pil, to_uint8
from lit_vgrpo.core.ranges import BatchSize, ClosedUnitInterval, checked
from lit_vgrpo.rewards.base import Reward
from lit_vgrpo.rewards.geneval_colors import ColorClassifier, color_model_error, object_crop
from lit_vgrpo.rewards.geneval_detector import ObjectDetector, class_names, detector_config, detector_error
from lit_vgrpo.rewards.geneval_rules import CLASSES, Detection, GenEvalRules, Verdict, row_error
from lit_vgrpo.rewards.model import Dtype, check_arguments, device_for
from lit_vgrpo.system.hub import LoadError, quiet_libraries

HUB_DETECTOR = "facebook/mask2former-swin-small-coco-instance"
HUB_CLIP = "openai/clip-vit-large-patch14"
Score = Literal["partial", "strict"]


@checked
class GenEval(Reward):
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
        max_overlap: of two objects of a class with at least this intersection over union, one is dropped; 1 drops none.
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

    def __init__(
        self,
        detector: str = HUB_DETECTOR,
        clip: str = HUB_CLIP,
        score: Score = "partial",
        threshold: ClosedUnitInterval = 0.3,
        counting_threshold: ClosedUnitInterval = 0.9,
        max_overlap: ClosedUnitInterval = 1.0,
        batch_size: BatchSize = BATCH_SIZE,
        dtype: Dtype = "float32",
        device: str = "auto",
    ) -> None:
        if score not in get_args(Score):
            raise ValueError(f"score={score!r} is unknown. Use one of: {', '.join(get_args(Score))}.")
        check_arguments(batch_size, dtype, device)
        self.rules = GenEvalRules(threshold, counting_threshold, max_overlap=max_overlap)
        self.detector = detector
        self.clip = clip
        self.score = score
        self.batch_size = batch_size
        self.dtype = dtype
        self.device = device
        self.concurrent = device == "cpu"
        self._known: frozenset[str] | None = None
        self._detector: ObjectDetector | None = None
        self._colors: ColorClassifier | None = None

    def check(self) -> list[str]:
        """Report a missing folder or file, a model of another family, or weights neither cached nor reachable."""
        of_detector = detector_error(self.detector, self.option("detector"))
        of_clip = color_model_error(self.clip, self.option("clip"))
        return [error for error in (of_detector, of_clip) if error]

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        """Refuse a row without ``include``, or with classes or relations unknown to the detector or the rules."""
        if self._known is None:
            config = detector_config(self.detector)
            self._known = frozenset(class_names(config) if config else CLASSES)
        error = row_error(row, self._known)
        return None if error is None else f'Prompt "{prompt}": {error}'

    def load(self) -> None:
        """Load detector and CLIP; a second call does nothing.

        Raises:
            LoadError: an error of :meth:`check`, or files with the wrong content.
        """
        if self._colors is not None:
            return
        for error in self.check():
            raise LoadError(error)
        with quiet_libraries():
            self._detector = ObjectDetector(self.detector, self.dtype, self.option("detector"))
            self._colors = ColorClassifier(self.clip, self.dtype, self.option("clip"))
        for model in (self._detector.model, self._colors.model):
            model.eval().requires_grad_(False)

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        errors = [self.prompt_error(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
        self.failure = next((error for error in errors if error is not None), None)
        scores = torch.full((len(rows),), math.nan)
        sound = [index for index, error in enumerate(errors) if error is None]
        for index, verdict in zip(sound, self.judge(images[sound], [rows[i] for i in sound]), strict=True):
            scores[index] = float(verdict.correct) if self.score == "strict" else verdict.partial
        return scores

    @torch.no_grad()
    def judge(self, images: Tensor, rows: list[dict[str, Any]]) -> list[Verdict]:
        """Return which requirements are met and which are not, with the reasons.

        Args:
            images: shape ``(B, 3, H, W)``, float in [0, 1].
            rows: B valid rows.
        """
        if not rows:
            return []
        self.load()
        assert self._detector is not None
        assert self._colors is not None
        device = device_for(images, self.device)
        for model in (self._detector.model, self._colors.model):
            model.to(device)
        pixels = to_uint8(images).cpu()
        objects: list[dict[str, list[Detection]]] = []
        for start in range(0, len(rows), self.batch_size):
            found = self._detector.find(
                filled(pixels[start : start + self.batch_size], self.batch_size), self.rules.least_threshold
            )
            objects += [self.rules.keep(one, row) for one, row in zip(found, rows[start:], strict=False)]
        self._color(images, objects, rows)
        return [self.rules.judge(one, row) for one, row in zip(objects, rows, strict=True)]

    def _color(self, images: Tensor, objects: list[dict[str, list[Detection]]], rows: list[dict[str, Any]]) -> None:
        assert self._colors is not None
        asked = [self.rules.to_color(one, row) for one, row in zip(objects, rows, strict=True)]
        pictures = {i: to_pil(images[i : i + 1])[0] for i, detections in enumerate(asked) if detections}
        todo = [(pictures[i], detection) for i, detections in enumerate(asked) for detection in detections]
        for start in range(0, len(todo), self.batch_size):
            batch = todo[start : start + self.batch_size]
            full = batch + batch[-1:] * (self.batch_size - len(batch))
            crops = [object_crop(picture, detection) for picture, detection in full]
            names = self._colors.name(crops, [detection.label for _, detection in full])
            for (_, detection), name in zip(batch, names, strict=False):
                detection.color = name
