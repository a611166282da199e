"""Decides which updates take their step: those with finite losses and gradients, and a fitting loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lit_vgrpo.core.nonfinite import NonFiniteGuard
from lit_vgrpo.training.zero import local_gradients


class UpdateGuard(NonFiniteGuard):
    """Skips updates whose loss or gradient is not finite, and reports which updates took their step.

    With a gradient scaler (``trainer.precision=16-mixed``) only losses are checked: the scaler skips steps with an
    overflow itself, and occasional overflows are how it chooses its scale.

    Attributes:
        norm: of the last update's gradient over all ranks, before clipping; ``None`` where the strategy keeps
            the gradients elsewhere, as ZeRO does.

    Args:
        action: end the run with the reason, or leave the update out; ten left out in a row end the run too.
    """

    norm: Tensor | None = None
    _is_refused = False
    _scale: float | None = None

    def look(
        self, trainer: Any, weights: Sequence[nn.Parameter], all_ranks: Callable[[Tensor], Tensor], when: str
    ) -> None:
        """Check an update's losses and gradients before its step, and drop the gradients to skip it.

        Args:
            all_ranks: concatenates every rank's ``(B, ...)`` in rank order.
            when: the current update, for the message.

        Raises:
            FloatingPointError: on every rank, where the action is to stop.
        """
        self._scale = _loss_scale(trainer)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients) if gradients else None
        self.norm = total.full_tensor() if isinstance(total, DTensor) else total
        if self._scale is not None:
            self._is_refused = self.refuses([], all_ranks, when)
        elif self.norm is not None:
            self._is_refused = self.refuses(local_gradients(weights), all_ranks, when, norm=self.norm)
        else:
            own = list(local_gradients(weights))
            self._is_refused = self.refuses(own, all_ranks, when, norm=torch.nn.utils.get_total_norm(own))
        if self._is_refused:
            for weight in weights:
                weight.grad = None  # an optimizer ignores a weight without gradient, and its moments

    def took_step(self, trainer: Any) -> bool:
        """Return ``True`` after an update that changed the weights; a scaler lowers its scale when it skips a step."""
        scale = _loss_scale(trainer)
        return not self._is_refused and (self._scale is None or scale is None or scale >= self._scale)

    def metrics(self) -> dict[str, float]:
        """Return the number of updates left out since the start, where that does not end the run."""
        return {"policy/skipped_updates": float(self.skipped)} if self.action == "skip" else {}

    def state_dict(self) -> dict[str, int]:
        return {"skipped_updates": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped_updates"]


def _loss_scale(trainer: Any) -> float | None:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return None if scaler is None else scaler.get_scale()
