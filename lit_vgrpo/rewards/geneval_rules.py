"""GenEval's rules: the share of a prompt's requirements that an image meets, given detections."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from lit_vgrpo.errors import suggestion
from lit_vgrpo.rewards.http import validation_message

Color = Literal["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
Relation = Literal["left of", "right of", "above", "below"]

COLORS: tuple[str, ...] = get_args(Color)
RELATIONS: tuple[str, ...] = get_args(Relation)
# fmt: off
CLASSES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven", "toaster",
    "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)
# fmt: on
# names in COCO and in detectors trained on it
ALIASES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
MAX_OBJECTS = 16  # of a class
POSITION_THRESHOLD = 0.1  # minimum distance of two objects as a share of their extents
DEGENERATE_OFFSET = 1e-3  # pixels


@dataclass
class Detection:
    """A detected object."""

    label: str  # its class, by its GenEval name
    score: float  # the detector's confidence, 0 to 1
    box: tuple[float, float, float, float]  # left, top, right and bottom, pixels
    mask: np.ndarray | None = field(default=None, repr=False, compare=False)  # (H, W), bool, from a segmenter
    color: str | None = None  # one of COLORS, once it is known


Objects = dict[str, list[Detection]]
"""Detections by class, the most confident first."""


def objects_by_class(detections: Sequence[Detection], threshold: float) -> Objects:
    """Return the detections above a confidence, at most ``MAX_OBJECTS`` of a class."""
    by_class: Objects = {}
    for detection in sorted(detections, key=lambda detection: -detection.score):
        if detection.score > threshold:
            by_class.setdefault(detection.label, []).append(detection)
    return {label: objects[:MAX_OBJECTS] for label, objects in by_class.items()}


def objects_to_color(objects: Objects, row: dict[str, Any]) -> list[Detection]:
    """Return the objects whose colour :func:`judge` needs."""
    asked: dict[int, Detection] = {}
    for need in row["include"]:
        detections = objects.get(need["class"], [])[: need["count"]]
        if need.get("color") and len(detections) == need["count"]:
            asked.update((id(detection), detection) for detection in detections)
    return list(asked.values())


def judge(objects: Objects, row: dict[str, Any]) -> float:
    """Return the share of a row's requirements that is met, in [0, 1]; 1 exactly when GenEval's result is true.

    The objects of :func:`objects_to_color` must have their colour.

    Source:
        arXiv 2310.11513 and its evaluation code.
    """
    shares: list[float] = []
    groups: list[list[Detection] | None] = []  # per requirement, None if not met
    for need in row["include"]:
        wanted, detections = need["count"], objects.get(need["class"], [])[: need["count"]]
        shares.append(len(detections) / wanted)
        is_met = len(detections) == wanted
        if need.get("color"):
            shares.append(sum(detection.color == need["color"] for detection in detections) / wanted if is_met else 0.0)
            is_met = shares[-1] == 1
        if need.get("position"):
            relation, target = need["position"]
            hits = [relation in relations(one.box, other.box) for one in detections for other in groups[target] or []]
            shares.append(sum(hits) / len(hits) if is_met and hits else 0.0)
            is_met = shares[-1] == 1
        groups.append(detections if is_met else None)
    kept = math.prod(_share_kept(objects, excess) for excess in row.get("exclude") or ())
    return kept * sum(shares) / len(shares)


def relations(a: Sequence[float], b: Sequence[float]) -> set[str]:
    """Return where box ``a`` is relative to box ``b``: at most one relation per axis, none if they overlap much."""
    offset = [(a[i] + a[i + 2] - b[i] - b[i + 2]) / 2 for i in (0, 1)]
    slack = [POSITION_THRESHOLD * (abs(a[i + 2] - a[i]) + abs(b[i + 2] - b[i])) for i in (0, 1)]
    beyond = [math.copysign(max(abs(o) - s, 0), o) for o, s in zip(offset, slack, strict=True)]
    if all(abs(distance) < DEGENERATE_OFFSET for distance in beyond):
        return set()
    dx, dy = (distance / math.hypot(*offset) for distance in beyond)
    holds = {"left of": dx < -0.5, "right of": dx > 0.5, "above": dy < -0.5, "below": dy > 0.5}
    return {relation for relation, is_so in holds.items() if is_so}


def official_name(label: str) -> str:
    """Return GenEval's name of a detector's class, such as tv for tvmonitor."""
    return ALIASES.get(label, label)


class _Need(BaseModel):
    """An object that a row asks for."""

    model_config = ConfigDict(strict=True)

    label: str = Field(alias="class")
    count: PositiveInt
    color: Color | None = None
    position: Annotated[tuple[Relation, NonNegativeInt], Field(strict=False)] | None = None


class _Row(BaseModel):
    include: list[_Need] = Field(min_length=1)
    exclude: list[_Need] | None = None


def row_error(row: dict[str, Any], known: Collection[str] = CLASSES) -> str | None:
    """Return why a row cannot be judged by a detector of the known classes, in one line, or None.

    The official metadata are ``include``, a list of ``{"class", "count", "color", "position"}`` of which the last two
    are optional, and optionally ``exclude``, a list of ``{"class", "count"}``.
    """
    try:
        needs = _Row.model_validate(row)
    except ValidationError as error:
        return f"{validation_message(error)}. Use GenEval's metadata: include=[{{class: bench, count: 1}}]."
    for need in (*needs.include, *(needs.exclude or [])):
        if need.label not in known:
            return f"class={need.label!r} is not a class of the detector. {suggestion(need.label, known)}"
    for number, need in enumerate(needs.include):
        if need.position is not None and need.position[1] >= number:
            return f"include[{number}].position does not refer to an earlier requirement. Use a number below {number}."
    return None


def _share_kept(objects: Objects, excess: dict[str, Any]) -> float:
    """Return 1 if fewer objects than excluded are present, else less by a share for each surplus object."""
    number, allowed = len(objects.get(excess["class"], [])), excess["count"] - 1
    if number <= allowed:
        return 1.0
    return max(0.0, 1 - (number - allowed) / allowed) if allowed else 0.0
