"""Batches of images that may differ in size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Images(Protocol):
    """Sequence of images ``(1, 3, H, W)`` in [0, 1]."""

    def __getitem__(self, place: int, /) -> Tensor: ...


@dataclass
class ScoredBatch:
    """Consecutive images of the same size.

    Attributes:
        places: Their indices among all images.
        images: ``(B, 3, H, W)``, on the accelerator where there is one; reward models move to the images' device.
    """

    places: range
    images: Tensor
    prompts: list[str]
    rows: list[dict[str, Any]]


def batches_of(images: Images, rows: Sequence[Mapping[str, Any]], batch_size: int) -> Iterator[ScoredBatch]:
    """Yield batches of at most ``batch_size`` images, reading only those of the next batch."""
    waiting: list[Tensor] = []
    for place in range(len(rows)):
        image = images[place]
        if waiting and (len(waiting) == batch_size or image.shape != waiting[0].shape):
            yield _batch(waiting, rows, place)
            waiting = []
        waiting.append(image)
    if waiting:
        yield _batch(waiting, rows, len(rows))


def device() -> torch.device:
    """Return the device for images and rewards."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _batch(images: list[Tensor], rows: Sequence[Mapping[str, Any]], stop: int) -> ScoredBatch:
    places = range(stop - len(images), stop)
    own = [dict(rows[place]) for place in places]
    return ScoredBatch(places, torch.cat(images).to(device()), [row["prompt"] for row in own], own)
