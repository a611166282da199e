"""A frozen network in 4 or 8 bits under a LoRA, with the kernels of bitsandbytes, which have CPU and CUDA versions.

bitsandbytes was read in 0.50.2. Its own layers are not used: some of their kernels run only without gradient, and a
pass without gradient must equal one with it, or the ratio is not 1 before an update. diffusers'
``BitsAndBytesConfig`` refuses machines without a GPU.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_vgrpo.policies.contract import PolicyContract
from lit_vgrpo.policies.speed import block_linears

KEY = "model.policy.quantisation"
Kind = Literal["nf4", "int8"]
BLOCK = 64
"""Weights that share a float32 scale, as in QLoRA (arXiv 2305.14314)."""


def quantisation_error(policy: PolicyContract) -> str | None:
    """Return why a policy's network cannot be quantised, in one line, or ``None``; the policy need not be loaded."""
    kind = policy.quantisation
    if kind is None:
        return None
    if policy.lora_rank is None:
        return (
            f"{KEY}={kind} freezes the network, which this run trains. Set model.policy.lora_rank=32, or leave it out."
        )
    if find_spec("bitsandbytes") is None:
        return f'{KEY}={kind} needs bitsandbytes. Run: pip install "lit-vgrpo[memory]". Or leave it out.'
    for option, is_on in (("compile", policy.compile_network), ("fold_lora", policy.fold_lora)):
        if is_on:
            return f"{KEY}={kind} does not go with model.policy.{option}=true. Leave out one of them."
    return None


def quantise_base(policy: PolicyContract) -> None:
    """Replace the linear layers of the network's blocks by quantised ones; does nothing on the meta device."""
    for name, layer in block_linears(policy.network).items():
        if not layer.weight.is_meta:
            policy.network.set_submodule(name, QuantisedLinear(layer, policy.quantisation, policy.dtype))


def quantised_bytes(kind: Kind, weights: int) -> int:
    """Return the bytes of a number of weights and their scales."""
    return (weights // 2 if kind == "nf4" else weights) + 4 * -(-weights // BLOCK)


class QuantisedLinear(nn.Linear):
    """A frozen linear layer that keeps its weight in 4 or 8 bits and multiplies in the type of its input.

    Args:
        layer: what it replaces.
        kind: ``nf4``: 4-bit NormalFloat. ``int8``: bitsandbytes' 8-bit numbers, spaced more closely around 0.
        dtype: of the bias.
    """

    absmax: Tensor
    code: Tensor

    def __init__(self, layer: nn.Linear, kind: Kind | None, dtype: torch.dtype) -> None:
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
    """The layer's output; the weight is restored again in the backward pass instead of kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.whole(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.layer.whole(gradients[0].dtype), None
