"""Merging a LoRA adapter into the weights during sampling, so that sampling does not pay for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_vgrpo.core.sharding import is_sharded
from lit_vgrpo.policies.contract import PolicyContract, sixteen_bit_fold_error
from lit_vgrpo.system.hub import LoadError


class FoldedLora:
    """Merger of a network's LoRA adapter with peft's ``merge``, which restores the weights bit for bit from a copy.

    peft's ``unmerge`` subtracts the update again, which changes the last bits of the weights. Use this only for
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
        """Merge the current adapter and disable gradients within the context.

        The adapter's tensors, their names and ``requires_grad`` do not change. Swap the adapter's weights before
        entering; entering again inside merges the new ones. As with a swap, do not merge between a forward pass and its
        backward pass: autograd then refuses the backward pass.
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
        """Return a copy of the weights on the CPU, reusing the last one if they have not changed since."""
        weights = [weight(layer).detach() for layer in self._layers]
        if self._versions != [own._version for own in weights]:
            self._kept = [own.to("cpu", copy=True) for own in weights]
        return self._kept

    def _merge(self) -> None:
        with torch.autocast(weight(self._layers[0]).device.type, enabled=False):
            for layer in self._layers:
                layer.merge()
                # peft bypasses autograd, which would then use the merged weights for an earlier forward pass
                torch.autograd.graph.increment_version(weight(layer))

    @torch.no_grad()
    def _restore(self, values: Sequence[Tensor], merged: bool = False) -> None:
        for layer, own in zip(self._layers, values, strict=True):
            weight(layer).copy_(own)
            layer.merged_adapters[:] = layer.active_adapters if merged else []
        self._versions = [weight(layer)._version for layer in self._layers]


def is_folded_for_sampling(policy: PolicyContract) -> bool:
    """Return whether the adapter is merged for sampling: ``fold_lora`` is true, or null and merging is possible.

    Raises:
        LoadError: ``fold_lora=true`` is not possible.
    """
    if policy.fold_lora is False or (policy.fold_lora is None and policy.lora_rank is None):
        return False
    error = fold_error(policy)
    if error is not None and policy.fold_lora:
        raise LoadError(error)
    return error is None


def lora_layers(network: nn.Module) -> list[Any]:
    """Return the layers that have an adapter."""
    from peft.tuners.lora import LoraLayer

    return [module for module in network.modules() if isinstance(module, LoraLayer)]


def weight(layer: Any) -> Tensor:
    """Return the weight under a layer's adapter."""
    return layer.get_base_layer().weight


def fold_error(policy: PolicyContract) -> str | None:
    """Return why a policy's adapter cannot be merged into the weights, in one line; ``None`` if it can.

    Sharded weights are detected only after the strategy has sharded them.
    """
    layers = lora_layers(policy.network)
    option = "model.policy.fold_lora=true"
    if not layers:
        return f"{option} has nothing to fold: {type(policy.network).__name__} has no LoRA adapter. Leave it out."
    for dtype in (policy.dtype, *(weight(layer).dtype for layer in layers)):
        if dtype != torch.float32:
            return f"model.policy.{sixteen_bit_fold_error(dtype)}"
    if any(is_sharded(weight(layer)) for layer in layers):
        return f"{option} needs full weights on every rank: FSDP2 and ZeRO-3 shard them. Leave it out, or use zero2."
    if any(getattr(layer.get_base_layer(), "groups", 1) > 1 for layer in layers):
        return f"{option} cannot merge an adapter into grouped convolutions. Leave it out."
    return None
