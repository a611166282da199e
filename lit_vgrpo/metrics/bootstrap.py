"""Confidence intervals of a mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

RESAMPLES_AT_ONCE = 100
"""Limits memory: scipy holds the indices of a whole batch of resamples."""


def bootstrap_interval(
    values: Sequence[float] | Tensor,
    clusters: Sequence[int] | Sequence[str] | Tensor | None = None,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean, ignoring NaN values.

    Images of one prompt are correlated, so resampling images would make the interval too narrow. With ``clusters``,
    whole prompts are resampled instead.

    Args:
        values: one score per image.
        clusters: the cluster of each value, such as its prompt; ``None`` resamples single values.
        level: confidence level, in (0, 1).
        resamples: number of bootstrap samples.
        seed: seed of the resampling.

    Returns:
        The lower and the upper end; NaN if there are no values.

    >>> bootstrap_interval([2.0, 2.0, math.nan])
    (2.0, 2.0)
    """
    scores = np.asarray(values, dtype=np.float64)
    labels = np.arange(len(scores)) if clusters is None else np.asarray(clusters)
    found = ~np.isnan(scores)
    _, cluster_of = np.unique(labels[found], return_inverse=True)
    sums, counts = np.bincount(cluster_of, scores[found]), np.bincount(cluster_of)
    if len(sums) < 2:  # scipy refuses to resample a single cluster
        mean = float(sums[0] / counts[0]) if len(sums) else math.nan
        return mean, mean
    from scipy.stats import bootstrap  # its import takes half a second

    interval = bootstrap(
        (sums, counts),
        lambda sums, counts, axis: sums.sum(axis) / counts.sum(axis),
        n_resamples=resamples,
        batch=RESAMPLES_AT_ONCE,
        vectorized=True,
        paired=True,
        confidence_level=level,
        method="percentile",
        rng=seed,
    ).confidence_interval
    return float(interval.low), float(interval.high)
