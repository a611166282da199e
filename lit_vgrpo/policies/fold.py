"""A LoRA adapter added to the weights for a while, so that sampling pays for no adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lit_vgrpo.core.sharding import is_sharded
from lit_vgrpo.policies.contract import PolicyContract
from lit_vgrpo.system.hub import LoadError

DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of a float32 that a 16-bit type has no room for."""


class FoldedLora:
    """Adds a network's LoRA adapter to the layers under it, and takes it out again bit for bit.

    Only for sampling whose network outputs enter no likelihood ratio: folded and unfolded layers round differently.

    In float32 the sum is exact up to float error. In 16 bits a frozen weight lies on the grid of its type already, and
    rounding to nearest drops every update below half a step of it: the policy that samples would be the reference.
    So the sum is rounded up or down at random (stochastic rounding, a fixed seed), with the right mean. What is left of
    the adapter's effect on the output of an SD3 transformer, as a projection on its true effect, and the relative
    error of that effect, with bfloat16 weights but float32 arithmetic, where dW is the update and the steps of the
    grid around the weights are about 1e-4 (16 heads, 4 blocks at 3e-6 and 3e-5; 8 heads, 6 blocks at 1e-4 and 1e-3):

    ==============  ================  ================
    dW, r.m.s.      to nearest        stochastic
    ==============  ================  ================
    3e-6            0.08, error 0.92  1.00, error 0.14
    3e-5            0.80, error 0.21  1.00, error 0.03
    1e-4            0.98, error 0.03  1.00, error 0.02
    1e-3            1.00, error 0.00  1.00, error 0.00
    ==============  ================  ================

    The arithmetic's own bfloat16 noise on that effect is far larger and the same for all: relative errors of 8.0
    without folding, 8.1 to nearest and 9.0 stochastic at 3e-6; 0.75, 0.75 and 0.75 at 1e-4; 0.05 three times at 1e-3.

    Args:
        network: with a LoRA adapter on linear or convolutional layers.
        dtype: what the network computes in; the sum is rounded to its grid.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        self._layers = lora_layers(network)
        self._dtype = dtype
        self._kept: list[Tensor] = []
        self._versions: list[int] = []
        self._depth = 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The weights hold the adapter inside, as it is on entering, and there is no gradient.

        The adapter's own tensors, their names and ``requires_grad`` stay as they are. What swaps the adapter's
        weights does so before entering; entering again inside takes up new ones. As with a swap, nothing may be
        folded between a forward and its backward: autograd then refuses the backward.
        """
        self._keep()
        outer = [weight(layer).detach().clone() for layer in self._layers] if self._depth else self._kept
        self._depth += 1
        with torch.no_grad():
            try:
                self._fold()
                yield
            finally:
                self._depth -= 1
                self._put_back(outer)

    def _keep(self) -> None:
        """Copy the weights, on the CPU, unless there is a copy and nobody has written to them since."""
        weights = [weight(layer).detach() for layer in self._layers]
        if not self._depth and self._versions != [own._version for own in weights]:
            self._kept = [own.to("cpu", copy=True) for own in weights]

    def _fold(self) -> None:
        for seed, (layer, original) in enumerate(zip(self._layers, self._kept, strict=True)):
            base = weight(layer)
            whole = original.to(base.device) if layer.merged else base
            folded = whole.to(torch.promote_types(base.dtype, torch.float32), copy=True)
            with torch.autocast(base.device.type, enabled=False):
                for name in layer.active_adapters:
                    folded += layer.get_delta_weight(name)
            grid = next((dtype for dtype in (base.dtype, self._dtype) if dtype in DROPPED_BITS), None)
            base.copy_(folded if grid is None else stochastically_rounded(folded, grid, seed))
            layer.merged_adapters[:] = layer.active_adapters  # peft then leaves the adapter out
        self._note_versions()

    def _put_back(self, values: list[Tensor]) -> None:
        for layer, own in zip(self._layers, values, strict=True):
            weight(layer).copy_(own)
            if not self._depth:
                layer.merged_adapters.clear()
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [weight(layer)._version for layer in self._layers]


def folded_for_sampling(policy: PolicyContract) -> AbstractContextManager[None]:
    """The policy's adapter folded, where ``fold_lora`` asks for it or it is exact; else nothing happens.

    Raises:
        LoadError: ``fold_lora`` asks for what cannot be.
    """
    if policy.fold_lora is False or (policy.fold_lora is None and not _is_exact(policy)):
        return nullcontext()
    if fault := fold_fault(policy.network):
        if policy.fold_lora:
            raise LoadError(fault)
        return nullcontext()
    if policy.folded is None:
        policy.folded = FoldedLora(policy.network, policy.dtype)
    return policy.folded.applied()


def _is_exact(policy: PolicyContract) -> bool:
    """Whether a sum of weights and adapter is rounded as float32 is, and no coarser."""
    if policy.lora_rank is None:
        return False
    dtypes = {policy.dtype, *(weight(layer).dtype for layer in lora_layers(policy.network))}
    return not dtypes & DROPPED_BITS.keys()


def lora_layers(network: nn.Module) -> list[Any]:
    """The layers that carry an adapter."""
    from peft.tuners.lora import LoraLayer

    return [module for module in network.modules() if isinstance(module, LoraLayer)]


def weight(layer: Any) -> Tensor:
    """The weight under a layer's adapter."""
    return layer.get_base_layer().weight


def fold_fault(network: nn.Module) -> str | None:
    """Why an adapter cannot be folded into a network's weights, in a line; ``None`` when it can.

    Weights that a strategy shards are found only once it has done so.
    """
    layers = lora_layers(network)
    option = "model.policy.fold_lora=true"
    if not layers:
        return f"{option} has nothing to fold: {type(network).__name__} carries no LoRA adapter. Leave it out."
    if any(is_sharded(weight(layer)) for layer in layers):
        return f"{option} needs whole weights on every rank: FSDP2 and ZeRO-3 shard them. Leave it out, or use zero2."
    if any(getattr(layer.get_base_layer(), "groups", 1) > 1 for layer in layers):
        return f"{option} cannot add an adapter to convolutions in groups. Leave it out."
    return None


def stochastically_rounded(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Float32 values on the grid of a 16-bit type, each up or down with the probabilities that keep its mean.

    Values that are on the grid stay as they are. Below float16's smallest normal number (6e-5) the steps of the grid
    no longer shrink; there the last bits are rounded to nearest, an error of at most 3e-8.
    """
    dropped = DROPPED_BITS[dtype]
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(1 << dropped, values.shape, generator=generator, device=values.device, dtype=torch.int32)
    bits = (values.float().contiguous().view(torch.int32) + noise) & -(1 << dropped)
    return bits.view(torch.float32).to(dtype)
