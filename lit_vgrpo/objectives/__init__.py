"""Training methods, one file each."""

from lit_vgrpo.core.surrogate import clipped_surrogate
from lit_vgrpo.objectives.awm import AWM
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.objectives.crd import CRD
from lit_vgrpo.objectives.dance_grpo import DanceGRPO
from lit_vgrpo.objectives.ddpo import DDPO
from lit_vgrpo.objectives.denoising import Denoising, ImageSource
from lit_vgrpo.objectives.dgpo import DGPO
from lit_vgrpo.objectives.epg import EPG
from lit_vgrpo.objectives.flow_grpo import FlowGRPO
from lit_vgrpo.objectives.mix_grpo import MixGRPO
from lit_vgrpo.objectives.nft import DiffusionNFT
from lit_vgrpo.objectives.opd import OPD
from lit_vgrpo.objectives.ram import RAM
from lit_vgrpo.objectives.reward_gradient import RewardGradient
from lit_vgrpo.objectives.vgrpo import VGRPO

__all__ = [
    "AWM",
    "CRD",
    "DDPO",
    "DGPO",
    "EPG",
    "OPD",
    "RAM",
    "VGRPO",
    "DanceGRPO",
    "Denoising",
    "DiffusionNFT",
    "FlowGRPO",
    "ImageSource",
    "MixGRPO",
    "Objective",
    "RewardGradient",
    "clipped_surrogate",
]
