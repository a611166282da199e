"""FID, KID, diversity and confidence intervals of a set of images; none of them needs a trainer."""

from lit_vgrpo.metrics.features import FeatureNetwork, feature_network
from lit_vgrpo.metrics.reference import Reference, reference_errors, reference_statistics
from lit_vgrpo.metrics.statistics import (
    FeatureMoments,
    KeptFeatures,
    bootstrap_interval,
    diversity,
    frechet_distance,
    kernel_distance,
)

__all__ = [
    "FeatureMoments",
    "FeatureNetwork",
    "KeptFeatures",
    "Reference",
    "bootstrap_interval",
    "diversity",
    "feature_network",
    "frechet_distance",
    "kernel_distance",
    "reference_errors",
    "reference_statistics",
]
