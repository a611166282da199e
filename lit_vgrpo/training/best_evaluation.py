"""The newest and the best held-out evaluation of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lit_vgrpo.errors import counted

AUTO = "auto"
UNTRAINED, TRAINED = "heldout/untrained_reward", "heldout/reward"
DISTANCES = ("heldout/fid", "heldout/kid")


class NewestEvaluation:
    """Detects evaluations of the current weights, each once."""

    def __init__(self) -> None:
        self._seen_step = -1

    def is_new(self, heldout_step: int, global_step: int) -> bool:
        """Return ``True`` once for each evaluation of the current weights.

        Args:
            heldout_step: optimizer steps at the newest evaluation, -1 before the first one.
            global_step: optimizer steps now.
        """
        if heldout_step in (-1, self._seen_step) or heldout_step != global_step:
            return False
        self._seen_step = heldout_step
        return True


class BestEvaluation:
    """The highest value of a held-out metric so far; NaN is never the best.

    Args:
        metric: its key; ``auto`` takes the untrained reward where there is one, else the trained one.

    Attributes:
        name: the metric of ``value``; ``None`` before the first evaluation.
        value: the best value.
        iteration: iterations done at that evaluation.

    Raises:
        ValueError: a metric that is better when lower.
    """

    def __init__(self, metric: str = AUTO) -> None:
        if metric.startswith(DISTANCES):
            raise ValueError(f"best={metric} is better when lower. Use a reward such as {TRAINED}, or auto.")
        self.metric = metric
        self.name: str | None = None
        self.value = -math.inf
        self.iteration = 0

    def is_in(self, heldout: Mapping[str, float]) -> bool:
        """Return ``True`` if an evaluation measured the metric."""
        return self._name_in(heldout) in heldout

    def improved_by(self, heldout: Mapping[str, float]) -> bool:
        """Return ``True`` if an evaluation is better than all before it."""
        name = self._name_in(heldout)
        # A resumed run may have a new held-out reward, whose values cannot be compared.
        known = self.value if name == self.name else -math.inf
        return heldout.get(name, math.nan) > known

    def take(self, heldout: Mapping[str, float], iteration: int) -> None:
        """Remember an evaluation as the best one."""
        self.name = self._name_in(heldout)
        self.value, self.iteration = heldout[self.name], iteration

    def _name_in(self, heldout: Mapping[str, float]) -> str:
        if self.metric != AUTO:
            return self.metric
        return UNTRAINED if UNTRAINED in heldout else TRAINED

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "iteration": self.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.name, self.value, self.iteration = state["name"], state["value"], state["iteration"]

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} after {counted(self.iteration, 'iteration')}"
