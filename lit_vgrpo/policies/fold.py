"""A LoRA adapter merged into the weights while images are sampled, so that sampling pays for no adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_vgrpo.core.sharding import is_sharded
from lit_vgrpo.policies.contract import PolicyContract, sixteen_bit_fold_fault
from lit_vgrpo.system.hub import LoadError


class FoldedLora:
    """Merges a network's LoRA adapter by peft's ``merge``, and restores the weights bit for bit from a copy.

    peft's own ``unmerge`` subtracts the update again, which changes the last bits of the weights. Use this only for
    sampling whose network outputs enter no likelihood ratio: merged and unmerged layers round differently.

    Args:
        network: with a LoRA adapter on float32 linear or convolutional layers.
    """

    def __init__(self, network: nn.Module) -> None:
        self._layers = lora_layers(network)
        self._kept: list[Tensor] = []
        self._versions: list[int] = []

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Merge the adapter as it is on entering, and compute no gradient, inside the block.

        The adapter's own tensors, their names and ``requires_grad`` stay as they are. What swaps the adapter's
        weights does so before entering; entering again inside merges the new ones. As with a swap, nothing may be
        merged between a forward pass and its backward pass: autograd then refuses the backward pass.
        """
        nested = self._layers[0].merged
        if nested:
            outer = [weight(layer).detach().clone() for layer in self._layers]
            self._restore(self._kept)
        else:
            outer = self._keep()
        with torch.no_grad():
            try:
                self._merge()
                yield
            finally:
                self._restore(outer, merged=nested)

    def _keep(self) -> list[Tensor]:
        """Return a copy of the weights on the CPU: the last one where nobody has written to them since."""
        weights = [weight(layer).detach() for layer in self._layers]
        if self._versions != [own._version for own in weights]:
            self._kept = [own.to("cpu", copy=True) for own in weights]
        return self._kept

    def _merge(self) -> None:
        with torch.autocast(weight(self._layers[0]).device.type, enabled=False):
            for layer in self._layers:
                layer.merge()
                # peft writes past autograd, which would then take the merged weights for those of the forward pass
                torch.autograd.graph.increment_version(weight(layer))

    @torch.no_grad()
    def _restore(self, values: Sequence[Tensor], merged: bool = False) -> None:
        for layer, own in zip(self._layers, values, strict=True):
            weight(layer).copy_(own)
            layer.merged_adapters[:] = layer.active_adapters if merged else []
        self._versions = [weight(layer)._version for layer in self._layers]


def is_folded_for_sampling(policy: PolicyContract) -> bool:
    """Return ``True`` where ``fold_lora`` asks for the merged adapter, or leaves it open and nothing is in the way.

    Raises:
        LoadError: ``fold_lora=true`` asks for what cannot be done.
    """
    if policy.fold_lora is False or (policy.fold_lora is None and policy.lora_rank is None):
        return False
    fault = fold_fault(policy)
    if fault is not None and policy.fold_lora:
        raise LoadError(fault)
    return fault is None


def lora_layers(network: nn.Module) -> list[Any]:
    """Return the layers that carry an adapter."""
    from peft.tuners.lora import LoraLayer

    return [module for module in network.modules() if isinstance(module, LoraLayer)]


def weight(layer: Any) -> Tensor:
    """Return the weight under a layer's adapter."""
    return layer.get_base_layer().weight


def fold_fault(policy: PolicyContract) -> str | None:
    """Return why a policy's adapter cannot be merged into the weights, in a line; ``None`` when it can.

    Weights that a strategy shards are found only once it has done so.
    """
    layers = lora_layers(policy.network)
    option = "model.policy.fold_lora=true"
    if not layers:
        return f"{option} has nothing to fold: {type(policy.network).__name__} carries no LoRA adapter. Leave it out."
    for dtype in (policy.dtype, *(weight(layer).dtype for layer in layers)):
        if dtype != torch.float32:
            return f"model.policy.{sixteen_bit_fold_fault(dtype)}"
    if any(is_sharded(weight(layer)) for layer in layers):
        return f"{option} needs whole weights on every rank: FSDP2 and ZeRO-3 shard them. Leave it out, or use zero2."
    if any(getattr(layer.get_base_layer(), "groups", 1) > 1 for layer in layers):
        return f"{option} cannot add an adapter to convolutions in groups. Leave it out."
    return None
