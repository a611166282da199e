"""How sure a mean is."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from torch import Tensor


def bootstrap_interval(
    values: Sequence[float] | Tensor,
    clusters: Sequence[Hashable] | Tensor | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap interval of the mean; NaN values are left out.

    Images of one prompt are alike, so that resampling images would make the interval too narrow: with ``clusters``
    whole prompts are resampled.

    Args:
        values: the images' scores.
        clusters: what each value belongs to, such as its prompt; ``None`` takes every value for itself.
        level: how often such an interval holds the true mean.
        resamples: how many means are drawn.
        seed: of the draws.

    Returns:
        The lower and the upper end; NaN where there is no value.

    Raises:
        ValueError: a level outside (0, 1), no resamples, or another number of clusters than values.

    >>> bootstrap_interval([2.0, 2.0, math.nan])
    (2.0, 2.0)
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level} is outside (0, 1). Use 0.95.")
    if resamples < 1:
        raise ValueError(f"resamples={resamples} draws nothing. Use 1000 or more.")
    scores = np.asarray(values, dtype=np.float64)
    if clusters is not None and len(clusters) != len(scores):
        raise ValueError(f"{len(clusters)} clusters do not fit {len(scores)} values. Give one cluster a value.")
    if clusters is None:
        clusters = range(len(scores))
    labels = clusters.tolist() if isinstance(clusters, Tensor) else clusters  # tensors hash by identity
    sums: dict[Hashable, float] = {}
    counts: dict[Hashable, int] = {}
    for label, score in zip(labels, scores.tolist(), strict=True):
        if not math.isnan(score):
            sums[label] = sums.get(label, 0.0) + score
            counts[label] = counts.get(label, 0) + 1
    if not sums:
        return math.nan, math.nan
    total, number = np.array(list(sums.values())), np.array(list(counts.values()))
    random = np.random.default_rng(seed)
    means = np.empty(resamples)
    for draw in range(resamples):
        chosen = random.integers(0, len(total), len(total))
        means[draw] = total[chosen].sum() / number[chosen].sum()
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return low, high
