"""What happens to an update whose loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

MOST_IN_A_ROW = 10

NonFinite = Literal["stop", "skip"]


class NonFiniteGuard:
    """Finds losses and gradients that are not finite and decides the same on every rank.

    Args:
        action: end the run with the reason, or leave the update out; ten left out in a row end the run too.

    Raises:
        ValueError: another action.
    """

    def __init__(self, action: NonFinite = "stop") -> None:
        if action not in ("stop", "skip"):
            raise ValueError(f"model.non_finite={action} is not known. Use stop or skip.")
        self.action = action
        self.skipped = 0
        self._in_a_row = 0
        self._losses: list[Tensor] = []

    def watch(self, loss: Tensor) -> None:
        """Remember a micro-batch's loss; nothing is read from the device yet."""
        self._losses.append(loss.detach())

    def refuses(
        self, gradients: Iterable[Tensor], all_ranks: Callable[[Tensor], Tensor], when: str, overflow: bool = False
    ) -> bool:
        """Whether this update must be left out; called once for each update, on every rank.

        Args:
            gradients: this rank's gradients, or its shards of them.
            all_ranks: concatenates every rank's ``(B, ...)`` in rank order.
            when: where the run is, for the message.
            overflow: the strategy has found a gradient that is not finite itself.

        Raises:
            FloatingPointError: on every rank, where the action is to stop.
        """
        losses, self._losses = self._losses, []
        loss_is_bad, gradient_is_bad = not all_finite(losses), overflow or not all_finite(gradients)
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
        advice += "." if self.action == "skip" else ", or leave such updates out: model.non_finite=skip."
        raise FloatingPointError(
            f"The {what} is not finite{where}{often}, {when}. No weight was changed by it. {advice}"
        )


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every value of every tensor is finite; the device is waited for once."""
    found = [tensor.isfinite().all() for tensor in tensors]
    return not found or bool(torch.stack(found).all())
