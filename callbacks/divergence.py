"""Detection of one score rising while another falls over evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

STANDARD_ERRORS = 2.0
"""Changes below this many standard errors count as noise."""


@dataclass(frozen=True)
class Measurement:
    """One evaluation's values of two scores.

    Attributes:
        iteration: iterations done.
        trained: the score that is trained on: one value per image, NaN if missing, or only the mean.
        watched: the score that is not: one value per image or prompt, or only the mean.
    """

    iteration: int
    trained: list[float]
    watched: list[float]

    def is_comparable_to(self, other: Measurement) -> bool:
        return len(self.trained) == len(other.trained) and len(self.watched) == len(other.watched)


def finite_mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN if there are none.

    >>> finite_mean([1.0, math.nan, 3.0])
    2.0
    """
    kept = [value for value in values if math.isfinite(value)]
    return fmean(kept) if kept else math.nan


def change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the mean difference of paired values and its standard error, 0 for a single pair.

    >>> [round(value, 3) for value in change([0.0, 1.0, 2.0], [1.0, 2.0, 4.0])]
    [1.333, 0.333]
    """
    pairs = zip(before, after, strict=True)
    differences = [b - a for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    if not differences:
        return math.nan, 0.0
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return fmean(differences), error


class Divergence:
    """Counter of consecutive evaluations with the trained score up and the watched score down.

    Both are compared value by value with the evaluation where the watched score was highest, since images always start
    from the same noise. A change counts if it exceeds both a share of the previous value and, if there are several
    values, two standard errors.

    Args:
        min_rise: minimum rise of the trained score, as a share of its absolute value.
        min_drop: minimum fall of the watched score, likewise.
    """

    def __init__(self, min_rise: float, min_drop: float) -> None:
        self.min_rise = min_rise
        self.min_drop = min_drop
        self.reference: Measurement | None = None
        self.in_a_row = 0

    def add(self, now: Measurement) -> int:
        """Add an evaluation and return the number of consecutive diverging ones."""
        if math.isnan(finite_mean(now.watched)) or math.isnan(finite_mean(now.trained)):
            return self.in_a_row  # no information
        best = self.reference
        # The held-out prompts may change when a run resumes; then values no longer correspond.
        is_first = best is None or not now.is_comparable_to(best)
        if best is None or is_first or finite_mean(now.watched) > finite_mean(best.watched):
            self.reference, self.in_a_row = now, 0
            return 0
        up = _exceeds(best.trained, now.trained, 1, self.min_rise)
        down = _exceeds(best.watched, now.watched, -1, self.min_drop)
        self.in_a_row = self.in_a_row + 1 if up and down else 0
        return self.in_a_row

    def state_dict(self) -> dict[str, Any]:
        return {"reference": None if self.reference is None else asdict(self.reference), "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        reference = state["reference"]
        self.reference = None if reference is None else Measurement(**reference)
        self.in_a_row = state["in_a_row"]


def _exceeds(before: Sequence[float], after: Sequence[float], sign: int, share: float) -> bool:
    difference, error = change(before, after)
    return sign * difference > max(share * abs(finite_mean(before)), STANDARD_ERRORS * error)
