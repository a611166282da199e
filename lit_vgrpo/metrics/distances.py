"""Distances between sets of images: FID, KID, and the mean pairwise distance of one prompt's images."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

from lit_vgrpo.core.gather import rows_of_all_ranks, sum_over_ranks

Distance = Literal["cosine", "euclidean"]
Key = TypeVar("Key", bound=Hashable)


class FrechetDistance:
    """torchmetrics' FID of features that are already extracted, in float64 on the CPU.

    The reference side is a set of features, or their mean and covariance.

    Args:
        dimension: length D of a feature vector.

    Source:
        arXiv 1706.08500.
    """

    def __init__(self, dimension: int) -> None:
        from torchmetrics.image.fid import FrechetInceptionDistance  # imports scipy, which takes a second

        self._sums = FrechetInceptionDistance(
            _GivenFeatures(dimension), sync_on_compute=False, compute_with_cache=False
        )
        self.update(torch.zeros(0, dimension), real=False)  # or compute() warns of a rank without images

    def update(self, features: Tensor, real: bool) -> None:
        """Add features ``(B, D)`` of generated images, or of the reference's."""
        self._sums.update(features, real=real)

    @property
    def count(self) -> int:
        """Number of generated images: this rank's, or those of all ranks after :meth:`add_up_ranks`."""
        return int(self._sums.fake_features_num_samples)

    def add_up_ranks(self) -> None:
        """Add the sums of all ranks; every rank must call it, with or without images.

        torchmetrics' own synchronisation gathers every rank's covariance instead, 34 MB each with Inception.
        """
        for name, values in self._sums.metric_state.items():
            assert isinstance(values, Tensor)
            setattr(self._sums, name, sum_over_ranks(values))

    def set_reference(self, mean: Tensor, cov: Tensor) -> None:
        """Compare with a mean ``(D,)`` and a covariance ``(D, D)``, float64; call it after :meth:`add_up_ranks`."""
        count = 2  # sums with these moments exist for any number of images
        self._sums.real_features_sum = count * mean
        self._sums.real_features_cov_sum = (count - 1) * cov + count * torch.outer(mean, mean)
        self._sums.real_features_num_samples = torch.tensor(count)

    def reference_moments(self) -> tuple[Tensor, Tensor, int]:
        """Return the mean ``(D,)``, the covariance ``(D, D)`` and the number of the reference's images."""
        count = int(self._sums.real_features_num_samples)
        mean = self._sums.real_features_sum / count
        return mean, (self._sums.real_features_cov_sum - count * torch.outer(mean, mean)) / (count - 1), count

    def compute(self) -> Tensor:
        """Return the distance, at least 0; NaN for fewer than two images or a feature that is not finite."""
        products = torch.stack([self._sums.real_features_cov_sum, self._sums.fake_features_cov_sum])
        if min(self.count, int(self._sums.real_features_num_samples)) < 2 or not products.isfinite().all():
            return torch.tensor(torch.nan)  # torchmetrics raises, or LAPACK may not converge
        return self._sums.compute().clamp(min=0)  # equal sets differ by rounding


class _GivenFeatures(torch.nn.Module):
    """Feature extractor for torchmetrics that returns its input."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.num_features = dimension

    def forward(self, features: Tensor) -> Tensor:
        return features.detach().cpu().double()


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
    from torchmetrics.image.kid import KernelInceptionDistance

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


def mean_pairwise_distance(features: Tensor, distance: Distance = "cosine") -> float:
    """Return the mean distance between two images of one prompt, in float64.

    Args:
        features: shape ``(n, D)``.
        distance: ``cosine`` (0 for equal directions, 2 for opposite ones) or ``euclidean``.

    Returns:
        The mean over all pairs; NaN for fewer than two images.

    >>> mean_pairwise_distance(torch.eye(3))
    1.0
    """
    count = len(features)
    if count < 2:
        return math.nan
    values = features.double()
    if distance == "euclidean":
        return torch.pdist(values).mean().item()
    unit = torch.nn.functional.normalize(values, dim=-1)
    distances = (1 - unit @ unit.T).clamp(min=0).fill_diagonal_(0)
    return (distances.sum() / (count * (count - 1))).item()


def diversity(features: Tensor, prompts: Sequence[Key], distance: Distance = "cosine") -> dict[Key, float]:
    """Return the mean pairwise distance of each prompt's images.

    Args:
        features: shape ``(N, D)``.
        prompts: each image's prompt, or its number; length N.
        distance: as in :func:`mean_pairwise_distance`.

    Returns:
        One value per prompt, in order of first appearance; NaN for a prompt with one image.
    """
    members: dict[Key, list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(index)
    return {prompt: mean_pairwise_distance(features[rows], distance) for prompt, rows in members.items()}
