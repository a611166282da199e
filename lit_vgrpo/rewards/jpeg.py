"""Compressibility: how few bytes a picture takes as a JPEG."""

from __future__ import annotations

import io
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lit_vgrpo.rewards.base import Reward, to_uint8

BYTES_PER_KILOBYTE = 1000


class JPEGCompressibility(Reward):
    """Minus the size in kilobytes (1000 bytes) of the image as a JPEG.

    Args:
        quality: JPEG quality of PIL, 1 to 95.

    Source:
        arXiv 2305.13301 (DDPO), the compressibility reward.
    """

    name = "jpeg"

    def __init__(self, quality: int = 95) -> None:
        if not isinstance(quality, int) or isinstance(quality, bool):
            raise TypeError(f"quality={quality!r} is not a whole number. Use 1 to 95.")
        if not 1 <= quality <= 95:
            raise ValueError(f"quality={quality} is outside PIL's range. Use 1 to 95.")
        self.quality = quality

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        pictures = to_uint8(images).permute(0, 2, 3, 1).contiguous().cpu().numpy()
        sizes = [self._size(Image.fromarray(picture)) for picture in pictures]
        return torch.tensor([-size / BYTES_PER_KILOBYTE for size in sizes], dtype=torch.float32)

    def _size(self, picture: Image.Image) -> int:
        buffer = io.BytesIO()
        picture.save(buffer, format="JPEG", quality=self.quality)
        return buffer.tell()
