"""A view of a network with 8-bit weights, for rollouts alone.

torchao was read in 0.18.0.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from lit_vgrpo.policies.acceleration import shared_view
from lit_vgrpo.policies.contract import PolicyContract
from lit_vgrpo.policies.speed import block_linears, compile_network


class QuantisedNetwork:
    """A view of a policy's network in which the linear layers of its blocks multiply in 8 bits.

    Weights have a scale per output channel; inputs are quantised as they come, with a scale per token, so that an image
    does not depend on its batch. A LoRA adapter is not quantised, and is shared with the policy's own network.

    Args:
        policy: a loaded policy.
        kind: the 8-bit type.
    """

    def __init__(self, policy: PolicyContract, kind: Literal["int8", "fp8"]) -> None:
        self.source = policy.network
        self.network = shared_view(policy.network)
        self._kind = kind
        self._dtype = policy.dtype
        self._layers: list[tuple[nn.Linear, nn.Linear]] = []
        views = block_linears(self.network)
        for name, layer in block_linears(policy.network).items():
            views[name].__dict__["_parameters"] = dict(layer._parameters)  # no longer shared
            self._layers.append((views[name], layer))
        self._seen: list[Any] = [None] * len(self._layers)
        if policy.compile_network:
            compile_network(self.network)

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantise the policy's weights again where they may have changed."""
        from torchao.quantization import quantize_

        for number, (own, layer) in enumerate(self._layers):
            weight = layer.weight
            # Some strategies write to trained weights in ways that torch does not count.
            seen = None if weight.requires_grad else (weight.device, weight._version)
            if seen is not None and seen == self._seen[number]:
                continue
            self._seen[number] = seen
            own.register_parameter(
                "weight", nn.Parameter(weight.detach().to(self._dtype, copy=True), requires_grad=False)
            )
            quantize_(own, _config(self._kind), filter_fn=lambda module, name: True)


def _config(kind: str) -> Any:
    from torchao import quantization

    if kind == "int8":
        return quantization.Int8DynamicActivationInt8WeightConfig()
    return quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
