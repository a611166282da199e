"""Videos of one moving coloured shape, and prompts that name its direction."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_vgrpo.tiny import shapes
from lit_vgrpo.tiny.shapes import BACKGROUND, COLOURS, IMAGE_SIZE, PALETTE, SHAPES, area_of, coverage

FRAMES = 5
DIRECTIONS: dict[str, tuple[int, int]] = {  # unit step, x to the right, y down
    "to the left": (-1, 0),
    "to the right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
}
CHOICES: dict[str, tuple[str, ...]] = {"colour": COLOURS, "shape": SHAPES, "motion": tuple(DIRECTIONS)}
_TRAVEL = (8.0, 12.0)  # pixels from the first frame to the last
_JITTER = 3.0  # pixels around the image's centre, halfway through


def prompt_of(colour: str, shape: str, motion: str) -> str:
    """Return the prompt of one video, e.g. ``a red circle moves up``."""
    return f"a {colour} {shape} moves {motion}"


def render(colour: str, shape: str, motion: str, generator: torch.Generator) -> Tensor:
    """Render one video ``(5, 3, 32, 32)``, float32 in [0, 1], with a random size, place and speed."""
    u = torch.rand(4, generator=generator)
    travel = (_TRAVEL[0] + (_TRAVEL[1] - _TRAVEL[0]) * u[0]) * (torch.arange(FRAMES) / (FRAMES - 1) - 0.5)
    x, y = (
        IMAGE_SIZE / 2 + step * travel + _JITTER * (2 * offset - 1)
        for step, offset in zip(DIRECTIONS[motion], u[1:3], strict=True)
    )
    mask = coverage(shape, x, y, area_of(shape, u[3]).expand(FRAMES))[:, None]
    background = torch.tensor(BACKGROUND)[:, None, None]
    return background + mask * (torch.tensor(PALETTE[colour])[:, None, None] - background)


def prompt_rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the prompts to train on and those held out, see :func:`lit_vgrpo.tiny.shapes.prompt_rows`."""
    return shapes.prompt_rows(CHOICES, prompt_of)
