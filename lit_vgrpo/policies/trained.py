"""Choice of the trained weights (a LoRA adapter, all, or some by name) and of the storage of the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_vgrpo.errors import suggestion
from lit_vgrpo.policies.acceleration import repeated_blocks
from lit_vgrpo.system.hub import LoadError

BLOCK = 64
"""Weights that share a float32 scale, as in QLoRA (arXiv 2305.14314)."""
MULTIPLE = 16
"""Each side of a quantised weight is a multiple of this, so that its weights fill whole blocks."""


def choose_trained(
    network: nn.Module, patterns: Sequence[str] | None, unused: Sequence[str], dtype: torch.dtype
) -> None:
    """Freeze and cast a network: trained weights in float32, all others in another type.

    Args:
        patterns: Shell-style patterns of the trained weights; ``None`` trains those that the adapter left trainable.
        unused: Patterns of weights that are never trained.
        dtype: Type of the others.

    Raises:
        LoadError: A pattern matches nothing.
    """
    if patterns is not None:
        names = [name for name, _ in network.named_parameters()]
        unmatched = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
        _refuse_unmatched("train_only", network, unmatched, names)
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))
    for name, parameter in network.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in unused):
            parameter.requires_grad_(False)  # DDP waits for a gradient of every trained weight
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype)


def add_adapter(parts: Iterable[Any], rank: int, alpha: int, targets: Sequence[str]) -> None:
    """Add a LoRA adapter, the same in every run, to networks; it changes nothing yet, since its B matrices are zero."""
    from peft import LoraConfig

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights="gaussian")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed GPUs, too
        for part in parts:
            part.add_adapter(config)


def refuse_unknown_targets(network: nn.Module, targets: Sequence[str]) -> None:
    """Raise LoadError if an adapter's target matches no layer of a network."""
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    unmatched = [target for target in targets if not any(is_target(name, target) for name in names)]
    _refuse_unmatched("lora_targets", network, unmatched, sorted({name_in_block(name) for name in names}))


def _refuse_unmatched(option: str, network: nn.Module, unmatched: Sequence[str], names: Sequence[str]) -> None:
    for pattern in unmatched:
        raise LoadError(
            f"model.policy.{option}: {pattern!r} matches nothing in {type(network).__name__}. "
            f"{suggestion(pattern, names)}"
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


# --- a frozen base in 4 or 8 bits ------------------------------------------------------------------------------------
# bitsandbytes (read in 0.50.2) has kernels for CPU and CUDA. Its layers are not used: some of their kernels run only
# without gradient, and a pass without gradient must equal one with it, or the ratio is not 1 before the update.


def block_linears(network: Any) -> dict[str, nn.Linear]:
    """Return the linear layers of the repeated blocks that may be quantised, by name, without an adapter's layers."""
    blocks = {id(layer) for block in repeated_blocks(network) for layer in block.modules()}
    return {
        name: layer
        for name, layer in network.named_modules()
        if id(layer) in blocks
        and isinstance(layer, nn.Linear)
        and "lora_" not in name
        and not any(n % MULTIPLE for n in (layer.in_features, layer.out_features))
    }


def quantise(network: nn.Module, kind: Literal["nf4", "int8"], dtype: torch.dtype) -> None:
    """Replace the linear layers of the repeated blocks by quantised ones, which compute in a type."""
    for name, layer in block_linears(network).items():
        if not layer.weight.is_meta:
            network.set_submodule(name, QuantisedLinear(layer, kind, dtype))


def quantised_bytes(kind: Literal["nf4", "int8"], weights: int) -> int:
    """Return the bytes of a number of weights and their scales."""
    return (weights // 2 if kind == "nf4" else weights) + 4 * -(-weights // BLOCK)


class QuantisedLinear(nn.Linear):
    """A frozen linear layer that keeps its weight in 4 or 8 bits and multiplies in the type of its input.

    Args:
        layer: Layer that it replaces.
        kind: ``nf4``: 4-bit NormalFloat. ``int8``: bitsandbytes' 8-bit numbers, spaced more closely around 0.
        dtype: Dtype of the bias.
    """

    absmax: Tensor
    code: Tensor

    def __init__(self, layer: nn.Linear, kind: Literal["nf4", "int8"], dtype: torch.dtype) -> None:
        from bitsandbytes import functional as kernels

        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.kind = kind
        whole = layer.weight.detach().to(dtype).contiguous()
        if kind == "nf4":
            packed, state = kernels.quantize_4bit(whole, blocksize=BLOCK, quant_type=kind)
        else:
            packed, state = kernels.quantize_blockwise(whole, blocksize=BLOCK)
        self.weight = nn.Parameter(packed, requires_grad=False)
        if layer.bias is not None:
            self.bias = nn.Parameter(layer.bias.detach().to(dtype), requires_grad=False)
        self.register_buffer("absmax", state.absmax, persistent=False)
        self.register_buffer("code", state.code, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _Product.apply(x.to(dtype), self)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return the weight ``(out, in)``."""
        from bitsandbytes import functional as kernels

        shape = torch.Size([self.out_features, self.in_features])
        state = kernels.QuantState(
            self.absmax, shape, code=self.code, blocksize=BLOCK, quant_type=self.kind, dtype=dtype
        )
        restore = kernels.dequantize_4bit if self.kind == "nf4" else kernels.dequantize_blockwise
        return restore(self.weight, state)


class _Product(torch.autograd.Function):
    """Autograd function of the layer's output; the backward pass restores the weight again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.whole(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.layer.whole(gradients[0].dtype), None
