"""Handling of updates with a non-finite loss or gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

MOST_IN_A_ROW = 10

NonFinite = Literal["stop", "skip"]


class NonFiniteGuard:
    """Detector of non-finite losses and gradients that decides the same on every rank.

    Args:
        action: stop the run with the reason, or skip the update; ten consecutive skips also stop the run.
    """

    def __init__(self, action: NonFinite = "stop") -> None:
        self.action = action
        self.skipped = 0
        self._in_a_row = 0
        self._losses: list[Tensor] = []

    def watch(self, loss: Tensor) -> None:
        """Record a micro-batch's loss without synchronising with the device."""
        self._losses.append(loss.detach())

    def refuses(
        self,
        gradients: Iterable[Tensor],
        all_ranks: Callable[[Tensor], Tensor],
        when: str,
        norm: Tensor | None = None,
    ) -> bool:
        """Return whether to skip this update; called once per update, on every rank.

        Args:
            gradients: this rank's gradients, or its shards of them.
            all_ranks: concatenates every rank's ``(B, ...)`` in rank order.
            when: the position in the run, for the message.
            norm: a norm of theirs; they are looked at only where it is not finite, since squares may overflow.

        Raises:
            FloatingPointError: on every rank, if the action is to stop.
        """
        losses, self._losses = self._losses, []
        loss_is_bad, norm_is_bad = _are_bad(losses, norm)
        gradient_is_bad = norm_is_bad and not all_finite(gradients)
        found = all_ranks(torch.tensor([[int(loss_is_bad), int(gradient_is_bad)]])).bool()
        if not found.any():
            self._in_a_row = 0
            return False
        self.skipped += 1
        self._in_a_row += 1
        if self.action == "skip" and self._in_a_row < MOST_IN_A_ROW:
            return True
        what = "loss" if found[:, 0].any() else "gradient"
        ranks = [str(rank) for rank, bad in enumerate(found[:, 0] if what == "loss" else found[:, 1]) if bad]
        where = f" on rank {', '.join(ranks)} of {len(found)}" if len(found) > 1 else ""
        often = f" for {self._in_a_row} updates in a row" if self.action == "skip" else ""
        advice = "Lower model.optimizer.lr or set trainer.gradient_clip_val=1.0"
        advice += "." if self.action == "skip" else ", or skip such updates: model.non_finite=skip."
        raise FloatingPointError(
            f"The {what} is not finite{where}{often}, {when}. No weight was changed by it. {advice}"
        )


def _are_bad(losses: list[Tensor], norm: Tensor | None) -> tuple[bool, bool]:
    """Return whether a loss is not finite, and whether the norm is not or is unknown, with one synchronisation."""
    numbers = [*losses, *([] if norm is None else [norm])]
    if not numbers:
        return False, True
    device = numbers[0].device
    finite = torch.stack([number.to(device, torch.float32) for number in numbers]).isfinite().tolist()
    return not all(finite[: len(losses)]), norm is None or not finite[-1]


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether every value of every tensor is finite, with one device synchronisation."""
    found = [tensor.isfinite().all() for tensor in tensors]
    return not found or bool(torch.stack(found).all())
