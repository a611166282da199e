"""What makes a network faster without changing what it computes: compilation, attention kernels, memory layout."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lit_vgrpo.errors import one_line, suggestion
from lit_vgrpo.policies.contract import PolicyContract
from lit_vgrpo.system.hub import LoadError, quiet_libraries

MOST_GRAPHS = 64
"""Of the compiled blocks: kinds of blocks x with and without gradient x adapter folded or not x three kinds of size."""
WITHOUT_BACKWARD = ("sage", "_sage")


def speed_up(policy: PolicyContract) -> None:
    """Do with a policy's network what its options ask for.

    Raises:
        LoadError: an option cannot be met.
    """
    if policy.attention_backend is not None:
        set_attention_backend(policy.network, policy.attention_backend)
    if policy.compile_network:
        compile_network(policy.network)


def compile_network(network: Any, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile a network's repeated blocks in place, for passes with and without gradient.

    Blocks of one kind share their compiled code, so that it takes as long as compiling one of them, and what hooks the
    network stays outside. Parameters keep their names. A first batch size is compiled as it is and the second one for
    any size; a batch of one has code of its own.

    Passes with and without gradient are compiled apart, and in 16 bits each would keep other intermediate results in
    float32: predictions of the same weights then differed by 0.24 % (small SD3, bfloat16, CPU), where the ratio must
    be 1. So every intermediate result is rounded where it is without compilation, after which they were equal bit for
    bit, to each other and to those without compilation.

    Args:
        network: a diffusers model.
        backend: what compiles; tests take a quicker one.

    Raises:
        LoadError: no compiler is installed, or the network has no repeated blocks.
    """
    if backend == "inductor" and (fault := compiler_fault()):
        raise LoadError(fault)
    blocks = repeated_blocks(network)
    if not blocks:
        raise LoadError(
            f"model.policy.compile=true finds no repeated blocks in {type(network).__name__}. Set compile to false."
        )
    options = {"emulate_precision_casts": True} if backend == "inductor" else None
    for block in blocks:
        block.compile(backend=backend, recompile_limit=MOST_GRAPHS, options=options)


def repeated_blocks(network: Any) -> list[nn.Module]:
    """Return the blocks that diffusers names for compilation, or else those that it never splits over devices."""
    names = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None)
    return [module for module in network.modules() if type(module).__name__ in (names or ())]


def compiler_fault() -> str | None:
    """Why ``torch.compile`` would fail on this machine, in a line; ``None`` where it can work."""
    from torch.utils._triton import has_triton_package

    candidates = os.environ.get("CXX", "").split()[:1] or ["g++", "clang++"]
    if not any(shutil.which(name) for name in candidates):
        return (
            f"model.policy.compile=true needs a C++ compiler: {' or '.join(candidates)} is not found. "
            "Install one (such as apt install g++), or set compile to false."
        )
    if torch.cuda.is_available() and not has_triton_package():
        return "model.policy.compile=true needs Triton on a GPU. Type: pip install triton. Or set compile to false."
    return None


def set_attention_backend(network: Any, name: str) -> None:
    """Let all of a network's attention layers compute with one of diffusers' backends.

    Raises:
        LoadError: there is no such backend, it is not usable here or has no backward pass, or the network's layers
            would ignore it.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName

    option = f"model.policy.attention_backend={name}"
    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        raise LoadError(f"{option} is not a backend of diffusers. {suggestion(name, known)}")
    if name.startswith(WITHOUT_BACKWARD):
        raise LoadError(f"{option} has no backward pass: it cannot be trained with. Use flash, or leave it out.")
    processors = attention_processors(network)
    deaf = {type(processor).__name__ for processor in processors if not hasattr(processor, "_attention_backend")}
    if deaf or not processors:
        raise LoadError(
            f"{option} would be ignored by {type(network).__name__}: its {', '.join(sorted(deaf)) or 'layers'} always "
            "take torch's own attention, which chooses a kernel by itself. Leave it out."
        )
    try:
        with quiet_libraries():
            network.set_attention_backend(name)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise LoadError(f"{option} cannot be used: {one_line(error)}") from error


def attention_processors(network: nn.Module) -> list[Any]:
    """Return what computes the attention in each of a network's attention layers."""
    return [module.processor for module in network.modules() if hasattr(module, "processor")]


def use_channels_last(network: nn.Module) -> None:
    """Keep the weights of a UNet's convolutions as their kernels read them; the predictions are the same.

    Raises:
        LoadError: the network is no UNet.
    """
    from diffusers import UNet2DConditionModel

    if not isinstance(network, UNet2DConditionModel):
        raise LoadError(
            f"model.policy.channels_last=true is for UNets: {type(network).__name__} has hardly a convolution. "
            "Leave it out."
        )
    network.to(memory_format=torch.channels_last)
