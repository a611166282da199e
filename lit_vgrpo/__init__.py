"""Online reinforcement learning for denoising generative models, as a PyTorch Lightning recipe."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lit_vgrpo.system.process import quiet_imports

__version__ = "0.1.0"

# Imported on first use: the command's help and the plain-loop parts must not wait for Lightning.
_HOMES = {
    "VGRPOModule": "lit_vgrpo.module",
    "OptimizerConfig": "lit_vgrpo.training.optimizer",
    "PromptDataModule": "lit_vgrpo.data",
    "PromptSource": "lit_vgrpo.data",
    "VGRPO": "lit_vgrpo.objectives",
    "DiffusionNFT": "lit_vgrpo.objectives",
    "EPG": "lit_vgrpo.objectives",
    "DGPO": "lit_vgrpo.objectives",
    "AWM": "lit_vgrpo.objectives",
    "RAM": "lit_vgrpo.objectives",
    "CRD": "lit_vgrpo.objectives",
    "FlowGRPO": "lit_vgrpo.objectives",
    "MixGRPO": "lit_vgrpo.objectives",
    "DanceGRPO": "lit_vgrpo.objectives",
    "DDPO": "lit_vgrpo.objectives",
    "Denoising": "lit_vgrpo.objectives",
    "RewardGradient": "lit_vgrpo.objectives",
    "OPD": "lit_vgrpo.objectives",
    "ChromaPolicy": "lit_vgrpo.policies",
    "Flux2DevEditPolicy": "lit_vgrpo.policies",
    "Flux2DevPolicy": "lit_vgrpo.policies",
    "Flux2EditPolicy": "lit_vgrpo.policies",
    "Flux2Policy": "lit_vgrpo.policies",
    "FluxPolicy": "lit_vgrpo.policies",
    "KontextPolicy": "lit_vgrpo.policies",
    "Krea2Policy": "lit_vgrpo.policies",
    "Lumina2Policy": "lit_vgrpo.policies",
    "QwenImage21Policy": "lit_vgrpo.policies",
    "QwenImageEditPolicy": "lit_vgrpo.policies",
    "QwenImagePolicy": "lit_vgrpo.policies",
    "SD3Policy": "lit_vgrpo.policies",
    "SDXLPolicy": "lit_vgrpo.policies",
    "SanaPolicy": "lit_vgrpo.policies",
    "UNetPolicy": "lit_vgrpo.policies",
    "WanPolicy": "lit_vgrpo.policies",
    "ZImagePolicy": "lit_vgrpo.policies",
    "RolloutSpec": "lit_vgrpo.core.types",
    "EvaluationSpec": "lit_vgrpo.training.evaluation",
}
quiet_imports()
__all__ = ["__version__", *_HOMES]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
