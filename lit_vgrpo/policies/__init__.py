"""Denoising models as policies, one file per model family."""

from lit_vgrpo.core.probability_paths import RectifiedFlow, VariancePreserving
from lit_vgrpo.core.rollout import Conditioning
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.flux import FluxPolicy
from lit_vgrpo.policies.sd3 import SD3Policy
from lit_vgrpo.policies.sdxl import SDXLPolicy
from lit_vgrpo.policies.unet import UNetPolicy

__all__ = [
    "Conditioning",
    "FluxPolicy",
    "Policy",
    "RectifiedFlow",
    "SD3Policy",
    "SDXLPolicy",
    "UNetPolicy",
    "VariancePreserving",
]
