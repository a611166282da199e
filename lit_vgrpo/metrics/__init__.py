"""FID, KID, diversity and confidence intervals of a set of images; none of them needs a trainer."""

from lit_vgrpo.metrics.bootstrap import bootstrap_interval
from lit_vgrpo.metrics.distances import (
    FrechetDistance,
    KeptFeatures,
    diversity,
    kernel_distance,
    mean_pairwise_distance,
)
from lit_vgrpo.metrics.features import FeatureNetwork, feature_network
from lit_vgrpo.metrics.reference import Reference, reference_errors, reference_statistics

__all__ = [
    "FeatureNetwork",
    "FrechetDistance",
    "KeptFeatures",
    "Reference",
    "bootstrap_interval",
    "diversity",
    "feature_network",
    "kernel_distance",
    "mean_pairwise_distance",
    "reference_errors",
    "reference_statistics",
]
