"""Rewards: plain callables on images and prompts, usable without any trainer."""

from lit_vgrpo.rewards.base import Reward, RewardError
from lit_vgrpo.rewards.combine import RewardBatch, Weighted, as_weighted
from lit_vgrpo.rewards.jpeg import JPEGCompressibility
from lit_vgrpo.rewards.pickscore import PickScore
from lit_vgrpo.rewards.shapes import ShapesReward

__all__ = [
    "JPEGCompressibility",
    "PickScore",
    "Reward",
    "RewardBatch",
    "RewardError",
    "ShapesReward",
    "Weighted",
    "as_weighted",
]
