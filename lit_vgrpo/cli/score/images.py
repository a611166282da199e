"""Image files as rewards take them: found, read, and batched by size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_vgrpo.core.pictures import read_picture
from lit_vgrpo.errors import UserError
from lit_vgrpo.metrics.reference import IMAGE_SUFFIXES


def find_images(words: Sequence[str]) -> list[Path]:
    """Return the named files, and the images of the named folders, sorted within each.

    Raises:
        UserError: With each path that does not exist and each folder without images, or without any path.
    """
    if not words:
        raise UserError("No image given. Name files or folders, for example: lightning score PickScore cat.png")
    files: list[Path] = []
    errors: list[str] = []
    for word in words:
        path = Path(word).expanduser()
        found = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix.lower() in IMAGE_SUFFIXES)
        if not path.exists():
            errors.append(f"{word} does not exist. Give an image file or a folder of images.")
        elif not found:
            errors.append(f"{path} contains no images. Give a folder of {', '.join(sorted(IMAGE_SUFFIXES))}.")
        files += found
    if errors:
        raise UserError(*errors)
    return files


def image_errors(files: Sequence[Path]) -> list[str]:
    """Return an error for every file that cannot be read as an image."""
    errors = []
    for file in files:
        try:
            read_image(file)
        except ValueError as error:
            errors.append(str(error))
    return errors


def read_image(file: Path) -> Tensor:
    """Return an image ``(1, 3, H, W)``, float32 in [0, 1], upright, on white where it is transparent.

    Raises:
        ValueError: The file is not an image, or is truncated.
    """
    return read_picture(file)[None].float() / 255


class Batch(NamedTuple):
    """Consecutive images of the same size, ``(B, 3, H, W)``, with their prompts and rows."""

    images: Tensor
    prompts: list[str]
    rows: list[dict[str, Any]]


def batches_of(images: Iterable[Tensor], rows: Sequence[Mapping[str, Any]], size: int) -> Iterator[Batch]:
    """Yield batches of at most ``size`` images on the accelerator, reading no image before its batch.

    Args:
        images: Each ``(1, 3, H, W)`` in [0, 1]; sizes may differ.
        rows: The prompt's row of each image.
        size: Images per batch, at most.
    """
    waiting: list[tuple[Tensor, dict[str, Any]]] = []
    for image, row in zip(images, rows, strict=True):
        if waiting and (len(waiting) == size or image.shape != waiting[0][0].shape):
            yield _batch(waiting)
            waiting = []
        waiting.append((image, dict(row)))
    if waiting:
        yield _batch(waiting)


def device() -> torch.device:
    """Return the device for images and rewards."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _batch(waiting: Sequence[tuple[Tensor, dict[str, Any]]]) -> Batch:
    images, rows = zip(*waiting, strict=True)
    return Batch(torch.cat(images).to(device()), [row["prompt"] for row in rows], list(rows))
