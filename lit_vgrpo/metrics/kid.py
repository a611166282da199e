"""Kernel inception distance, which has no bias in the number of images."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lit_vgrpo.distributed.gather import rows_of_all_ranks


class KeptFeatures:
    """Features of one rank's images with the images' numbers, kept on the CPU in float32.

    KID needs them all: 10,000 images with Inception's 2048 features are 82 MB, gathered on every rank.
    """

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self._features: list[Tensor] = []
        self._numbers: list[int] = []

    def add(self, features: Tensor, numbers: list[int]) -> None:
        """Keep features ``(B, D)`` of the images with these numbers."""
        self._features.append(features.detach().float().cpu())
        self._numbers += numbers

    def gathered(self) -> Tensor:
        """All ranks' features ``(N, D)`` in the order of the images' numbers; every rank must ask."""
        local = torch.cat([torch.zeros(0, self.dimension, dtype=torch.float32), *self._features])
        features = rows_of_all_ranks(local)
        numbers = rows_of_all_ranks(torch.tensor(self._numbers, dtype=torch.int64))
        return features[numbers.argsort(stable=True)]


def kernel_distance(
    features: Tensor, reference: Tensor, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> float:
    """Squared maximum mean discrepancy with the kernel ``(x.y / D + 1)^3``, unbiased, the mean over random subsets.

    Args:
        features: shape ``(n, D)``.
        reference: shape ``(m, D)``.
        subsets: how many subsets.
        subset_size: images in one, at most as many as there are on either side.
        seed: of the subsets.

    Returns:
        About 0 for sets of one distribution, also slightly below; NaN for fewer than two images on a side.

    Source:
        arXiv 1801.01401; subsets as clean-fid takes them.
    """
    size = min(len(features), len(reference), subset_size)
    if size < 2:
        return math.nan
    if size == len(features) == len(reference):
        subsets = 1  # every subset is the whole
    x, y = features.double(), reference.to(features.device).double()
    draw = np.random.RandomState(seed)
    total = 0.0
    for _ in range(subsets):
        some_x = x[torch.from_numpy(draw.choice(len(x), size, replace=False)).to(x.device)]
        some_y = y[torch.from_numpy(draw.choice(len(y), size, replace=False)).to(y.device)]
        total += _squared_discrepancy(some_x, some_y)
    return total / subsets


def _squared_discrepancy(x: Tensor, y: Tensor) -> float:
    size, dimension = x.shape

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / dimension + 1) ** 3

    within = kernel(x, x).fill_diagonal_(0).sum() + kernel(y, y).fill_diagonal_(0).sum()
    return (within / (size * (size - 1)) - 2 * kernel(x, y).mean()).item()
