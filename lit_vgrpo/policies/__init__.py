"""Denoising models as policies, one file per model family."""

from lit_vgrpo.core.probability_paths import RectifiedFlow, VariancePreserving
from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.auto import AutoPolicy
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.chroma import ChromaPolicy
from lit_vgrpo.policies.flux import FluxPolicy, KontextPolicy
from lit_vgrpo.policies.flux2 import Flux2DevEditPolicy, Flux2DevPolicy, Flux2EditPolicy, Flux2Policy
from lit_vgrpo.policies.krea2 import Krea2Policy
from lit_vgrpo.policies.lumina2 import Lumina2Policy
from lit_vgrpo.policies.qwen_image import QwenImageEditPolicy, QwenImagePolicy
from lit_vgrpo.policies.qwen_image21 import QwenImage21Policy
from lit_vgrpo.policies.sana import SanaPolicy
from lit_vgrpo.policies.sd3 import SD3Policy
from lit_vgrpo.policies.sdxl import SDXLPolicy
from lit_vgrpo.policies.unet import UNetPolicy
from lit_vgrpo.policies.wan import WanPolicy
from lit_vgrpo.policies.z_image import ZImagePolicy

__all__ = [
    "AutoPolicy",
    "ChromaPolicy",
    "Conditioning",
    "Flux2DevEditPolicy",
    "Flux2DevPolicy",
    "Flux2EditPolicy",
    "Flux2Policy",
    "FluxPolicy",
    "KontextPolicy",
    "Krea2Policy",
    "Lumina2Policy",
    "Policy",
    "QwenImage21Policy",
    "QwenImageEditPolicy",
    "QwenImagePolicy",
    "RectifiedFlow",
    "SD3Policy",
    "SDXLPolicy",
    "SanaPolicy",
    "UNetPolicy",
    "VariancePreserving",
    "WanPolicy",
    "ZImagePolicy",
]
