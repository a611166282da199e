"""Measures of a set of images: FID, KID, diversity, and how sure a mean is. Usable without any trainer."""

from lit_vgrpo.metrics.bootstrap import bootstrap_interval
from lit_vgrpo.metrics.diversity import diversity, mean_pairwise_distance
from lit_vgrpo.metrics.features import FeatureNetwork, feature_network
from lit_vgrpo.metrics.fid import FeatureSums, frechet_distance
from lit_vgrpo.metrics.kid import KeptFeatures, kernel_distance
from lit_vgrpo.metrics.reference import Reference, reference_faults, reference_statistics

__all__ = [
    "FeatureNetwork",
    "FeatureSums",
    "KeptFeatures",
    "Reference",
    "bootstrap_interval",
    "diversity",
    "feature_network",
    "frechet_distance",
    "kernel_distance",
    "mean_pairwise_distance",
    "reference_faults",
    "reference_statistics",
]
