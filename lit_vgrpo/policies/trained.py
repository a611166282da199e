"""Choice of the weights that are trained: a LoRA adapter, all weights, or some by name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from lit_vgrpo.errors import suggestion
from lit_vgrpo.policies.contract import PolicyContract
from lit_vgrpo.policies.quantised_base import quantise_base
from lit_vgrpo.system.hub import LoadError


def choose_trained(policy: PolicyContract) -> None:
    """Freeze and cast a policy's network: trained weights in float32, all others in the policy's dtype.

    Raises:
        LoadError: a name pattern or a LoRA target matches nothing.
    """
    network: nn.Module = policy.network
    if policy.lora_rank is not None:
        if policy.quantisation is not None:
            quantise_base(policy)
        add_adapter(policy)
    elif policy.train_only is not None:
        train_only(network, policy.train_only)
    else:
        network.requires_grad_(True)
    for name, parameter in network.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in policy.unused_weights()):
            parameter.requires_grad_(False)  # DDP waits for a gradient of every trained weight
    for parameter in (own for own in network.parameters() if own.is_floating_point()):
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else policy.dtype)


def add_adapter(policy: PolicyContract) -> None:
    """Add a LoRA adapter to the network; a new one changes nothing, since its B matrices are zero."""
    from peft import LoraConfig

    rank, network = policy.lora_rank, policy.network
    assert rank is not None
    if policy.lora_targets != list(policy.default_lora_targets):  # small networks may lack some of the defaults
        _refuse_unmatched_targets(network, policy.lora_targets)
    config = LoraConfig(
        r=rank,
        lora_alpha=policy.lora_alpha or rank,
        target_modules=policy.lora_targets,
        init_lora_weights="gaussian",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(policy.init_seed)
        try:
            network.add_adapter(config)
        except ValueError as error:
            raise LoadError(
                f"lora_targets={policy.lora_targets} match no layer of {type(network).__name__} that supports "
                f"an adapter. Use suffixes such as {', '.join(policy.default_lora_targets[:2])}."
            ) from error


def _refuse_unmatched_targets(network: nn.Module, targets: Sequence[str]) -> None:
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    for target in targets:
        if not any(is_target(name, target) for name in names):
            endings = sorted({name_in_block(name) for name in names})
            holding = [ending for ending in endings if f".{target}." in f".{ending}."]
            advice = suggestion(target, holding or endings) if len(holding) < 2 else suggestion("", holding)
            raise LoadError(
                f"model.policy.lora_targets: {target!r} matches nothing in {type(network).__name__}. {advice}"
            )


def is_target(name: str, target: str) -> bool:
    """Return whether an adapter's target names a layer, by peft's rule."""
    return name == target or name.endswith(f".{target}")


def name_in_block(name: str) -> str:
    """Return a layer's name within its block: the part after the last number that is not the last component."""
    words = name.split(".")
    numbers = (i for i, word in enumerate(words[:-1]) if word.isdigit() and words[i - 1] != "net")  # of a feed-forward
    last = max(numbers, default=-1)
    return ".".join(words[last + 1 :]) or name


def train_only(network: nn.Module, patterns: Sequence[str]) -> None:
    """Train the parameters whose names match one of the shell-style patterns, such as ``*.attn.to_q.*``.

    Raises:
        LoadError: a pattern matches no parameter.
    """
    names = [name for name, _ in network.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LoadError(
                f"model.policy.train_only: {pattern!r} matches no parameter of {type(network).__name__}. "
                f"{suggestion(pattern, names)} Patterns are shell-style, such as '*.attn.*'."
            )
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))
