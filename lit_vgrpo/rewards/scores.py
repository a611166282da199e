"""Images ready to be scored, and their scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.core.pixels import to_uint8


@dataclass
class Scores:
    """The scores of B images, by one reward or by a weighted sum.

    Args:
        total: shape ``(B,)``, float32: the weighted sum; NaN where a reward of non-zero weight failed.
        parts: scores of each reward by name, shape ``(B,)``, float32; NaN where it failed or does not apply.
        ok: shape ``(B,)``, bool: where ``total`` is a number.
        errors: by name, the last failure of each reward that failed on any image.
        applies: by name, shape ``(B,)``, bool: where the reward applies; everywhere if a name is missing.
        seconds: by name, the reward's wall time.
        counts: by name, events that the reward counted, such as retries by cause.
    """

    total: Tensor
    parts: dict[str, Tensor]
    ok: Tensor
    errors: dict[str, str] = field(default_factory=dict)
    applies: dict[str, Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.total)

    def applies_to(self, name: str) -> Tensor:
        """Return where the reward applies, ``(B,)``, bool."""
        return self.applies.get(name, torch.ones_like(self.ok))

    @classmethod
    def empty(cls, size: int) -> Scores:
        """Return a placeholder for images that are not scored."""
        return cls(torch.zeros(size), {}, torch.ones(size, dtype=torch.bool))

    def select(self, indices: Tensor) -> Scores:
        """Return the scores of some of the images; errors, times and counts stay those of all."""
        parts = {name: scores[indices] for name, scores in self.parts.items()}
        applies = {name: mask[indices] for name, mask in self.applies.items()}
        return replace(self, total=self.total[indices], parts=parts, ok=self.ok[indices], applies=applies)

    @classmethod
    def joined(cls, batches: Sequence[Scores]) -> Scores:
        """Concatenate batches of the same rewards, on the CPU."""
        names = list(batches[0].parts)
        counts: dict[str, Counter[str]] = {}
        for batch in batches:
            for name, of_batch in batch.counts.items():
                counts.setdefault(name, Counter()).update(of_batch)
        return cls(
            total=torch.cat([batch.total.cpu() for batch in batches]),
            parts={name: torch.cat([batch.parts[name].cpu() for batch in batches]) for name in names},
            ok=torch.cat([batch.ok.cpu() for batch in batches]),
            errors={name: message for batch in batches for name, message in batch.errors.items()},
            applies={name: torch.cat([batch.applies_to(name).cpu() for batch in batches]) for name in names},
            seconds={name: sum(batch.seconds.get(name, 0.0) for batch in batches) for name in names},
            counts={name: dict(counted) for name, counted in counts.items()},
        )


@dataclass
class ImageBatch:
    """Images ready to be scored: rounded to what a file can store, without non-finite ones.

    Attributes:
        images: the finite images, ``(K, 3, H, W)``, float32 in [0, 1].
        finite: their indices among the B images.
        prompts: all B prompts.
        rows: all B rows.
    """

    images: Tensor
    finite: list[int]
    prompts: list[str]
    rows: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.prompts)

    @classmethod
    def joined(cls, batches: Sequence[ImageBatch]) -> ImageBatch:
        """Concatenate batches."""
        starts = [sum(len(batch) for batch in batches[:number]) for number in range(len(batches))]
        return cls(
            torch.cat([batch.images for batch in batches]),
            [start + index for start, batch in zip(starts, batches, strict=True) for index in batch.finite],
            [prompt for batch in batches for prompt in batch.prompts],
            [row for batch in batches for row in batch.rows],
        )


def image_batch(images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> ImageBatch:
    """Check a batch and round its images.

    Raises:
        ValueError: images, prompts and rows differ in number, or images have the wrong shape.
    """
    if images.ndim != 4 or images.shape[1] != 3 or not len(images) == len(prompts) == len(rows):
        raise ValueError(
            f"Rewards take images (B, 3, H, W) with B prompts and rows, not {tuple(images.shape)}, "
            f"{len(prompts)} prompts and {len(rows)} rows."
        )
    images = images.detach()
    finite = images.isfinite().flatten(1).all(1).cpu().nonzero().flatten().tolist()
    return ImageBatch(to_uint8(images[finite]).float() / 255, finite, prompts, rows)
