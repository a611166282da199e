"""Choice of the images that a report shows: the best, the worst, and those on which the rewards disagree."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TOTAL = "reward"
"""Name of the weighted sum among the scores."""
BEST, WORST, DISAGREEMENT = "best", "worst", "disagreement"
MIN_DISAGREEMENT = 0.25
"""Minimum difference of two rewards' ranks, as a share of all images; smaller ones say nothing."""


@dataclass(frozen=True)
class Choice:
    """An image to keep, and why.

    Attributes:
        image: its place among the scores.
        reason: ``best``, ``worst`` or ``disagreement``.
        pair: for a disagreement, the reward that ranks it high and the one that ranks it low.
    """

    image: int
    reason: str
    pair: tuple[str, str] | None = None


def choose(
    scores: Mapping[str, Sequence[float]], prompts: Sequence[Hashable], available: Collection[int], number: int
) -> list[Choice]:
    """Choose images by their scores, of different prompts where there are enough.

    Args:
        scores: by reward, one score per image, NaN where there is none; ``reward`` is the weighted sum.
        prompts: one per image, in any form that tells them apart.
        available: places of the images whose pixels are there.
        number: images per reason, at most.

    >>> [choice.image for choice in choose({"reward": [0.5, 1.0, 0.0]}, ["a", "b", "c"], [0, 1, 2], 1)]
    [1, 2]
    """
    total = scores.get(TOTAL, ())
    scored = [place for place in sorted(available) if place < len(total) and math.isfinite(total[place])]
    ordered = sorted(scored, key=lambda place: -total[place])
    most = min(number, len(ordered) // 2 or len(ordered))
    best = _of_many_prompts(ordered, prompts)[:most]
    worst = _of_many_prompts([place for place in reversed(ordered) if place not in best], prompts)[:most]
    chosen = [Choice(place, BEST) for place in best] + [Choice(place, WORST) for place in worst]
    disagreements = {choice.image: choice for choice in _disagreements(scores, scored)}
    return [*chosen, *(disagreements[place] for place in _of_many_prompts(list(disagreements), prompts)[:number])]


def _of_many_prompts(places: Sequence[int], prompts: Sequence[Hashable]) -> list[int]:
    """Return the first image of every prompt, then the second ones, and so on, each in the order given."""
    turn: Counter[Hashable] = Counter()
    turns = []
    for place in places:
        turns.append(turn[prompts[place]])
        turn[prompts[place]] += 1
    return [places[i] for i in sorted(range(len(places)), key=lambda i: turns[i])]


def _disagreements(scores: Mapping[str, Sequence[float]], places: Sequence[int]) -> list[Choice]:
    """Return the images on which two rewards' ranks differ much, most first."""
    ranks = {name: _ranks(values) for name, values in scores.items() if name != TOTAL}
    found = []
    for place in places:
        own = {name: float(of[place]) for name, of in ranks.items() if of is not None and math.isfinite(of[place])}
        if len(own) > 1:
            high, low = max(own, key=lambda name: own[name]), min(own, key=lambda name: own[name])
            found.append((own[high] - own[low], place, (high, low)))
    found.sort(key=lambda entry: (-entry[0], entry[1]))
    return [Choice(place, DISAGREEMENT, pair) for gap, place, pair in found if gap >= MIN_DISAGREEMENT]


def _ranks(values: Sequence[float]) -> npt.NDArray[np.float64] | None:
    """Return each score's rank in [0, 1], equal for equal scores; ``None`` where all scores are equal."""
    scores = np.asarray(values, dtype=np.float64)
    known = scores[np.isfinite(scores)]
    if len(known) < 2 or known.min() == known.max():
        return None
    ordered = np.sort(known)
    below = np.searchsorted(ordered, scores, side="left") + np.searchsorted(ordered, scores, side="right")
    return np.where(np.isfinite(scores), below / (2 * len(known)), np.nan)
