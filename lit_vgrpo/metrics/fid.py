"""Fréchet inception distance, accumulated over any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_vgrpo.core.gather import sum_over_ranks


class FrechetDistance:
    """torchmetrics' FID of features that are already extracted, in float64 on the CPU.

    The reference side is a set of features, or their mean and covariance.

    Args:
        dimension: length D of a feature vector.

    Source:
        arXiv 1706.08500.
    """

    def __init__(self, dimension: int) -> None:
        # With it come torchmetrics' metrics of every kind and scipy: a second, which only those wait who measure.
        from torchmetrics.image.fid import FrechetInceptionDistance

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
    """The feature extractor of torchmetrics, which here only passes features on."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.num_features = dimension

    def forward(self, features: Tensor) -> Tensor:
        return features.detach().cpu().double()
