"""Verifiable rewards for the tiny tasks: find the shape, then check its colour, kind and place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_vgrpo.core.pictures import picture_error, several_pictures_error
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.errors import shortened
from lit_vgrpo.rewards.base import Reward
from lit_vgrpo.tiny.shapes import (
    CHOICES,
    COLOURS,
    DIRECTIONS,
    IMAGE_SIZE,
    MOTION_CHOICES,
    OFFSET,
    PALETTE,
    PLACES,
    SHAPES,
    asked_colour,
    attributes_of,
    coverage,
    edit_of,
)

_MIN_CONTRAST = 0.25  # RGB distance of the shape from the background
_MIN_AREA, _MAX_AREA = 20.0, 300.0  # pixels at 32 x 32; the task's shapes have 50 to 125
_MIN_SHARE = 0.7  # of the foreground in the largest blob: rejects images of two shapes
_MAX_COLOUR_DISTANCE = 0.35  # RGB; the closest two colours of the palette are 0.52 apart
NOTHING = -2  # index where nothing was recognised
_MIN_MOTION = 4.0  # pixels at 32 x 32
_MIN_OVERLAP = 0.7  # intersection over union with the best template
_COLOUR_SCALE, _PLACE_SCALE, _OVERLAP_SCALE = 0.3, 4.0, 0.05  # RGB distance, pixels, intersection over union


@checked
class ShapesReward(Reward):
    """Correctness of colour, shape and place for prompts such as ``a red circle on the left``.

    Each check is 0 or 1; an image without exactly one shape fails all of them. The attributes come from the row's
    fields ``colour``, ``shape`` and ``place``, else from the prompt; one that does not name exactly one of each scores
    NaN.

    Args:
        check: One check, or ``"mean"`` for the mean of the three.
    """

    prefix: ClassVar[str] = ""

    def __init__(self, check: Literal["mean", "colour", "shape", "place"] = "mean") -> None:
        self.checked = tuple(CHOICES) if check == "mean" else (check,)
        self.name = self.prefix + ("shapes" if check == "mean" else check)

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        return _missing(self.checked, attributes_of(prompt, row), prompt, "a red circle on the left")

    def __call__(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Tensor:
        passed = self.checks(images)
        wanted = [attributes_of(prompt, row) for prompt, row in zip(prompts, rows, strict=True)]
        scores = images.new_zeros(len(prompts))
        for name in self.checked:
            indices = [CHOICES[name].index(w[name]) if name in w else -1 for w in wanted]
            target = torch.tensor(indices, dtype=torch.long, device=images.device)
            target_scores = passed[name].gather(1, target.clamp(min=0)[:, None])[:, 0]
            scores = scores + torch.where(target < 0, torch.nan, target_scores)
        return scores / len(self.checked)

    def checks(self, images: Tensor) -> dict[str, Tensor]:
        """Return, by attribute, how well the images show each of its `CHOICES`, ``(B, choices)``: 0 or 1."""
        seen = recognise(images)
        return {
            name: (seen[name][:, None] == torch.arange(len(choices), device=images.device)).float()
            for name, choices in CHOICES.items()
        }


class SmoothShapesReward(ShapesReward):
    """Colour, shape and place as smooth functions of the picture, 0 to 1: a gradient for the tiny task.

    It assumes that the picture shows one shape, so a policy can cheat: hold out :class:`ShapesReward`, which checks.

    Args:
        check: One attribute, or ``"mean"`` for the mean of the three.
    """

    differentiable = True
    prefix: ClassVar[str] = "smooth_"

    def checks(self, images: Tensor) -> dict[str, Tensor]:
        """Return smooth values in (0, 1), from the pixels' contrast with the border and its centroid; carry grad."""
        images = at_task_size(images)
        contrast = (images - border(images).mean(dim=-1)[:, :, None, None]).square().sum(1)
        weight = contrast.square() / (contrast.square() + _MIN_CONTRAST**4)
        area = weight.sum((1, 2)) + 1e-3
        grid = torch.arange(IMAGE_SIZE, dtype=images.dtype, device=images.device) + 0.5
        x, y = (weight.sum(1) * grid).sum(1) / area, (weight.sum(2) * grid).sum(1) / area
        colour = torch.einsum("bchw,bhw->bc", images, weight) / area[:, None]
        centre = torch.stack([x, y], 1) - IMAGE_SIZE / 2
        return {
            "colour": _nearness(colour, images.new_tensor([PALETTE[name] for name in COLOURS]), _COLOUR_SCALE),
            "shape": (_overlaps(weight, x, y, area) / _OVERLAP_SCALE).softmax(1),
            "place": _nearness(centre, OFFSET * images.new_tensor(list(PLACES.values())), _PLACE_SCALE),
        }


def _nearness(values: Tensor, choices: Tensor, scale: float) -> Tensor:
    """Return ``1 / (1 + d^2 / scale^2)`` of the distances of values ``(B, D)`` from choices ``(N, D)``, ``(B, N)``."""
    return 1 / (1 + (values[:, None] - choices).square().sum(2) / scale**2)


class RecolourReward(Reward):
    """Correctness of edits such as ``make it red`` of pictures of one shape, 0 to 1.

    The mean of two checks against the edited picture, same shape and same place, each 0 or 1; 0 if the shape does not
    have the requested colour. An unchanged copy scores 0, as no prompt asks for the colour that its picture has.
    """

    name = "recolour"

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        if asked_colour(prompt) is None:
            advice = f"Write prompts such as {edit_of(COLOURS[0])!r}."
            return f'Prompt "{shortened(prompt)}" does not ask for a colour. {advice}'
        return picture_error(prompt, row) or several_pictures_error(prompt, row)

    def __call__(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        if references is None:
            return torch.full((len(images),), torch.nan, device=images.device)
        seen, given = recognise(images), recognise(references.to(images.device))
        asked = [asked_colour(prompt) for prompt in prompts]
        target = torch.tensor([COLOURS.index(name) if name else -1 for name in asked], device=images.device)
        kept = torch.stack([(seen[name] == given[name]).float() for name in ("shape", "place")]).mean(0)
        is_change = (seen["colour"] == target) & (given["colour"] != target)
        return torch.where(target < 0, torch.nan, is_change * kept)


@checked
class MotionReward(Reward):
    """Correctness of colour, shape and motion of videos for prompts such as ``a red circle moves up``.

    Each check is 0 or 1; a video fails all of them unless every frame shows exactly one shape. Colour and shape must be
    right in every frame. From the first frame to the last, the shape must move by at least 4 of 32 pixels, and at least
    twice as far in the right direction as across it. The attributes come from the row's fields ``colour``, ``shape``
    and ``motion``, else from the prompt; a prompt that does not name exactly one of each scores NaN.

    Args:
        check: One check, or ``"mean"`` for the mean of the three.
    """

    takes_videos = True

    def __init__(self, check: Literal["mean", "colour", "shape", "motion"] = "mean") -> None:
        self.checked = tuple(MOTION_CHOICES) if check == "mean" else (check,)
        self.name = "shapes_in_motion" if check == "mean" else check

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        return _missing(self.checked, attributes_of(prompt, row, MOTION_CHOICES), prompt, "a red circle moves up")

    def __call__(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Tensor:
        frames = images.shape[1]
        seen = {name: values.unflatten(0, (-1, frames)) for name, values in recognise(images.flatten(0, 1)).items()}
        moved = torch.stack([seen[name][:, -1] - seen[name][:, 0] for name in ("x", "y")], dim=1)
        is_shape = (seen["shape"] != NOTHING).all(1)
        scores = images.new_zeros(len(prompts))
        for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            wanted = attributes_of(prompt, row, MOTION_CHOICES)
            if any(name not in wanted for name in self.checked):
                scores[number] = torch.nan
                continue
            step = moved.new_tensor(DIRECTIONS.get(wanted.get("motion", ""), (0, 0)))
            along, across = (moved[number] * step).sum(), (moved[number] * step.flip(0)).sum().abs()
            passed: dict[str, Tensor] = {
                name: (seen[name][number] == CHOICES[name].index(wanted[name])).all()
                for name in ("colour", "shape")
                if name in wanted
            }
            passed["motion"] = (along >= _MIN_MOTION) & (along >= 2 * across)
            scores[number] = is_shape[number] * sum(passed[name].float() for name in self.checked) / len(self.checked)
        return scores


def _missing(needed: Sequence[str], named: Mapping[str, str], prompt: str, example: str) -> str | None:
    """Return an error for the first attribute that a prompt does not name; ``None`` if it names all."""
    missing = next((name for name in needed if name not in named), None)
    return missing and f'Prompt "{shortened(prompt)}" must name one {missing}. Write prompts such as {example!r}.'


def recognise(images: Tensor) -> dict[str, Tensor]:
    """Recognise colour, shape and place in images ``(B, 3, H, W)`` in [0, 1], resized to 32 x 32 if necessary.

    Each is ``(B,)``, long: the index in `CHOICES`, or :data:`NOTHING`. ``x`` and ``y`` are the centroid in pixels.
    """
    images = at_task_size(images.detach().float())
    colours = border(images).sort(dim=-1).values  # median() is not deterministic on a GPU
    background = colours[..., (colours.shape[-1] - 1) // 2, None, None]
    contrast = (images - background).square().sum(1).sqrt()  # (B, 32, 32)
    peak = contrast.flatten(1).topk(16, dim=1).values.mean(1)
    alpha = (contrast / peak.clamp_min(1e-6)[:, None, None]).clamp(0, 1)
    # a majority vote in each 3 x 3 neighbourhood drops specks and fills holes
    foreground = F.avg_pool2d((alpha > 0.5).float(), 3, 1, 1) > 4.5 / 9
    blob = _largest_blob(foreground)

    size = blob.flatten(1).sum(1)
    share = size / foreground.flatten(1).sum(1).clamp_min(1)
    valid = (peak > _MIN_CONTRAST) & (size >= _MIN_AREA) & (size <= _MAX_AREA) & (share >= _MIN_SHARE)

    # Steeper than the edge itself: the outline is at half contrast however blurred the image is.
    weight = (2 * alpha - 0.5).clamp(0, 1) * _dilate(blob)
    area = weight.flatten(1).sum(1).clamp_min(1)
    grid = torch.arange(IMAGE_SIZE, device=images.device) + 0.5
    x = (weight.sum(1) * grid).sum(1) / area
    y = (weight.sum(2) * grid).sum(1) / area
    none = torch.full_like(size, NOTHING, dtype=torch.long)
    indices = {"colour": _colour(images, weight), "shape": _shape(weight, x, y, area), "place": _place(x, y)}
    return {**{name: torch.where(valid, index, none) for name, index in indices.items()}, "x": x, "y": y}


def at_task_size(images: Tensor) -> Tensor:
    """Return images ``(B, 3, H, W)`` resized to the task's size."""
    side = (IMAGE_SIZE, IMAGE_SIZE)
    return images if images.shape[-2:] == side else F.interpolate(images, side, mode="bilinear", antialias=True)


def border(images: Tensor) -> Tensor:
    """Return the pixels at the edges of images, ``(B, 3, N)``."""
    edges = [images[:, :, 0], images[:, :, -1], images[:, :, 1:-1, 0], images[:, :, 1:-1, -1]]
    return torch.cat(edges, dim=-1)


def _colour(images: Tensor, weight: Tensor) -> Tensor:
    core = weight * (weight > 0.7)
    mean = torch.einsum("bchw,bhw->bc", images, core) / core.flatten(1).sum(1, keepdim=True).clamp_min(1e-6)
    distance, index = torch.cdist(mean, torch.tensor([PALETTE[c] for c in COLOURS], device=images.device)).min(1)
    return torch.where(distance <= _MAX_COLOUR_DISTANCE, index, NOTHING)


def _shape(weight: Tensor, x: Tensor, y: Tensor, area: Tensor) -> Tensor:
    overlap, index = _overlaps(weight, x, y, area).max(1)
    return torch.where(overlap >= _MIN_OVERLAP, index, NOTHING)


def _overlaps(weight: Tensor, x: Tensor, y: Tensor, area: Tensor) -> Tensor:
    """Return the overlap with each shape's template, drawn with the blob's centroid and area, ``(B, shapes)``."""
    overlaps = []
    for shape in SHAPES:
        template = coverage(shape, x, y, area)
        shared = torch.minimum(weight, template).flatten(1).sum(1)
        overlaps.append(shared / (area + template.flatten(1).sum(1) - shared))
    return torch.stack(overlaps, 1)


def _place(x: Tensor, y: Tensor) -> Tensor:
    offset = torch.stack([x, y], 1) - IMAGE_SIZE / 2
    steps = torch.tensor(list(PLACES.values()), dtype=offset.dtype, device=offset.device)
    along, index = (offset @ steps.T).max(1)
    # In the middle, or on a diagonal, the place is ambiguous.
    clear = (along >= 2.5) & (along >= math.sqrt(0.5) * offset.norm(dim=1) * 1.1)
    return torch.where(clear, index, NOTHING)


def _dilate(mask: Tensor) -> Tensor:
    return F.max_pool2d(mask.float(), 3, 1, 1) > 0


def _largest_blob(mask: Tensor) -> Tensor:
    """Return the connected region around the mask's densest point, grown by up to 24 pixels."""
    density = F.avg_pool2d(mask.float()[:, None], 7, 1, 3)[:, 0].masked_fill(~mask, -1)
    blob = torch.zeros_like(mask)
    blob.flatten(1)[torch.arange(len(mask), device=mask.device), density.flatten(1).argmax(1)] = True
    blob &= mask
    for _ in range(12):
        grown = _dilate(_dilate(blob) & mask) & mask
        if torch.equal(grown, blob):
            break
        blob = grown
    return blob
