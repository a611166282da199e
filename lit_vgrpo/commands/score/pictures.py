"""Reading image files for rewards."""

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
    """Return the named files, and the images of the named folders, sorted within each.

    Raises:
        UserError: With each path that does not exist and each folder without images, or without any path.
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
    """Return an error for every file that cannot be read as an image."""
    faults = []
    for file in files:
        try:
            read_picture(file)
        except ValueError as error:
            faults.append(str(error))
    return faults


def read_picture(file: Path) -> Tensor:
    """Return an image ``(1, 3, H, W)``, float32 in [0, 1], upright, on white where it is transparent.

    Raises:
        ValueError: It is no image, or a truncated one.
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
