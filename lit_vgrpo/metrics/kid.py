"""Kernel inception distance, which is unbiased in the number of images."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from lit_vgrpo.core.gather import rows_of_all_ranks


class KeptFeatures:
    """Features of one rank's images and the images' numbers, kept on the CPU in float32.

    KID needs all of them: 10,000 images with Inception's 2048 features are 82 MB, gathered on every rank.
    torchmetrics would gather them batch by batch, in the order of ranks, and hang if a rank has fewer batches.

    Args:
        dimension: length D of a feature vector.
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
        features = rows_of_all_ranks(torch.cat(self._features))
        numbers = rows_of_all_ranks(torch.tensor(self._numbers, dtype=torch.int64))
        return features[numbers.argsort(stable=True)]


def kernel_distance(
    features: Tensor, reference: Tensor, subsets: int = 100, subset_size: int = 1000, seed: int = 0
) -> float:
    """Return torchmetrics' KID in float64, the mean over random subsets, as in clean-fid.

    Args:
        features: shape ``(n, D)``.
        reference: shape ``(m, D)``.
        subsets: number of subsets.
        subset_size: images per subset, at most as many as there are on either side.
        seed: seed of the subsets; torch's global random state stays as it is.

    Returns:
        About 0 for two samples of one distribution, possibly slightly below; NaN for fewer than two images on a side.

    Source:
        arXiv 1801.01401.
    """
    from torchmetrics.image.kid import KernelInceptionDistance  # every image metric comes with it

    size = min(len(features), len(reference), subset_size)
    if size < 2:
        return math.nan
    if size == len(features) == len(reference):
        subsets = 1  # every subset is the whole set
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*will save all extracted features")
        metric = KernelInceptionDistance(torch.nn.Identity(), subsets, size, sync_on_compute=False)
    metric.update(features.double(), real=False)
    metric.update(reference.to(features.device).double(), real=True)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        mean, _ = metric.compute()
    return float(mean)
