"""A prompt as a network sees it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Conditioning:
    """A prompt's embeddings; every tensor has one row a prompt."""

    tensors: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def select(self, rows: Tensor) -> Conditioning:
        """One row for each entry of ``rows (B,)``."""
        return Conditioning({name: value[rows] for name, value in self.tensors.items()})

    def expand(self, size: int) -> Conditioning:
        """A single row, repeated as a view."""
        return Conditioning({name: value.expand(size, *value.shape[1:]) for name, value in self.tensors.items()})

    def to(self, device: torch.device | str) -> Conditioning:
        return Conditioning({name: value.to(device) for name, value in self.tensors.items()})

    def joined_with(self, other: Conditioning) -> Conditioning:
        return Conditioning({name: torch.cat([value, other.tensors[name]]) for name, value in self.tensors.items()})
