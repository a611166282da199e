"""What a reward is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class RewardError(RuntimeError):
    """A reward broke its contract, or says in one line why it cannot score."""


class Reward(ABC):
    """Scores images. Building one is cheap and loads nothing; no trainer is needed.

    A subclass sets ``name`` (the key of its score in the logs) and defines ``__call__``.
    """

    name: str

    @abstractmethod
    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        """Score a batch, loading what is needed first.

        Args:
            images: shape ``(B, 3, H, W)``, float32 in [0, 1].
            prompts: the B prompts.
            rows: the prompts' rows with their extra fields, B of them.

        Returns:
            Shape ``(B,)``, float32, higher is better; NaN marks an image that could not be scored.
        """

    def check(self) -> list[str]:
        """The faults that can be found without loading weights, one line each."""
        return []

    def load(self) -> None:
        """Load the weights, if there are any; a second call does nothing."""
        return None


def to_uint8(images: Tensor) -> Tensor:
    """Round images to what a file would hold.

    Args:
        images: any shape, float in [0, 1], finite.

    Returns:
        The same shape, uint8.
    """
    return (images.float().clamp(0, 1) * 255).round().to(torch.uint8)
