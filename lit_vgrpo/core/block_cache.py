"""Options of the caches that skip a transformer's blocks in some steps of a rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lit_vgrpo.core.ranges import Range, checked

DEFAULTS: dict[str, dict[str, float]] = {
    "taylorseer": {"interval": 3, "warm_up": 3, "order": 1},
    "first_block": {"threshold": 0.1},
}
"""The options of each kind, with what null stands for."""


@checked
@dataclass(frozen=True)
class BlockCache:
    """One of diffusers' caches, which skips a transformer's blocks in some sampling steps.

    Args:
        kind: ``taylorseer`` skips all blocks in fixed steps and extrapolates the network's output from earlier steps
            (arXiv 2503.06923), separately for each image. ``first_block`` runs the first block and adds what the others
            last added, as long as the first one's output has changed little since; it decides for a batch as a whole,
            so an image depends on its batch.
        interval: with ``taylorseer``, steps from one full pass to the next after the warm-up; null is 3.
        warm_up: with ``taylorseer``, full passes before the first skipped step; null is 3.
        order: with ``taylorseer``, order of the extrapolation, 0 to repeat the last output; null is 1.
        threshold: with ``first_block``, largest relative change of the first block's output for which the others are
            skipped, 0 to skip none; null is 0.1.
    """

    kind: Literal["taylorseer", "first_block"]
    interval: Annotated[int, Range(2, 1000, example=3)] | None = None
    warm_up: Annotated[int, Range(1, 1000, example=3)] | None = None
    order: Annotated[int, Range(0, 4, example=1)] | None = None
    threshold: Annotated[float, Range(0, 100, example=0.1)] | None = None

    def options(self) -> dict[str, float]:
        """Return the options of this kind, without nulls."""
        given = {name: getattr(self, name) for name in DEFAULTS[self.kind]}
        return DEFAULTS[self.kind] | {name: value for name, value in given.items() if value is not None}

    def errors(self, where: str, steps: int) -> list[str]:
        """Return settings without effect, one line each.

        Args:
            where: the key of these options, for the message.
            steps: sampling steps of the rollout.
        """
        for name in ("interval", "warm_up", "order", "threshold"):
            value = getattr(self, name)
            if value is not None and name not in DEFAULTS[self.kind]:
                return [f"{where}.{name}={value} has no effect with kind={self.kind}. Leave it out."]
        if self.kind == "taylorseer" and steps <= self.options()["warm_up"]:
            return [
                f"{where} skips nothing: all {steps} steps are its warm-up. Use more steps, or {where}.warm_up=1."
                if steps > 1
                else f"{where} skips nothing in a single step. Leave it out."
            ]
        return []
