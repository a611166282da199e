"""Pictures of one coloured shape and prompts that ask for another colour: a small verifiable task of editing."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_vgrpo.tiny.shapes import COLOURS, PLACES, SHAPES, render

WORDS = ("make", "it", *COLOURS)


def edit_of(colour: str) -> str:
    """Return the prompt that asks for a colour, e.g. ``make it red``."""
    return f"make it {colour}"


def asked_colour(prompt: str) -> str | None:
    """Return the colour that a prompt of :func:`edit_of` asks for, or ``None`` for other prompts."""
    words = prompt.strip().lower().split()
    return words[2] if len(words) == 3 and words[:2] == ["make", "it"] and words[2] in COLOURS else None


def random_edits(count: int, generator: torch.Generator, prompt_noise: float = 0.0) -> tuple[Tensor, Tensor, list[str]]:
    """Render pictures, each in two colours, and the prompts from one to the other.

    Args:
        count: number of pairs.
        generator: source of all attributes, places and sizes.
        prompt_noise: probability that a prompt asks for another colour than that of the edited picture.

    Returns:
        The pictures before and after, ``(count, 3, 32, 32)`` each, in [0, 1], and the prompts.
    """

    def pick(most: int) -> int:
        return int(torch.randint(most, (1,), generator=generator))

    before: list[Tensor] = []
    after: list[Tensor] = []
    prompts: list[str] = []
    for _ in range(count):
        colours = torch.randperm(len(COLOURS), generator=generator).tolist()
        shape, place, seed = SHAPES[pick(len(SHAPES))], list(PLACES)[pick(len(PLACES))], pick(2**31)
        for pictures, colour in ((before, colours[0]), (after, colours[1])):
            same_place = torch.Generator().manual_seed(seed)
            pictures.append(render(COLOURS[colour], shape, place, generator=same_place))
        is_wrong = float(torch.rand(1, generator=generator)) < prompt_noise
        prompts.append(edit_of(COLOURS[colours[2 + pick(len(COLOURS) - 2)] if is_wrong else colours[1]]))
    return torch.stack(before), torch.stack(after), prompts
