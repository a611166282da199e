"""Fréchet inception distance from sums, which any number of ranks can add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lit_vgrpo.distributed.gather import sum_over_ranks


class Gaussian(Protocol):
    """What a distance is taken between: ``mean (D,)`` and ``cov (D, D)``, float64."""

    @property
    def mean(self) -> Tensor: ...

    @property
    def cov(self) -> Tensor: ...


class FeatureSums:
    """Count, sum and sum of outer products of features, all on the CPU in float64.

    Args:
        dimension: length D of a feature vector.
    """

    def __init__(self, dimension: int) -> None:
        self.count = 0
        self.sum = torch.zeros(dimension, dtype=torch.float64)
        self.outer = torch.zeros(dimension, dimension, dtype=torch.float64)

    @property
    def dimension(self) -> int:
        return len(self.sum)

    def add(self, features: Tensor) -> None:
        """Take in features ``(B, D)`` of any device and float type."""
        values = features.detach().cpu().double()
        self.count += len(values)
        self.sum = self.sum + values.sum(dim=0)  # not in place: Lightning evaluates in and out of inference mode
        self.outer = self.outer + values.T @ values

    def merged(self, other: FeatureSums) -> FeatureSums:
        """The sums of both."""
        return self._unpacked(self._packed() + other._packed())

    def reduced(self, reduce: Callable[[Tensor], Tensor] = sum_over_ranks) -> FeatureSums:
        """The sums over all ranks, by one call of ``reduce``; every rank must ask, with or without images."""
        return self._unpacked(reduce(self._packed()))

    @property
    def mean(self) -> Tensor:
        """``(D,)``; NaN without images."""
        return self.sum / self.count if self.count else torch.full_like(self.sum, torch.nan)

    @property
    def cov(self) -> Tensor:
        """``(D, D)``, divided by ``count - 1``; NaN for fewer than two images."""
        if self.count < 2:
            return torch.full_like(self.outer, torch.nan)
        return (self.outer - torch.outer(self.mean, self.sum)) / (self.count - 1)

    def _packed(self) -> Tensor:
        # a double holds every count up to 2**53 exactly
        return torch.cat([torch.tensor([float(self.count)], dtype=torch.float64), self.sum, self.outer.flatten()])

    def _unpacked(self, packed: Tensor) -> FeatureSums:
        sums = FeatureSums(self.dimension)
        sums.count = round(packed[0].item())
        sums.sum = packed[1 : 1 + self.dimension].clone()
        sums.outer = packed[1 + self.dimension :].view(self.dimension, self.dimension).clone()
        return sums


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """``|m_a - m_b|^2 + tr(S_a + S_b - 2 (S_a S_b)^(1/2))`` in float64; NaN where either is not finite.

    The trace of the root is the sum of the singular values of ``S_a^(1/2) S_b^(1/2)``, which exists for covariances
    of any rank: those of fewer images than dimensions are singular.

    Raises:
        ValueError: the two are of different dimension.

    Source:
        arXiv 1706.08500.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(
            f"Features of {len(a.mean)} and of {len(b.mean)} dimensions have no distance. Use one feature network."
        )
    if not all(values.isfinite().all() for values in (a.mean, a.cov, b.mean, b.cov)):
        return float("nan")
    root_a, root_b = _square_root(a.cov), _square_root(b.cov)
    overlap = torch.linalg.svdvals(root_a @ root_b).sum()
    distance = (a.mean - b.mean).square().sum() + a.cov.trace() + b.cov.trace() - 2 * overlap
    return max(distance.item(), 0.0)  # equal sets differ by rounding


def _square_root(cov: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((cov + cov.T) / 2)
    # eigenvalues of the null space are rounding; the roots of the positive ones would add up
    noise = values.max().clamp(min=0) * len(cov) * torch.finfo(cov.dtype).eps
    roots = torch.where(values > noise, values, 0.0).sqrt()
    return (vectors * roots) @ vectors.T
