"""A guard for policies that edit: do they copy the picture that they were given?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_vgrpo.core.pictures import stacked_references

SIDE = 64
"""Longer side, in pixels, of the reduced images that are compared; what an autoencoder loses hardly shows in them."""
BLOCK = 8
"""Side of the blocks, in reduced pixels, in which a change is looked for: an edit may be small, but is local."""
COPY = 0.05
"""An image counts as a copy if no block differs by this mean absolute difference. A choice, not a measurement."""


class CopyGuard:
    """Compares an iteration's images with the pictures that they edit, and with their group.

    Similarity is 1 minus the mean absolute difference of two images in [0, 1], reduced to :data:`SIDE` pixels.
    """

    def __init__(self) -> None:
        self._images: list[Tensor] = []
        self._to_reference: list[Tensor] = []
        self._copies: list[Tensor] = []

    def add(self, images: Tensor, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a batch of images ``(B, 3, H, W)`` in [0, 1] with their rows; nothing if those have no pictures."""
        given = stacked_references(rows)
        if given is not None:
            small, references = reduced(images.cpu()), reduced(given)
            self._images.append(small)
            self._to_reference.append(similarity(small, references))
            self._copies.append(largest_change(small, references) < COPY)

    def scores(self, group_size: int) -> dict[str, Tensor]:
        """Return values of each image, ``(B,)``; {} without pictures.

        ``similarity_to_reference``; ``similarity_in_group``, the mean over the other images of the group on this rank,
        NaN without any; ``copies``, 1 for a copy of the picture and 0 for others.

        Args:
            group_size: consecutive images that belong to one group.
        """
        if not self._images:
            return {}
        groups = torch.cat(self._images).unflatten(0, (-1, group_size))
        pairs = similarity(groups[:, :, None], groups[:, None])  # (P, G, G), 1 on the diagonal
        others = (pairs.sum(-1) - 1) / (group_size - 1) if group_size > 1 else pairs[..., 0] * torch.nan
        return {
            "similarity_to_reference": torch.cat(self._to_reference),
            "similarity_in_group": others.flatten(),
            "copies": torch.cat(self._copies).float(),
        }


def reduced(images: Tensor) -> Tensor:
    """Return images ``(B, 3, H, W)`` with a longer side of :data:`SIDE` pixels at most."""
    scale = SIDE / max(images.shape[-2:])
    sides = [max(1, round(side * scale)) for side in images.shape[-2:]]
    return images if scale >= 1 else F.interpolate(images, sides, mode="area")


def similarity(images: Tensor, others: Tensor) -> Tensor:
    """Return 1 minus the mean absolute difference over the last three dimensions.

    >>> similarity(torch.zeros(1, 3, 2, 2), torch.full((1, 3, 2, 2), 0.25))
    tensor([0.7500])
    """
    return 1 - (images - others).abs().mean((-3, -2, -1))


def largest_change(images: Tensor, others: Tensor) -> Tensor:
    """Return the largest mean absolute difference of a block of :data:`BLOCK` pixels' side, ``(B,)``."""
    blocks = F.avg_pool2d((images - others).abs().mean(1, keepdim=True), BLOCK, ceil_mode=True)
    return blocks.flatten(1).amax(1)


def copying_warning(copies: Tensor, iteration: int) -> str | None:
    """Return a warning if more than half of an iteration's images are copies, in one line, or ``None``."""
    share = float(copies.mean())
    if share <= 0.5:
        return None
    return (
        f"{share:.0%} of the images of iteration {iteration} equal the picture to edit: the policy copies. "
        "Give the reward for the edit more weight than that for similarity, or raise guidance."
    )
