"""Memory of the reward models on the device that trains the policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lit_vgrpo.apps.memory.shares import bytes_of, tensors_of
from lit_vgrpo.rewards import Reward
from lit_vgrpo.rewards.clip import AestheticScore
from lit_vgrpo.rewards.function import PythonReward
from lit_vgrpo.rewards.geneval import GenEval
from lit_vgrpo.rewards.hps import HPSv2
from lit_vgrpo.rewards.model import ModelReward
from lit_vgrpo.system.hub import file_at_hand

PUBLISHED = {
    "yuvalkirstain/PickScore_v1": 986_109_441,
    "openai/clip-vit-large-patch14": 427_616_513,
    "facebook/mask2former-swin-small-coco-instance": 68_741_083,
    "THUDM/ImageReward": 413_121_249,
    "ViT-H-14": 986_109_441,
    "vision of openai/clip-vit-large-patch14": 303_966_208 + 927_969,
}
"""Parameter counts of the default checkpoints and open_clip models; the last is what the aesthetic score keeps."""


def scorers(rewards: Iterable[Reward], device: torch.device) -> tuple[int, list[str]]:
    """Return the bytes of the reward models on a device, and the names of the rewards of unknown size.

    Counts weights only: activations without gradient are freed before training reaches its peak.
    """
    total, unknown = 0, []
    for reward in rewards:
        wanted: Any = getattr(reward, "device", "auto")
        place = device if wanted == "auto" else torch.device(wanted)
        if place.type != device.type or place.index not in (None, device.index):
            continue
        dtype = getattr(torch, str(getattr(reward, "dtype", "float32")))
        sizes = [_bytes(name, dtype) for name in _models(reward)]
        if None in sizes:
            unknown.append(reward.name)
        total += sum(size or 0 for size in sizes)
    return total, unknown


def _models(reward: Reward) -> list[str]:
    """Return the names of a reward's models; an empty name if they are not known."""
    if isinstance(reward, GenEval):
        return [reward.detector, reward.clip]
    if isinstance(reward, AestheticScore):
        return [f"vision of {reward.clip}"]
    if isinstance(reward, HPSv2):
        return [reward.model]
    if isinstance(reward, ModelReward):
        return [getattr(reward, "checkpoint", "")]
    is_ours = type(reward).__module__.startswith("lit_vgrpo.") and not isinstance(reward, PythonReward)
    return [] if is_ours else [""]


def _bytes(name: str, dtype: torch.dtype) -> int | None:
    """Return a model's size: as published, or from its configuration if that is on this machine."""
    from transformers import AutoConfig, AutoModel

    if name in PUBLISHED:
        return PUBLISHED[name] * dtype.itemsize
    try:
        if (path := file_at_hand(name, "config.json")) is None:
            return None
        with torch.device("meta"):
            model = AutoModel.from_config(AutoConfig.from_pretrained(path.parent))
    except (OSError, ValueError):  # not a transformers model: the reward's check reports damaged files
        return None
    return bytes_of(tensors_of(model.to(dtype)))
