"""Copies of the trainable weights (reference, anchor, EMA), for LoRA and full weights alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class Snapshot:
    """A float32 copy of a module's trainable weights, which can be moved and swapped in for a while.

    With LoRA the copy of the start is the frozen reference: its B matrices are zero.

    Args:
        module: where the weights are.
        device: where the copy is kept; ``None`` keeps it beside the weights.
    """

    def __init__(self, module: nn.Module, device: torch.device | str | None = None) -> None:
        self.tensors: dict[str, Tensor] = {
            name: p.detach().to(device=device or p.device, dtype=torch.float32, copy=True)
            for name, p in trainable_parameters(module).items()
        }

    def to(self, device: torch.device) -> None:
        """Move the copy."""
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}

    @torch.no_grad()
    def move_towards(self, module: nn.Module, decay: float) -> None:
        """``copy <- decay * copy + (1 - decay) * weights``."""
        for name, p in trainable_parameters(module).items():
            own = self.tensors[name]
            own.lerp_(p.detach().to(own.device, torch.float32), 1 - decay)

    @contextmanager
    def swapped_into(self, module: nn.Module) -> Iterator[None]:
        """Put the copy in place of the weights; the weights come back also when the block raises.

        The block runs without gradient, so no backward can reach swapped weights. Between a forward and its backward
        nothing may be swapped: autograd then refuses the backward, since the weights were written to.
        """
        parameters = trainable_parameters(module)
        self._check(parameters)
        kept = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            _copy(self.tensors, parameters)
            with torch.no_grad():
                yield
        finally:
            _copy(kept, parameters)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.tensors)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved tensors; RuntimeError where the names are not those of this module."""
        self._check(state)
        for name, own in self.tensors.items():
            own.copy_(state[name])

    def _check(self, other: Mapping[str, Tensor]) -> None:
        if self.tensors.keys() != other.keys():
            odd = sorted(self.tensors.keys() ^ other.keys())
            raise RuntimeError(
                f"The copy and the policy do not train the same weights: {len(odd)} differ, the first is {odd[0]}. "
                "Was the recipe's policy changed since the copy was made?"
            )


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
