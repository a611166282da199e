"""PNG files from untrusted senders: their headers are checked before anything is decoded."""

from __future__ import annotations

import io
import struct
import zlib

import torch
from PIL import Image
from torch import Tensor

from lit_vgrpo.errors import one_line

MEGAPIXEL = 2**20
MOST_PIXELS = 4 * MEGAPIXEL
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_ANIMATION_CHUNKS = (b"acTL", b"fcTL", b"fdAT")


class ProtocolError(ValueError):
    """A message that breaks the protocol, with the reason in one line.

    Attributes:
        cause: ``garbage``, ``wrong_number`` or ``too_large``.
    """

    def __init__(self, message: str, cause: str = "garbage") -> None:
        super().__init__(message)
        self.cause = cause


def encode_png(image: Tensor) -> bytes:
    """Return an image as a PNG file.

    Args:
        image: uint8, shape ``(3, H, W)``.
    """
    buffer = io.BytesIO()
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().cpu().numpy())
    # half the time of the default strategy, and no larger
    picture.save(buffer, format="PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return buffer.getvalue()


def png_pixels(data: bytes, max_pixels: int = MOST_PIXELS) -> int:
    """Return the number of pixels according to the file's header; nothing is decoded.

    Raises:
        ProtocolError: the file has more than ``max_pixels``, is not a PNG of 8 bits per channel, is animated, or costs
            more to read than its header says: a second header, or too many chunks.
    """
    width, height = _checked_size(data, max_pixels)
    return width * height


def decode_png(data: bytes, max_pixels: int = MOST_PIXELS) -> Tensor:
    """Return the pixels of a PNG file, uint8, shape ``(3, H, W)``.

    Raises:
        ProtocolError: as in :func:`png_pixels`, or the file is corrupt.
    """
    size = _checked_size(data, max_pixels)
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as picture:
            if picture.size != size:
                raise ProtocolError("its header is ambiguous")
            if picture.mode not in _MODES:
                raise ProtocolError(f"its mode is {picture.mode}, not 8-bit RGB")
            rgb = picture.convert("RGB")
    except ProtocolError:
        raise
    except Exception as error:  # a corrupt file can raise almost anything
        raise ProtocolError(f"the PNG file is corrupt ({one_line(error)})") from error
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1).contiguous()


def _checked_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    if data[:8] != _SIGNATURE or data[12:16] != b"IHDR" or len(data) < 26:
        raise ProtocolError(f"its {len(data)} bytes are not a PNG file")
    width, height, depth = struct.unpack(">IIB", data[16:25])
    if depth > 8:
        raise ProtocolError(f"it has {depth} bits per channel, not 8")
    place, chunks = 8, 0
    while place + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        if kind in _ANIMATION_CHUNKS:
            raise ProtocolError("it is animated")
        if kind == b"IHDR" and chunks:
            raise ProtocolError("it has two headers")
        if kind == b"IEND":
            break
        chunks += 1
        if chunks > 100 + len(data) // 512:  # encoders write chunks of 4 kB and more
            raise ProtocolError("it has more chunks than an image needs")
        place += 12 + length
    if width * height > max_pixels:
        allowed = f"{max_pixels / MEGAPIXEL:g} megapixels" if max_pixels >= MEGAPIXEL else f"{max_pixels} pixels"
        raise ProtocolError(
            f"{width} x {height} pixels exceed the limit of {allowed} per image. "
            "Send smaller images, or start the server with a larger --max-megapixels",
            "too_large",
        )
    return width, height
