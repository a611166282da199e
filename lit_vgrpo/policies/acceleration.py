"""Faster passes: compilation, attention kernels, and a view of the network that only rollouts use.

The view shares the network's tensors, so the trained network gets no rounded weight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lit_vgrpo.errors import one_line, suggestion
from lit_vgrpo.system.hub import LoadError, quiet_libraries

MOST_GRAPHS = 64
"""Recompile limit: kinds of blocks x with and without gradient x adapter folded or not x three kinds of sizes."""


def compile_network(
    network: Any, backend: str | Callable[..., Any] = "inductor", exact: bool = True, rows: int | None = None
) -> None:
    """Compile a network's repeated blocks in place, for passes with and without gradient; parameters keep their names.

    Blocks of one kind share compiled code. Passes with and without gradient are compiled separately, and in 16 bits
    each would keep different intermediate results in float32: predictions of the same weights then differed by 0.24 %
    (small SD3, bfloat16, CPU), although the ratio must be 1. So every intermediate result is rounded as without
    compilation, which made all predictions equal bit for bit.

    Args:
        network: A diffusers model.
        backend: Backend of ``torch.compile``; tests use a faster one.
        exact: Round intermediate results as above. Otherwise only passes of one kind may be compared.
        rows: A pass on this many rows compiles for any number. Else torch compiles for one, and again at the second.

    Raises:
        LoadError: The network has no repeated blocks.
    """
    blocks = repeated_blocks(network)
    if not blocks:
        raise LoadError(f"model.policy.compile=true: {type(network).__name__} has no repeated blocks.")
    from torch._dynamo import config  # torch.compile has an argument for the limit from 2.12 on

    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    options = {"emulate_precision_casts": True} if exact and backend == "inductor" else None
    for block in blocks:
        block.compile(backend=backend, options=options)
        if rows is not None:
            block._compiled_call_impl = partial(_called_with_any, block._compiled_call_impl, rows)


def _called_with_any(compiled: Any, rows: int, *args: Any, **kwargs: Any) -> Any:
    from torch._dynamo import maybe_mark_dynamic

    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows:
            maybe_mark_dynamic(value, 0)
    return compiled(*args, **kwargs)


def repeated_blocks(network: Any) -> list[nn.Module]:
    """Return the blocks that diffusers marks for compilation, or else those it never splits over devices."""
    names = getattr(network, "_repeated_blocks", None) or getattr(network, "_no_split_modules", None)
    return [module for module in network.modules() if type(module).__name__ in (names or ())]


def attention_error(name: str, is_elsewhere: bool = False) -> str | None:
    """Return why a network cannot be trained with an attention backend, perhaps on another machine, or ``None``."""
    from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend

    option, known = f"model.policy.attention_backend={name}", [backend.value for backend in AttentionBackendName]
    if name.startswith(("sage", "_sage")):
        return f"{option} has no backward pass. Use flash, or leave it out."
    if name.lower() not in known:
        return f"{option} does not exist. {suggestion(name, known)}"
    try:
        with attention_backend(name.lower()):
            return None
    except RuntimeError as error:
        return None if is_elsewhere else f"{option}: {one_line(error)}"


def set_attention_backend(network: Any, name: str) -> None:
    """Use one of diffusers' backends in all attention layers of this network only; LoadError if it cannot be used."""
    from diffusers.models.attention_dispatch import attention_backend

    if (error := attention_error(name)) is not None:
        raise LoadError(error)
    # diffusers makes it the default of every network in the process; the context restores that.
    with quiet_libraries(), attention_backend():
        network.set_attention_backend(name)


def shared_view(network: nn.Module) -> Any:
    """Return a network of new module objects that share all tensors and attributes with the given one.

    New weights and moves to another device affect both; a function set on a module of the view does not.
    """
    views: dict[int, nn.Module] = {}

    def view(module: nn.Module) -> nn.Module:
        if id(module) not in views:
            made = views[id(module)] = copy.copy(module)  # without compiled code, which torch leaves out
            made.__dict__["_modules"] = {
                name: child if child is None else view(child) for name, child in module._modules.items()
            }
        return views[id(module)]

    return view(network)


def lora_layers(network: nn.Module) -> dict[str, Any]:
    """Return the layers that have an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in network.named_modules() if isinstance(module, LoraLayer)}


class FoldedNetwork:
    """A view of a network in which the adapter is merged into copies of the weights.

    Use it only where predictions enter no likelihood ratio: merged and unmerged layers round differently.

    Args:
        network: A network with an adapter on float32 linear or convolutional layers.
        compiled: Compile the view.
    """

    def __init__(self, network: Any, compiled: bool = False) -> None:
        self.source = network
        self.network = shared_view(network)
        self._layers: list[tuple[nn.Module, Any]] = []
        for name, layer in lora_layers(network).items():
            merged = copy.copy(layer.get_base_layer())
            merged.__dict__["_parameters"] = dict(merged._parameters)  # no longer shared
            self.network.set_submodule(name, merged)
            self._layers.append((merged, layer))
        if compiled:
            compile_network(self.network)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Merge the current adapter, and drop the merged weights afterwards."""
        try:
            with torch.no_grad():
                for merged, layer in self._layers:
                    weight = layer.get_base_layer().weight
                    with torch.autocast(weight.device.type, enabled=False):
                        changed = weight + layer.get_delta_weight("default")
                    merged.register_parameter("weight", nn.Parameter(changed, requires_grad=False))
            yield
        finally:
            for merged, layer in self._layers:
                merged.register_parameter("weight", layer.get_base_layer().weight)
