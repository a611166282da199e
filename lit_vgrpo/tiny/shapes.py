"""Images of one coloured shape and prompts that describe them, or ask for another colour: small verifiable tasks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.core.ranges import ClosedUnitInterval, checked

IMAGE_SIZE = 32
BACKGROUND = (0.93, 0.92, 0.90)
PALETTE: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.14, 0.14),
    "green": (0.14, 0.62, 0.22),
    "blue": (0.16, 0.28, 0.86),
    "yellow": (0.95, 0.80, 0.12),
    "purple": (0.66, 0.18, 0.78),
    "cyan": (0.16, 0.76, 0.84),
}
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle")
PLACES: dict[str, tuple[int, int]] = {  # unit step from the centre, x to the right, y down
    "on the left": (-1, 0),
    "on the right": (1, 0),
    "at the top": (0, -1),
    "at the bottom": (0, 1),
}
DIRECTIONS: dict[str, tuple[int, int]] = {"to the left": (-1, 0), "to the right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Unit steps of a shape that moves."""
CHOICES: dict[str, tuple[str, ...]] = {"colour": COLOURS, "shape": SHAPES, "place": tuple(PLACES)}
MOTION_CHOICES: dict[str, tuple[str, ...]] = {"colour": COLOURS, "shape": SHAPES, "motion": tuple(DIRECTIONS)}

OFFSET = 6.5
"""Mean distance of a shape from the picture's centre, pixels."""
_ALONG, _ACROSS = 0.7, 2.0  # pixels: jitter along the direction from the centre, and across it
_RADIUS = (5.0, 6.2)  # pixels
_AREA_PER_RADIUS_SQUARED = {"circle": math.pi, "square": 3.24, "triangle": 2.03}  # similar visual sizes


def prompt_of(colour: str, shape: str, place: str) -> str:
    """Return the prompt of one image, e.g. ``a red circle on the left``."""
    return f"a {colour} {shape} {place}"


def edit_of(colour: str) -> str:
    """Return the prompt that asks for a colour, e.g. ``make it red``."""
    return f"make it {colour}"


def asked_colour(prompt: str) -> str | None:
    """Return the colour that a prompt of :func:`edit_of` asks for, or ``None`` for other prompts."""
    words = prompt.strip().lower().split()
    return words[2] if len(words) == 3 and words[:2] == ["make", "it"] and words[2] in COLOURS else None


def attributes_of(
    prompt: str, row: Mapping[str, Any], choices: Mapping[str, Sequence[str]] = CHOICES
) -> dict[str, str]:
    """Return the attributes that the row's fields, or else the words of the prompt, give exactly one known value."""
    words = f" {' '.join(re.findall('[a-z]+', prompt.lower()))} "
    attributes = {}
    for name, values in choices.items():
        named = [value for value in values if f" {value} " in words] if row.get(name) is None else [str(row[name])]
        if len(named) == 1 and named[0] in values:
            attributes[name] = named[0]
    return attributes


def coverage(shape: str, x: Tensor, y: Tensor, area: Tensor) -> Tensor:
    """Return anti-aliased masks of one of `SHAPES`, ``(B, 32, 32)``: about the fraction of each pixel it covers.

    Args:
        x: Horizontal centroid in pixels, shape ``(B,)``.
        y: Vertical centroid in pixels, downwards, shape ``(B,)``.
        area: Area in square pixels, shape ``(B,)``.
    """
    grid = torch.arange(IMAGE_SIZE, dtype=x.dtype, device=x.device) + 0.5
    dx = (grid - x[:, None])[:, None, :]
    dy = (grid - y[:, None])[:, :, None]
    area = area[:, None, None]
    if shape == "circle":
        distance = (dx.square() + dy.square()).sqrt() - (area / math.pi).sqrt()
    elif shape == "square":
        distance = torch.maximum(dx.abs(), dy.abs()) - area.sqrt() / 2
    else:  # a triangle, equilateral, pointing up: the largest of the distances to its three sides
        inradius = (area / (3 * math.sqrt(3))).sqrt()
        distance = torch.maximum(dx.abs() * (math.sqrt(3) / 2) - dy / 2, dy) - inradius
    return (0.5 - distance).clamp(0, 1)


def area_of(shape: str, size: Tensor) -> Tensor:
    """Return the area in square pixels of a shape whose size is a number in [0, 1]."""
    return _AREA_PER_RADIUS_SQUARED[shape] * (_RADIUS[0] + (_RADIUS[1] - _RADIUS[0]) * size).square()


def render(colour: str, shape: str, place: str, generator: torch.Generator | None = None) -> Tensor:
    """Render one image ``(3, 32, 32)``, float32 in [0, 1], with a random size and position around its place."""
    device = "cpu" if generator is None else generator.device
    u = torch.rand(3, generator=generator, device=device).cpu()
    along, across = OFFSET + _ALONG * (2 * u[1] - 1), _ACROSS * (2 * u[2] - 1)
    step_x, step_y = PLACES[place]
    x = IMAGE_SIZE / 2 + step_x * along + abs(step_y) * across
    y = IMAGE_SIZE / 2 + step_y * along + abs(step_x) * across
    mask = coverage(shape, x[None], y[None], area_of(shape, u[0])[None])
    background = torch.tensor(BACKGROUND)[:, None, None]
    return background + mask * (torch.tensor(PALETTE[colour])[:, None, None] - background)


@checked
class ShapesImages:
    """Training images for the denoising objective, with captions that are often wrong.

    Args:
        caption_noise: Probability, for each of the three attributes independently, that the caption is wrong. A model
            trained on such pairs follows prompts poorly, which leaves room for RL to improve it.
    """

    def __init__(self, caption_noise: ClosedUnitInterval = 0.45) -> None:
        self.caption_noise = caption_noise

    def __call__(
        self, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]], generators: Sequence[torch.Generator]
    ) -> tuple[Tensor, list[str]]:
        """Return each row's image, ``(B, 3, 32, 32)``, float32 in [0, 1], and caption.

        Raises:
            ValueError: A prompt, with its row's fields, does not name all three attributes.
        """
        images, captions = [], []
        for prompt, row, generator in zip(prompts, rows, generators, strict=True):
            true = attributes_of(prompt, row)
            if len(true) < len(CHOICES):
                example = prompt_of("red", "circle", "on the left")
                raise ValueError(f"prompt {prompt!r} does not belong to the shapes task. Write it like {example!r}.")
            images.append(render(**true, generator=generator))
            captions.append(prompt_of(**self._swap(true, generator)))
        return torch.stack(images), captions

    def _swap(self, true: Mapping[str, str], generator: torch.Generator) -> dict[str, str]:
        said = {}
        for name, value in true.items():
            u, pick = torch.rand(2, generator=generator, device=generator.device).tolist()
            others = [other for other in CHOICES[name] if other != value]
            said[name] = others[int(pick * len(others))] if u < self.caption_noise else value
        return said


def redness(images: Tensor, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Tensor:
    """Score images ``(B, 3, H, W)`` by how much red exceeds green and blue, ``(B,)``; hacked on purpose.

    It ignores the prompts, so training draws the same red picture for each of them; see the recipe ``tiny_hacked``.
    """
    return (images[:, 0] - images[:, 1:].amax(1)).clamp(min=0).mean((1, 2))
