"""Compressibility: the size of an image as a JPEG, to be minimised or maximised."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.rewards.base import Reward


@checked
@dataclass(eq=False)
class JPEGCompressibility(Reward):
    """Minus the size in kilobytes (1000 bytes) of the image as a JPEG, in (-inf, 0).

    Flow-GRPO divides it by 500: ``Weighted([JPEGCompressibility()], weights=[1 / 500])``.

    Args:
        quality: JPEG quality of PIL, 1 to 95.

    Source:
        arXiv 2305.13301 (DDPO), the compressibility reward.
    """

    name = "jpeg"
    concurrent = True

    quality: Annotated[int, Range(1, 95)] = 95

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        sizes = []
        for picture in to_pil(images):
            buffer = io.BytesIO()
            picture.save(buffer, format="JPEG", quality=self.quality)
            sizes.append(buffer.tell())
        return -torch.tensor(sizes, dtype=torch.float32) / 1000


class JPEGIncompressibility(JPEGCompressibility):
    """The size in kilobytes (1000 bytes) of the image as a JPEG, in (0, inf).

    Args:
        quality: JPEG quality of PIL, 1 to 95.

    Source:
        arXiv 2305.13301 (DDPO), the incompressibility reward.
    """

    name = "jpeg_size"

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        return -super().__call__(images, prompts, rows)
