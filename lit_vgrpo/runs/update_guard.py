"""Decides which updates take their step: those with finite losses and gradients, and a fitting loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lit_vgrpo.core.nonfinite import NonFiniteGuard
from lit_vgrpo.distributed.zero import local_gradients


class UpdateGuard(NonFiniteGuard):
    """Skips updates whose loss or gradient is not finite, and reports which updates took their step.

    With a gradient scaler (``trainer.precision=16-mixed``) only losses are checked: the scaler skips steps with an
    overflow itself, and occasional overflows are how it chooses its scale.

    Args:
        action: end the run with the reason, or leave the update out; ten left out in a row end the run too.

    Raises:
        ValueError: another action.
    """

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
        self._is_refused = self.refuses([] if self._scale is not None else local_gradients(weights), all_ranks, when)
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
