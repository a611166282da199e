"""Copies of the trainable weights (reference, anchor, EMA), for LoRA and full weights alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lit_vgrpo.core.sharding import cut, full, local, write


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class Snapshot:
    """A float32 copy of a module's trainable weights, which can be moved and swapped in for a while.

    With LoRA the copy of the start is the frozen reference: its B matrices are zero. Where a strategy shards the
    weights, each rank holds its own shard of the copy, so that only :meth:`state_dict` needs the other ranks.

    Args:
        module: where the weights are.
        device: where the copy is kept; ``None`` keeps it beside the weights.
    """

    def __init__(self, module: nn.Module, device: torch.device | str | None = None) -> None:
        self._module = module
        self.tensors: dict[str, Tensor] = {
            name: values.to(device=device or values.device, dtype=torch.float32, copy=True)
            for name, p in trainable_parameters(module).items()
            for values in (local(p),)
        }

    def follow(self) -> None:
        """Keep this rank's shard alone, where the weights are sharded by now; the whole of it may not fit."""
        devices = {name: tensor.device for name, tensor in self.tensors.items()}
        self._parameters_of(self._module)
        self.tensors = {name: tensor.to(devices[name]) for name, tensor in self.tensors.items()}

    def to(self, device: torch.device) -> None:
        """Move the copy."""
        self.follow()
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def move_towards(self, module: nn.Module, decay: float) -> None:
        """``copy <- decay * copy + (1 - decay) * weights``."""
        for name, p in self._parameters_of(module).items():
            own = self.tensors[name]
            own.lerp_(local(p).to(own.device, torch.float32), 1 - decay)

    @contextmanager
    def swapped_into(self, module: nn.Module) -> Iterator[None]:
        """Put the copy in place of the weights; the weights come back also when the block raises.

        The block runs without gradient, so no backward can reach swapped weights. Between a forward and its backward
        nothing may be swapped: autograd then refuses the backward, since the weights were written to. The float32
        weights that ZeRO's optimizer keeps beside the module's are not touched.
        """
        parameters = self._parameters_of(module)
        kept = {name: local(p).clone() for name, p in parameters.items()}
        try:
            write(parameters, self.tensors)
            with torch.no_grad():
                yield
        finally:
            write(parameters, kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole tensors, on rank 0 where they are sharded; all ranks must call it."""
        return {name: full(p, self.tensors[name]) for name, p in self._parameters_of(self._module).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved whole tensors; RuntimeError where the names are not those of this module."""
        self._check(state)
        for name, p in self._parameters_of(self._module).items():
            self.tensors[name].copy_(cut(p, state[name]))

    def _parameters_of(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the module's trainable parameters, after the copy has followed them into shards.

        DeepSpeed cuts ZeRO-3's parameters only after the model is configured, when copies of it exist already.
        """
        parameters = trainable_parameters(module)
        self._check(parameters)
        for name, p in parameters.items():
            if self.tensors[name].shape != local(p).shape:
                self.tensors[name] = cut(p, self.tensors[name]).clone()
        return parameters

    def _check(self, other: Mapping[str, Tensor]) -> None:
        if self.tensors.keys() != other.keys():
            odd = sorted(self.tensors.keys() ^ other.keys())
            raise RuntimeError(
                f"The copy and the policy do not train the same weights: {len(odd)} differ, the first is {odd[0]}. "
                "Was the recipe's policy changed since the copy was made?"
            )
