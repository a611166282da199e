"""Images ready to be scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.core.pixels import to_uint8


@dataclass
class ImageBatch:
    """Images ready to be scored: rounded to what a file can store, without non-finite ones.

    Attributes:
        images: the finite images, ``(K, 3, H, W)``, float32 in [0, 1].
        sound: their indices among the B images.
        size: B.
    """

    images: Tensor
    sound: list[int]
    prompts: list[str]
    rows: list[dict[str, Any]]
    size: int

    @classmethod
    def joined(cls, batches: Sequence[ImageBatch]) -> ImageBatch:
        """Concatenate batches."""
        first = [sum(batch.size for batch in batches[:number]) for number in range(len(batches))]
        return cls(
            torch.cat([batch.images for batch in batches]),
            [start + place for start, batch in zip(first, batches, strict=True) for place in batch.sound],
            [prompt for batch in batches for prompt in batch.prompts],
            [row for batch in batches for row in batch.rows],
            sum(batch.size for batch in batches),
        )


def image_batch(images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> ImageBatch:
    """Check a batch and round its images.

    Raises:
        ValueError: images, prompts and rows differ in number, or images have the wrong shape.
    """
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images have the shape {tuple(images.shape)}. Rewards take (B, 3, H, W).")
    if not len(images) == len(prompts) == len(rows):
        raise ValueError(
            f"{len(images)} images, {len(prompts)} prompts and {len(rows)} rows. Give one prompt and row per image."
        )
    images = images.detach()
    is_sound = images.isfinite().flatten(1).all(1).cpu()
    sound = [place for place, fit in enumerate(is_sound.tolist()) if fit]
    return ImageBatch(to_uint8(images[sound]).float() / 255, sound, prompts, rows, len(images))
