"""Statistics of sets of images: FID, KID, diversity, and the confidence interval of a mean."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lit_vgrpo.core.gather import all_gather_rows, sum_over_ranks

Key = TypeVar("Key", bound=Hashable)
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000
LEVEL, RESAMPLES = 0.95, 2000  # of confidence intervals
RESAMPLES_AT_ONCE = 100
"""Limits memory: scipy holds the indices of a whole batch of resamples."""


class FeatureMoments:
    """Mean and covariance of features of length D of images that come in batches, in float64 on the CPU.

    torchmetrics' FID takes no given moments of real images, and adds up processes that share images twice.
    """

    def __init__(self, dimension: int) -> None:
        self.count = 0  # of this rank's images, or of all ranks' after add_up_ranks
        self._sum = torch.zeros(dimension, dtype=torch.float64)
        self._products = torch.zeros(dimension, dimension, dtype=torch.float64)

    def update(self, features: Tensor) -> None:
        """Add features ``(B, D)``."""
        rows = features.detach().cpu().double()
        self.count += len(rows)
        self._sum += rows.sum(dim=0)
        self._products += rows.T @ rows

    def add_up_ranks(self) -> None:
        """Add the sums of all ranks; every rank must call it, with or without images."""
        self.count = int(sum_over_ranks(torch.tensor(self.count)))
        self._sum, self._products = sum_over_ranks(self._sum), sum_over_ranks(self._products)

    def mean_and_cov(self) -> tuple[Tensor, Tensor]:
        """Return the mean ``(D,)`` and the covariance ``(D, D)``; not finite for fewer than two images."""
        mean = self._sum / self.count
        return mean, (self._products - self.count * torch.outer(mean, mean)) / (self.count - 1)


def frechet_distance(mean: Tensor, cov: Tensor, other_mean: Tensor, other_cov: Tensor) -> float:
    """Return the Frechet distance between two Gaussians, as torchmetrics computes FID.

    Means ``(D,)`` and covariances ``(D, D)`` are float64. The distance is at least 0; NaN if a moment is not finite.

    Source:
        arXiv 1706.08500.
    """
    product = cov @ other_cov
    if not all(values.isfinite().all() for values in (mean, other_mean, product)):
        return math.nan  # LAPACK may not converge
    overlap = torch.linalg.eigvals(product).sqrt().real.sum()
    distance = (mean - other_mean).square().sum() + cov.trace() + other_cov.trace() - 2 * overlap
    return max(0.0, float(distance))  # equal sets differ by rounding


class KeptFeatures:
    """Features of one rank's images and the images' numbers, kept on the CPU in float32.

    KID needs all of them: 10,000 images with Inception's 2048 features are 82 MB, gathered on every rank.
    """

    def __init__(self, dimension: int) -> None:
        self._features = [torch.zeros(0, dimension)]
        self._numbers: list[int] = []

    def add(self, features: Tensor, numbers: list[int]) -> None:
        """Keep features ``(B, D)`` of the images with these numbers."""
        self._features.append(features.detach().float().cpu())
        self._numbers += numbers

    def gathered(self) -> Tensor:
        """Return all ranks' features ``(N, D)``, sorted by image number; every rank must call it."""
        features = all_gather_rows(torch.cat(self._features))
        numbers = all_gather_rows(torch.tensor(self._numbers, dtype=torch.int64))
        return features[numbers.argsort(stable=True)]


def kernel_distance(features: Tensor, reference: Tensor) -> float:
    """Return torchmetrics' KID of features ``(n, D)`` and ``(m, D)``, in float64.

    It is the mean over 100 random subsets, always the same, of 1000 images or all of the smaller side, as in clean-fid.
    It is about 0 for two samples of one distribution, possibly slightly below; NaN for fewer than two images on a side.

    Source:
        arXiv 1801.01401.
    """
    from torchmetrics.image.kid import KernelInceptionDistance

    size = min(len(features), len(reference), KID_SUBSET_SIZE)
    if size < 2:
        return math.nan
    subsets = 1 if size == len(features) == len(reference) else KID_SUBSETS  # 1 if every subset is the whole set
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*will save all extracted features")
        metric = KernelInceptionDistance(torch.nn.Identity(), subsets, size, sync_on_compute=False)
    metric.update(features.double(), real=False)
    metric.update(reference.to(features.device).double(), real=True)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        mean, _ = metric.compute()
    return float(mean)


def diversity(features: Tensor, prompts: Sequence[Key]) -> dict[Key, float]:
    """Return the mean cosine distance between two images of one prompt, in [0, 2], for each prompt in order.

    Features are ``(N, D)``, with each image's prompt or its number. The value of a prompt with one image is NaN.

    >>> diversity(torch.eye(3), ["a cat"] * 3)
    {'a cat': 1.0}
    """
    members: dict[Key, list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(index)
    distances = {}
    for prompt, rows in members.items():
        unit = torch.nn.functional.normalize(features[rows].double(), dim=-1)
        first, second = torch.triu_indices(len(rows), len(rows), offset=1)
        pairs = (1 - unit @ unit.T)[first, second].clamp(min=0)
        distances[prompt] = float(pairs.mean())
    return distances


def bootstrap_interval(
    values: Sequence[float] | Tensor,
    clusters: Sequence[int] | Sequence[str] | Tensor | None = None,
    level: float = LEVEL,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean, ignoring NaN values.

    Images of one prompt are correlated, so resampling images would make the interval too narrow. With ``clusters``,
    whole prompts are resampled instead.

    Args:
        values: One score per image; with values of less than two clusters, both ends are NaN.
        clusters: The cluster of each value, such as its prompt; ``None`` resamples single values.
        level: Confidence level, in (0, 1).

    >>> bootstrap_interval([2.0, 2.0, math.nan])
    (2.0, 2.0)
    """
    scores = np.asarray(values, dtype=np.float64)
    labels = np.arange(len(scores)) if clusters is None else np.asarray(clusters)
    known = ~np.isnan(scores)
    _, cluster_of = np.unique(labels[known], return_inverse=True)
    sums, counts = np.bincount(cluster_of, scores[known]), np.bincount(cluster_of)
    if len(sums) < 2:  # a single prompt does not show how prompts differ
        return math.nan, math.nan
    order = np.lexsort((counts, sums))  # the interval does not depend on the clusters' names or order
    from scipy.stats import bootstrap  # importing it takes 0.5 s

    interval = bootstrap(
        (sums[order], counts[order]),
        lambda sums, counts, axis: sums.sum(axis) / counts.sum(axis),
        n_resamples=RESAMPLES,
        batch=RESAMPLES_AT_ONCE,
        vectorized=True,
        paired=True,
        confidence_level=level,
        method="percentile",
        rng=0,
    ).confidence_interval
    return float(interval.low), float(interval.high)
