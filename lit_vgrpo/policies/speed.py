"""Speed options that do not change results: compilation, attention kernels, memory format."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from lit_vgrpo.errors import one_line, suggestion
from lit_vgrpo.policies.contract import PolicyContract
from lit_vgrpo.system.hub import LoadError, quiet_libraries

MOST_GRAPHS = 64
"""Recompile limit: kinds of blocks x with and without gradient x adapter folded or not x three kinds of size."""
MULTIPLE = 16
"""Sides of a quantised weight must be a multiple of this for the 8-bit kernels."""
WITHOUT_BACKWARD = ("sage", "_sage")


def speed_up(policy: PolicyContract) -> None:
    """Apply the speed options of a policy to its network.

    Raises:
        LoadError: an option is not possible.
    """
    if policy.attention_backend is not None:
        set_attention_backend(policy.network, policy.attention_backend)
    if policy.compile_network:
        compile_network(policy.network)


def compile_network(network: Any, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile a network's repeated blocks in place, for passes with and without gradient.

    Blocks of one kind share compiled code, so only one of them is compiled, and hooks on the network stay outside.
    Parameters keep their names. The first batch size is compiled for itself and the second for any size; a batch of one
    has its own code.

    Passes with and without gradient are compiled separately, and in 16 bits each would keep different intermediate
    results in float32: predictions of the same weights then differed by 0.24 % (small SD3, bfloat16, CPU), where the
    ratio must be 1. Every intermediate result is therefore rounded as without compilation, after which all predictions
    were equal bit for bit.

    Args:
        network: a diffusers model.
        backend: of ``torch.compile``; tests use a faster one.

    Raises:
        LoadError: no compiler is installed, or the network has no repeated blocks.
    """
    if backend == "inductor" and (error := compiler_error()):
        raise LoadError(error)
    blocks = repeated_blocks(network)
    if not blocks:
        raise LoadError(
            f"model.policy.compile=true: {type(network).__name__} has no repeated blocks. Set compile to false."
        )
    for block in blocks:
        block.compile(**compile_options(backend))


def compile_options(backend: str | Callable[..., Any] = "inductor") -> dict[str, Any]:
    """Return the arguments of ``torch.compile`` for a block; see :func:`compile_network`."""
    options = {"emulate_precision_casts": True} if backend == "inductor" else None
    return {"backend": backend, "recompile_limit": MOST_GRAPHS, "options": options}


def repeated_blocks(network: Any) -> list[nn.Module]:
    """Return the blocks that diffusers marks for compilation, or else those it never splits over devices."""
    names = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None)
    return [module for module in network.modules() if type(module).__name__ in (names or ())]


def block_linears(network: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of the repeated blocks that may be quantised, by name, without an adapter's own."""
    blocks = {id(layer) for block in repeated_blocks(network) for layer in block.modules()}
    return {
        name: layer
        for name, layer in network.named_modules()
        if id(layer) in blocks
        and isinstance(layer, nn.Linear)
        and "lora_" not in name
        and not any(n % MULTIPLE for n in (layer.in_features, layer.out_features))
    }


def compiler_error() -> str | None:
    """Return why ``torch.compile`` would fail on this machine, in one line, or ``None``."""
    from torch.utils._triton import has_triton_package

    candidates = os.environ.get("CXX", "").split()[:1] or ["g++", "clang++"]
    if not any(shutil.which(name) for name in candidates):
        return (
            f"model.policy.compile=true needs a C++ compiler: {' or '.join(candidates)} is not found. "
            "Install one (such as apt install g++), or set compile to false."
        )
    if torch.cuda.is_available() and not has_triton_package():
        return "model.policy.compile=true needs Triton on a GPU. Run: pip install triton. Or set compile to false."
    return None


def quantise_error(kind: str, where: str) -> str | None:
    """Return why this machine cannot multiply in an 8-bit type, in one line, or ``None``.

    Args:
        kind: the 8-bit type.
        where: the option's key, for the message.
    """
    if find_spec("torchao") is None:
        return f'{where}={kind} needs torchao. Run: pip install "lit-vgrpo[quantise]". Or leave it out.'
    if kind == "fp8" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        return f"{where}=fp8 needs a GPU of compute capability 8.9 or higher, such as an L40S or H100. Use int8."
    return None


def set_attention_backend(network: Any, name: str) -> None:
    """Use one of diffusers' backends in all attention layers of this network, and of no other.

    Raises:
        LoadError: the backend does not exist, is not usable here or has no backward pass, or the network's layers would
            ignore it.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    option = f"model.policy.attention_backend={name}"
    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        raise LoadError(f"{option} is not a diffusers backend. {suggestion(name, known)}")
    if name.startswith(WITHOUT_BACKWARD):
        raise LoadError(f"{option} has no backward pass, which training needs. Use flash, or leave it out.")
    processors = attention_processors(network)
    deaf = {type(processor).__name__ for processor in processors if not hasattr(processor, "_attention_backend")}
    if deaf or not processors:
        raise LoadError(
            f"{option} would be ignored by {type(network).__name__}: its {', '.join(sorted(deaf)) or 'layers'} always "
            "use torch's attention, which chooses a kernel itself. Leave it out."
        )
    try:
        # diffusers makes it the default of every network in the process; the context puts that back.
        with quiet_libraries(), attention_backend():
            network.set_attention_backend(name)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise LoadError(f"{option} cannot be used: {one_line(error)}") from error


def attention_processors(network: nn.Module) -> list[Any]:
    """Return the attention processor of each of a network's attention layers."""
    return [module.processor for module in network.modules() if hasattr(module, "processor")]


def use_channels_last(network: nn.Module) -> None:
    """Store a UNet's convolution weights in channels-last format; predictions do not change.

    Raises:
        LoadError: the network is not a UNet.
    """
    from diffusers import UNet2DConditionModel

    if not isinstance(network, UNet2DConditionModel):
        raise LoadError(
            f"model.policy.channels_last=true is for UNets: {type(network).__name__} has hardly any convolutions. "
            "Leave it out."
        )
    network.to(memory_format=torch.channels_last)
