"""Pictures in files: those that prompts edit, and images to be scored."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lit_vgrpo.errors import shortened

PICTURE = "image"
"""The field of a row with the file of the picture that its prompt edits, or a list of several."""
PROGRAM_FORMAT = "EPS"
"""A format for which Pillow runs Ghostscript, regardless of the file's suffix."""
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF


def read_picture(path: str | Path) -> Tensor:
    """Return a picture ``(3, H, W)``, uint8, upright, on white where it is transparent; ValueError if unreadable."""
    with _opened(path) as opened:
        image = ImageOps.exif_transpose(opened)
        if "A" in image.getbands() or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def picture_size(path: str | Path) -> tuple[int, int]:
    """Return the height and width of an upright picture, from its file's header; ValueError if it is not readable."""
    with _opened(path) as opened:
        width, height = opened.size
        is_turned = opened.getexif().get(_ORIENTATION) in _TURNED and opened.format != "TIFF"  # whose size is upright
        return (width, height) if is_turned else (height, width)


@contextmanager
def _opened(path: str | Path) -> Iterator[Image.Image]:
    """Open an image file; failures in it or in the block become a ValueError with a line for the user."""
    what = "is not a readable image. Leave it out, or save it again"
    try:
        if not Path(path).is_file():  # opening a FIFO would block
            what = f"{'is not a file' if Path(path).exists() else 'does not exist'}. Give an image file"
            raise ValueError(what)
        with Image.open(path) as opened:
            if opened.format == PROGRAM_FORMAT:
                raise ValueError(PROGRAM_FORMAT)
            if opened.mode[0] in "IF":  # 16 or 32 bits, which Pillow would clip to 255
                what = f"has more than 8 bits per channel (mode {opened.mode}). Save it with 8 bits"
                raise ValueError(what)
            yield opened
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{f'{path}'[:200]} {what}.") from error


def picture_error(prompt: str, row: Mapping[str, Any]) -> str | None:
    """Return a one-line error if a prompt has no picture, else ``None``."""
    what = "has no picture to edit. Give its row an"
    return None if picture_files(row) else f'Prompt "{shortened(prompt)}" {what} {PICTURE}.'


def several_pictures_error(prompt: str, row: Mapping[str, Any]) -> str | None:
    """Return a one-line error if a prompt has several pictures, else ``None``; for a reward that takes one."""
    number = len(picture_files(row))
    what = f"has {number} pictures to edit, but the reward takes one."
    return f'Prompt "{shortened(prompt)}" {what}' if number > 1 else None


def named_pictures(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files that a row names as the pictures that its prompt edits; they may not exist."""
    named = row.get(PICTURE) or ()
    return tuple(map(str, named)) if isinstance(named, list | tuple) else (str(named),)


def picture_files(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files of the pictures that a row's prompt edits; a field that names no file is not about pictures."""
    files = named_pictures(row)
    return files if any(map(os.path.isfile, files)) else ()


def references_of(rows: Sequence[Mapping[str, Any]]) -> list[Tensor] | None:
    """Return the pictures that the rows' prompts edit, uint8; ``None`` if the rows have none.

    A row's picture is ``(3, H, W)``; several are ``(N, 3, H, W)``. On a reward server, rows hold pictures, not files.

    Raises:
        ValueError: Some rows have a picture and some have none, one cannot be read, or one row's differ in size.
    """
    sent = [row[PICTURE] for row in rows if isinstance(row.get(PICTURE), Tensor)]
    if rows and len(sent) == len(rows):
        return sent
    files = [picture_files(row) for row in rows]
    if not any(files):
        return None
    for row, own in zip(rows, files, strict=True):
        if not own:
            raise ValueError(
                f'Prompt "{shortened(row.get("prompt"))}" has no {PICTURE}, but other rows have. Add one to every row.'
            )
    changed_ns = {file: os.stat(file).st_mtime_ns for own in files for file in own if os.path.isfile(file)}
    read = [[_read_once(file, changed_ns.get(file, 0)) for file in own] for own in files]
    return [own[0] if len(own) == 1 else _stacked(own) for own in read]


@lru_cache(maxsize=128)
def _read_once(path: str, changed_ns: int) -> Tensor:
    return read_picture(path)


def stacked_references(rows: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """Return the rows' pictures as one tensor, float32 in [0, 1]; ``None`` if they have none.

    ``(B, 3, H, W)``, or ``(B, N, 3, H, W)`` if each row has several; ValueError if they differ in size or number.
    """
    pictures = references_of(rows)
    return None if pictures is None else _stacked(pictures).float() / 255


def _stacked(pictures: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(picture.shape) for picture in pictures}
    if len(shapes) > 1:
        listed = " and ".join(" x ".join(map(str, shape)) for shape in sorted(shapes))
        raise ValueError(f"The rows' pictures differ in number or size, {listed}. Give every row the same.")
    return torch.stack(list(pictures))


def picture_digest(picture: Tensor) -> str:
    """Return a hash of a picture ``(3, H, W)``, uint8, and its size."""
    return sha256(repr(tuple(picture.shape)).encode() + picture.contiguous().cpu().numpy().tobytes()).hexdigest()
