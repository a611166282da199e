"""Image files as rewards take them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lit_vgrpo.errors import UserError
from lit_vgrpo.metrics.reference import IMAGE_SUFFIXES, PROGRAM_FORMAT


def find_pictures(words: Sequence[str]) -> list[Path]:
    """The files that were named, and the images of the folders that were, sorted within each.

    Raises:
        UserError: a path that does not exist, a folder without images, or no path at all; each is a line.
    """
    if not words:
        raise UserError("No image given. Name files or folders, for example: lightning score PickScore cat.png")
    files: list[Path] = []
    faults: list[str] = []
    for word in words:
        path = Path(word).expanduser()
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
            faults += (
                [] if found else [f"{path} holds no images. Give a folder of {', '.join(sorted(IMAGE_SUFFIXES))}."]
            )
            files += found
        elif path.is_file():
            files.append(path)
        else:
            faults.append(f"{word} does not exist. Give an image file or a folder of images.")
    if faults:
        raise UserError(*faults)
    return files


def picture_faults(files: Sequence[Path]) -> list[str]:
    """A line for every file that is no whole image."""
    faults = []
    for file in files:
        try:
            read_picture(file)
        except ValueError as error:
            faults.append(str(error))
    return faults


def read_picture(file: Path) -> Tensor:
    """An image ``(1, 3, H, W)``, float32 in [0, 1], upright, on white where it is transparent.

    Raises:
        ValueError: it is no image, or a torn one.
    """
    try:
        with Image.open(file) as opened:
            if opened.format == PROGRAM_FORMAT:
                raise ValueError(PROGRAM_FORMAT)
            picture = ImageOps.exif_transpose(opened)
            if "A" in picture.getbands() or "transparency" in picture.info:
                picture = picture.convert("RGBA")
                picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
            pixels = np.array(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file} is no image that can be read. Leave it out, or save it anew.") from error
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
