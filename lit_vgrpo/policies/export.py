"""Writes a policy in the format that diffusers loads back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_vgrpo.hub import quiet_libraries

if TYPE_CHECKING:
    from lit_vgrpo.policies.base import Policy


def save_policy(policy: Policy, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write what was trained: an adapter for ``load_lora_weights``, or a whole pipeline folder.

    Args:
        weights: the trained tensors by their names in the network, whole, where the network itself holds shards.
    """
    if policy.lora_rank is None:
        _save_pipeline(policy, folder, weights)
    else:
        _save_adapter(policy, folder, weights)


def save_merged(policy: Policy, folder: Path) -> None:
    """Add the adapter to the weights under it and write a pipeline folder; the policy is of no use afterwards.

    In float32, in which the frozen weights are exact whatever their type: a 16-bit type would round small updates away.
    """
    policy.network.float()
    policy.network.fuse_lora()
    policy.network.unload_lora()
    _save_pipeline(policy, folder, None)


def _save_adapter(policy: Policy, folder: Path, weights: Mapping[str, Tensor] | None) -> None:
    from peft.utils import get_peft_model_state_dict

    state = dict(weights) if weights is not None else None
    layers = policy.lora_names(get_peft_model_state_dict(policy.network, state_dict=state))
    metadata = {f"{policy.network_name}_lora_adapter_metadata": policy.network.peft_config["default"].to_dict()}
    policy.pipeline.save_lora_weights(folder, **{f"{policy.network_name}_lora_layers": layers}, **metadata)


def _save_pipeline(policy: Policy, folder: Path, weights: Mapping[str, Tensor] | None) -> None:
    pipeline, network = policy.pipeline, policy.network
    try:
        if weights is not None:
            setattr(pipeline, policy.network_name, _whole(network, weights))
        with quiet_libraries():
            pipeline.save_pretrained(folder)
    finally:
        setattr(pipeline, policy.network_name, network)


def _whole(network: Any, weights: Mapping[str, Tensor]) -> nn.Module:
    """A network of the same kind around the given weights, which are not copied."""
    # FSDP2 puts a class of its own in front of the network's.
    kind: Any = next(cls for cls in type(network).__mro__ if cls.__module__.startswith("diffusers."))
    with torch.device("meta"):
        whole = kind.from_config(network.config)
    buffers = {name: value for name, value in network.state_dict().items() if name not in weights}
    whole.load_state_dict({**buffers, **weights}, assign=True)
    return whole
