"""Images as tensors, and rounded as in a file."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from typing import IO, Any

import torch
from PIL import Image
from torch import Tensor

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


def to_uint8(images: Tensor) -> Tensor:
    """Round finite images of any shape, float in [0, 1], to uint8, as a file stores them."""
    return (images.float().clamp(0, 1) * 255).round().to(torch.uint8)


def strips(images: Tensor) -> Tensor:
    """Return each video's frames side by side, ``(B, F, 3, H, W)`` to ``(B, 3, H, F W)``; images stay as they are."""
    return images if images.ndim == 4 else images.movedim(1, 3).flatten(3)


def to_pil(images: Tensor) -> list[Image.Image]:
    """Convert finite images ``(B, 3, H, W)``, float in [0, 1], to PIL RGB images, rounded as in a file."""
    pictures = to_uint8(images).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    return [Image.fromarray(picture) for picture in pictures]


def save_webp(frames: list[Image.Image], file: IO[bytes], duration: int, **options: Any) -> None:
    """Write frames of one size as an animated WebP file that loops.

    Args:
        duration: Time per frame, milliseconds.
        **options: Pillow's options for WebP files, such as ``lossless``.
    """
    # for lossless files, method 0 takes a tenth of the default's time; the file is a third larger
    options |= {"save_all": True, "append_images": frames[1:], "duration": duration, "loop": 0, "method": 0}
    frames[0].save(file, format="WEBP", **options)


def encode_png(image: Tensor) -> bytes:
    """Return an image ``(3, H, W)``, uint8, as a PNG file."""
    buffer = io.BytesIO()
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().cpu().numpy())
    # half the time of the default strategy, and no larger
    picture.save(buffer, format="PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return buffer.getvalue()


def resized_as_pil(images: Tensor, height: int, width: int) -> Tensor:
    """Return images resized with bicubic weights and antialiasing, the same on every device.

    As in PIL, the width comes first, and each direction is rounded to levels: of images at most twice as tall as wide,
    1 % of the pixels differ from PIL's, by one level. Torchvision rounds uint8 this way only on the CPU. Elsewhere it
    rounds once, and 10 to 22 % of the pixels differ, by up to 8 levels.

    Args:
        images: Shape ``(..., H, W)``, uint8.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    pixels = images.float()
    for size in ((images.shape[-2], width), (height, width)):
        pixels = F.resize(pixels, [*size], InterpolationMode.BICUBIC, antialias=True)
        pixels = pixels.clamp(0, 255).add(0.5).floor()
    return pixels.to(torch.uint8)


def centre_cropped(images: Tensor, size: int) -> Tensor:
    """Return the middle square of images, resized to ``size`` and normalised as for CLIP.

    Args:
        images: Shape ``(b, 3, H, W)``: uint8, or floats in [0, 1], whose gradient is kept.
        size: Side of the square, pixels; the result is ``(b, 3, size, size)``, float32.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    if images.is_floating_point():
        pixels = F.resize(images, [size], InterpolationMode.BICUBIC, antialias=True)
    else:
        pixels = resized_as_pil(images, *shortest_edge(images, size))
    return clip_normalised(F.center_crop(pixels, [size, size]))


def shortest_edge(images: Tensor, size: int) -> tuple[int, int]:
    """Return height and width of images ``(..., H, W)`` after their shorter side is resized to ``size``."""
    height, width = images.shape[-2:]
    short = min(height, width)
    return int(size * height / short), int(size * width / short)


def clip_normalised(pixels: Tensor, mean: Sequence[float] = CLIP_MEAN, std: Sequence[float] = CLIP_STD) -> Tensor:
    """Return pixels ``(b, 3, H, W)`` normalised, float32; uint8 is scaled to [0, 1], and floats are clipped to it.

    Bicubic resizing overshoots, which uint8 cannot hold.
    """
    from torchvision.transforms.v2 import functional as F

    scaled = pixels.clamp(0, 1) if pixels.is_floating_point() else pixels.float() / 255
    return F.normalize(scaled, list(mean), list(std))


def letterboxed(images: Tensor, size: int) -> Tensor:
    """Return images with their longer side resized to ``size``, padded to a black square, normalised as for CLIP.

    Args:
        images: Shape ``(b, 3, H, W)``: uint8, or floats in [0, 1], whose gradient is kept.
        size: Side of the square, pixels; the result is ``(b, 3, size, size)``, float32.
    """
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    scale = size / max(images.shape[-2:])
    height, width = (round(side * scale) for side in images.shape[-2:])
    # resized as floats, without clipping bicubic overshoots to [0, 1], as in HPSv2
    pixels = images if images.is_floating_point() else images.float() / 255
    pixels = F.resize(pixels, [height, width], InterpolationMode.BICUBIC, antialias=True)
    left, top = (size - width) // 2, (size - height) // 2
    pixels = F.pad(pixels, [left, top, size - width - left, size - height - top])
    return F.normalize(pixels, CLIP_MEAN, CLIP_STD)
