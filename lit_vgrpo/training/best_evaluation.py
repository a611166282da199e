"""The newest and the best held-out evaluation of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class BestEvaluation:
    """The highest value of a held-out metric so far; NaN is never the best.

    Args:
        metric: its key; ``auto`` takes the untrained reward where there is one, else the trained one.
        name: the metric of ``value``; ``None`` before the first evaluation.
        value: the best value.
        iteration: iterations done at that evaluation.

    Raises:
        ValueError: a metric that is better when lower.
    """

    metric: str = AUTO
    name: str | None = None
    value: float = -math.inf
    iteration: int = 0

    def __post_init__(self) -> None:
        if self.metric.startswith(DISTANCES):
            raise ValueError(f"best={self.metric} is better when lower. Use a reward such as {TRAINED}, or auto.")

    def improved_by(self, heldout: Mapping[str, float], iteration: int) -> BestEvaluation | None:
        """Return an evaluation after ``iteration`` iterations if it is better than all before it, else ``None``."""
        name = (UNTRAINED if UNTRAINED in heldout else TRAINED) if self.metric == AUTO else self.metric
        # A resumed run may have a new held-out reward, whose values cannot be compared.
        known = self.value if name == self.name else -math.inf
        if not heldout.get(name, math.nan) > known:
            return None
        return replace(self, name=name, value=heldout[name], iteration=iteration)

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "iteration": self.iteration}

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} after {counted(self.iteration, 'iteration')}"
