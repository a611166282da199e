"""Whether one score rises while another falls, from evaluation to evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

STANDARD_ERRORS = 2.0
"""A change below so many standard errors is taken for noise."""


@dataclass(frozen=True)
class Measurement:
    """One evaluation's values of two scores.

    Attributes:
        iteration: iterations done.
        trained: what is trained on: a value an image, NaN where there is none, or the mean alone.
        watched: what is not: a value an image or prompt, or the mean alone.
    """

    iteration: int
    trained: list[float]
    watched: list[float]

    def is_comparable_to(self, other: Measurement) -> bool:
        return len(self.trained) == len(other.trained) and len(self.watched) == len(other.watched)


def finite_mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are finite; NaN where none is.

    >>> finite_mean([1.0, math.nan, 3.0])
    2.0
    """
    kept = [value for value in values if math.isfinite(value)]
    return fmean(kept) if kept else math.nan


def change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Mean difference of values that belong together pair by pair, and its standard error: 0 for a single pair.

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
    """Counts evaluations in a row at which the trained score is up and the watched one down.

    Both are compared with the evaluation at which the watched score was highest, value by value, since the images are
    made from the same noise each time. A change counts where it is larger than a share of what it changes and than two
    standard errors; the latter are known only where there are several values.

    Args:
        min_rise: smallest rise of the trained score, as a share of its absolute value.
        min_drop: smallest fall of the watched one, likewise.
    """

    def __init__(self, min_rise: float, min_drop: float) -> None:
        self.min_rise = min_rise
        self.min_drop = min_drop
        self.reference: Measurement | None = None
        self.in_a_row = 0

    def add(self, now: Measurement) -> int:
        """Take an evaluation; returns how many in a row diverge."""
        if math.isnan(finite_mean(now.watched)) or math.isnan(finite_mean(now.trained)):
            return self.in_a_row  # it tells nothing
        best = self.reference
        # The held-out prompts may change where a run goes on; then nothing belongs together any more.
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
