"""Image files for rewards: finding, reading and batching by size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.core.pictures import read_picture
from lit_vgrpo.errors import UserError
from lit_vgrpo.metrics.reference import IMAGE_SUFFIXES
from lit_vgrpo.rewards import Weighted
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.paths import typed_path


def find_images(words: Sequence[str], limit: int | None = None, ignored: str = "") -> list[Path]:
    """Return the first ``limit`` of the named files and folders' images; raise UserError with all unreadable ones.

    A folder's images are sorted by name, and numbers in it by value. A file of a folder whose name matches
    ``ignored``, a regular expression, is left out.
    """
    if not words:
        raise UserError("No image given. Name files or folders, for example: lightning score PickScore cat.png")
    files: list[Path] = []
    errors: list[str] = []
    for word in words:
        path = typed_path(word)
        found = (file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
        kept = (file for file in found if not re.fullmatch(ignored, file.name))
        images = [path] if path.is_file() else sorted(kept, key=_natural_order)
        errors += [] if images else [f"{word} {'contains no images' if path.is_dir() else 'does not exist'}."]
        files += images
    files = files[:limit]
    for file in files:
        try:
            read_picture(file)
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise UserError(*errors)
    return files


def _natural_order(file: Path) -> tuple[list[list[str | int]], Path]:
    """Return a sorting key that puts ``2.png`` before ``10.png``, in the order of the prompts of numbered images."""
    parts = [re.split(r"(\d+)", part) for part in file.parts]
    return [[int(one) if index % 2 else one for index, one in enumerate(part)] for part in parts], file


def read_image(file: Path) -> Tensor:
    """Return an image ``(1, 3, H, W)``, float32 in [0, 1], upright, on white where transparent; or raise ValueError."""
    return read_picture(file)[None].float() / 255


def batches_of(
    images: Iterable[Tensor], rows: Iterable[Mapping[str, Any]], size: int
) -> Iterator[tuple[Tensor, list[str], list[dict[str, Any]]]]:
    """Yield images ``(B, 3, H, W)`` of one size on the accelerator, prompts and rows; images are read when needed.

    Args:
        images: Each ``(1, 3, H, W)`` in [0, 1]; sizes may differ.
        size: Images per batch, at most.
    """
    for _, same_size in groupby(zip(images, rows, strict=True), key=lambda pair: pair[0].shape):
        while batch := list(islice(same_size, size)):
            pixels = torch.cat([image for image, _ in batch]).to(device())
            yield pixels, [row["prompt"] for _, row in batch], [dict(row) for _, row in batch]


def device() -> torch.device:
    """Return the device for images and rewards."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def loaded(reward: Weighted) -> Iterator[None]:
    """Load a reward for the block and close it at the end; raise UserError if it cannot be loaded."""
    try:
        reward.load()
        yield
    except (LoadError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from error
    finally:
        reward.close()
