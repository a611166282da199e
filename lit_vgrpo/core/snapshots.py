"""Copies of the trainable weights (reference, anchor, EMA), for LoRA and full weights alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_vgrpo.core.ranges import HalfOpenUnitInterval, NonNegativeFloat, NonNegativeInt, checked
from lit_vgrpo.core.sharding import cut, full, local, write


@checked
@dataclass(frozen=True)
class Decay:
    """Decay ``d = min(max, start + rate * n)`` of ``copy <- d copy + (1 - d) weights`` after ``n`` gradient steps.

    Args:
        rate: Increase per gradient step.
        max: Upper bound.
        start: Value before the first gradient step.
        after: Gradient steps before the increase starts.

    >>> Decay(rate=0.001, max=0.5)(100)
    0.1
    """

    rate: NonNegativeFloat
    max: HalfOpenUnitInterval
    start: HalfOpenUnitInterval = 0.0
    after: NonNegativeInt = 0

    def __call__(self, num_updates: int) -> float:
        return min(self.max, self.start + self.rate * max(0, num_updates - self.after))


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether every value of every tensor is finite, with one device synchronisation."""
    finite = [tensor.isfinite().all() for tensor in tensors]
    return not finite or bool(torch.stack(finite).all())


class Snapshot:
    """A float32 copy of a module's trainable weights, which can be averaged and temporarily swapped in.

    With LoRA, the initial copy is the frozen reference: its B matrices are zero. If a strategy shards the weights, each
    rank holds its shard of the copy, and only :meth:`state_dict` needs the other ranks.

    Args:
        module: The module with the weights.
        device: Device that stores the copy; ``None`` uses the weights' device.
    """

    def __init__(self, module: nn.Module, device: torch.device | str | None = None) -> None:
        self._module = module
        self.tensors: dict[str, Tensor] = {
            name: values.to(device=device or values.device, dtype=torch.float32, copy=True)
            for name, p in trainable_parameters(module).items()
            for values in (local(p),)
        }

    def follow(self) -> None:
        """Keep only this rank's shard if the weights have been sharded; the full copy may not fit."""
        devices = {name: tensor.device for name, tensor in self.tensors.items()}
        self._parameters_of(self._module)
        self.tensors = {name: tensor.to(devices[name]) for name, tensor in self.tensors.items()}

    def to(self, device: torch.device) -> None:
        """Move the copy."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def move_towards(self, module: nn.Module, decay: float) -> None:
        """Update ``copy <- decay * copy + (1 - decay) * weights``."""
        parameters = self._parameters_of(module)
        own = [self.tensors[name] for name in parameters]
        weights = [local(p).to(copy.device, torch.float32) for p, copy in zip(parameters.values(), own, strict=True)]
        torch._foreach_lerp_(own, weights, 1 - decay)

    @contextmanager
    def swapped_into(self, module: nn.Module) -> Iterator[None]:
        """Use the copy as the weights within the context; the weights are restored even if the block raises.

        The block runs without gradient, so no backward can reach swapped weights. Do not swap between a forward and its
        backward: autograd then refuses the backward, since the weights have changed. The separate float32 weights of
        ZeRO's optimizer are not touched.
        """
        parameters = self._parameters_of(module)
        kept = {name: local(p).clone() for name, p in parameters.items()}
        try:
            write(parameters, self.tensors)
            with torch.no_grad():
                yield
        finally:
            try:
                write(parameters, kept)
            except BaseException:  # such as a signal's
                write(parameters, kept)
                raise

    def state_dict(self) -> dict[str, Tensor]:
        """Return the full tensors, on rank 0 if they are sharded; all ranks must call it."""
        return {name: full(p, self.tensors[name]) for name, p in self._parameters_of(self._module).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load saved full tensors; RuntimeError if the names do not match this module."""
        self._check(state)
        for name, p in self._parameters_of(self._module).items():
            self.tensors[name].copy_(cut(p, state[name]))

    def _parameters_of(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the module's trainable parameters, after sharding the copy like them.

        DeepSpeed partitions ZeRO-3's parameters only after the model is configured, when copies already exist.
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
                f"The copy and the policy train different weights: {len(odd)} differ, such as {odd[0]}. "
                "Did the recipe's policy change after the copy was made?"
            )
