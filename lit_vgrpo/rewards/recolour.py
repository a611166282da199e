"""A verifiable reward for the tiny editing task: the asked colour, and nothing else changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.core.pictures import picture_error
from lit_vgrpo.rewards.base import Reward
from lit_vgrpo.rewards.shapes import recognise
from lit_vgrpo.tiny.edits import asked_colour, edit_of
from lit_vgrpo.tiny.shapes import COLOURS


class RecolourReward(Reward):
    """Correctness of edits such as ``make it red`` of pictures of one shape, 0 to 1.

    The mean of two checks against the edited picture, same shape and same place, each 0 or 1; 0 if the shape does not
    have the asked colour. An unchanged copy scores 0, as no prompt asks for the colour that its picture has.
    """

    name = "recolour"

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        if asked_colour(prompt) is None:
            return f'Prompt "{prompt}" asks for no colour. Write prompts such as {edit_of(COLOURS[0])!r}.'
        return picture_error(prompt, row)

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
