"""Memory of the reward models on the device that trains the policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lit_vgrpo.rewards import Reward
from lit_vgrpo.rewards.aesthetic import AestheticScore
from lit_vgrpo.rewards.clip import CLIPCosine
from lit_vgrpo.rewards.function import PythonReward
from lit_vgrpo.rewards.geneval import GenEval
from lit_vgrpo.rewards.geneval_models import SEGMENTERS
from lit_vgrpo.rewards.hps import HPSv2
from lit_vgrpo.rewards.image_reward import FILENAME, ImageReward
from lit_vgrpo.rewards.model import ModelReward
from lit_vgrpo.rewards.weights import read_weights, weights_path
from lit_vgrpo.system.hub import file_at_hand, local_folder
from lit_vgrpo.training.memory_shares import bytes_of, tensors_of

PUBLISHED = {
    "yuvalkirstain/PickScore_v1": 986_109_441,
    "openai/clip-vit-large-patch14": 427_616_513,
    "facebook/mask2former-swin-small-coco-instance": 68_741_083,
    "THUDM/ImageReward": 413_121_249,
}
"""Parameter counts of the default checkpoints, from the classes that load them at their published sizes."""
OPEN_CLIP = {"ViT-H-14": 986_109_441}
"""Parameter counts of open_clip models by name; their weights must match exactly."""
AESTHETIC = {"openai/clip-vit-large-patch14": 303_966_208 + 927_969}
"""Parameter counts of the parts of a CLIP model that the aesthetic score keeps, plus its head."""


def scorers(rewards: Iterable[Reward], device: torch.device) -> tuple[int, list[str]]:
    """Return the bytes of the reward models on a device, and the names of the rewards of unknown size.

    Counts weights only: activations without gradient are freed before training reaches its peak.
    """
    total, unknown = 0, []
    for reward in rewards:
        if not _runs_on(reward, device):
            continue
        try:
            size = _bytes_of_models(reward)
        except Exception:  # damaged files or another model's: the reward's own check reports them
            size = None
        if size is None:
            unknown.append(reward.name)
        total += size or 0
    return total, unknown


def _runs_on(reward: Reward, device: torch.device) -> bool:
    wanted = getattr(reward, "device", "auto")
    if not isinstance(wanted, str) or wanted == "auto":
        return True
    place = torch.device(wanted)
    return place.type == device.type and place.index in (None, device.index)


def _bytes_of_models(reward: Reward) -> int | None:
    """Return the bytes of a reward's models: ``None`` if unknown, 0 for a built-in reward without one."""
    if isinstance(reward, GenEval):
        sizes = [_transformer(reward.detector, reward.dtype), _transformer(reward.clip, reward.dtype)]
        return None if None in sizes else sum(size for size in sizes if size)
    if not isinstance(reward, ModelReward):
        is_ours = type(reward).__module__.startswith("lit_vgrpo.") and not isinstance(reward, PythonReward)
        return 0 if is_ours else None
    width = getattr(torch, reward.dtype).itemsize
    if isinstance(reward, AestheticScore):
        known = AESTHETIC.get(reward.clip)
        return _vision(reward) if known is None else known * width
    if isinstance(reward, CLIPCosine):
        return _transformer(reward.checkpoint, reward.dtype)
    if isinstance(reward, HPSv2):
        elements = OPEN_CLIP.get(reward.model)
    else:
        elements = _elements(reward) if isinstance(reward, ImageReward) else None
    return None if elements is None else elements * width


def _transformer(checkpoint: str, dtype: str) -> int | None:
    """Return the bytes of a transformers model, from its configuration if present, else as published."""
    config = _config(checkpoint)
    if config is None:
        elements = PUBLISHED.get(checkpoint)
        return None if elements is None else elements * getattr(torch, dtype).itemsize
    return bytes_of(tensors_of(_on_meta(config, dtype)))


def _vision(reward: AestheticScore) -> int | None:
    from lit_vgrpo.rewards.model import ScoreHead

    config = _config(reward.clip)
    if config is None:
        return None
    clip: Any = _on_meta(config, reward.dtype)
    with torch.device("meta"):
        head = ScoreHead(clip.visual_projection.out_features)
    return sum(bytes_of(tensors_of(part)) for part in (clip.vision_model, clip.visual_projection, head))


def _elements(reward: ImageReward) -> int | None:
    from lit_vgrpo.rewards.image_reward import renamed

    if local_folder(reward.checkpoint) is None:
        return PUBLISHED.get(reward.checkpoint)
    key = reward.option("checkpoint")
    weights = read_weights(weights_path(reward.checkpoint, FILENAME, key), key)  # mapped, not read
    return sum(weight.numel() for weight in renamed(weights).values())


def _config(checkpoint: str) -> Any:
    """Return the configuration of a checkpoint whose ``config.json`` is on this machine; nothing is downloaded."""
    from transformers import AutoConfig

    path = file_at_hand(checkpoint, "config.json")
    return None if path is None else AutoConfig.from_pretrained(path.parent)


def _on_meta(config: Any, dtype: str) -> nn.Module:
    from transformers import AutoModelForObjectDetection, AutoModelForUniversalSegmentation, CLIPModel

    if config.model_type == "clip":
        with torch.device("meta"):
            return CLIPModel(config).to(getattr(torch, dtype))
    family: Any = AutoModelForObjectDetection
    if config.model_type in SEGMENTERS:
        family = AutoModelForUniversalSegmentation
    with torch.device("meta"):
        model: nn.Module = family.from_config(config)
    return model.to(getattr(torch, dtype))
