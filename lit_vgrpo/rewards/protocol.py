"""The messages between ``HTTPReward`` and ``lightning serve-reward``: JSON with lossless images.

Nothing that arrives is executed or unpickled: both sides read JSON, and the server decodes PNG files within limits.
"""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from PIL import Image
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from torch import Tensor

from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.errors import one_line

VERSION: Literal[1] = 1
MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Pillow's modes of at most 8 bits per channel."""
_LARGEST_SCORE = torch.finfo(torch.float32).max


class ProtocolError(ValueError):
    """A message that breaks the protocol; one line.

    Attributes:
        is_too_large: it exceeds a limit.
    """

    def __init__(self, message: object, is_too_large: bool = False) -> None:
        super().__init__(one_line(message))
        self.is_too_large = is_too_large


class ScoreRequest(BaseModel):
    """Images to score.

    Attributes:
        images: PNG files in base64.
        prompts: one per image.
        rows: one per image; by default they hold the prompt alone. They lose the paths of their pictures: on the client
            these name its files, and a server that read them would open any of its files that a stranger names.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    version: Literal[1] = VERSION
    images: list[str]
    prompts: list[str]
    rows: list[dict[str, Any]] = []

    @model_validator(mode="after")
    def _check_lengths(self) -> ScoreRequest:
        rows = self.rows or [{"prompt": prompt} for prompt in self.prompts]
        self.rows = [{name: value for name, value in row.items() if name != PICTURE} for row in rows]
        if not 0 < len(self.images) == len(self.prompts) == len(self.rows):
            numbers = f"{len(self.images)} images, {len(self.prompts)} prompts and {len(self.rows)} rows"
            raise ValueError(f"{numbers}: send one prompt and one row per image, and at least one")
        return self


def _finite_or_none(score: Any) -> Any:
    """Return None for a number that float32 cannot hold; what is no number stays, and is refused."""
    is_number = isinstance(score, (int, float)) and not isinstance(score, bool)
    return None if is_number and not abs(score) <= _LARGEST_SCORE else score


class ScoreAnswer(BaseModel):
    """The scores of a request.

    Attributes:
        scores: one per image; null where it could not be scored, never 0. NaN and infinity become null.
        errors: for each image why its score is null, or null; may be left out.
    """

    model_config = ConfigDict(strict=True)

    version: Literal[1] = VERSION
    scores: list[Annotated[float | None, BeforeValidator(_finite_or_none)]]
    errors: list[str | None] = []

    @model_validator(mode="after")
    def _check_lengths(self) -> ScoreAnswer:
        self.errors = self.errors or [None] * len(self.scores)
        if len(self.errors) != len(self.scores):
            raise ValueError(f"{len(self.scores)} scores with {len(self.errors)} errors")
        return self


def validation_message(error: ValidationError) -> str:
    """Return the first error of pydantic in one line, without the input."""
    first = error.errors(include_url=False, include_context=False)[0]
    return one_line(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": "))[:300]


def score_request(images: Tensor, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a request as JSON.

    Args:
        images: uint8, shape ``(B, 3, H, W)``.
        prompts: the B prompts.
        rows: the B rows.

    Raises:
        ValueError: a row holds a value that JSON cannot represent.
    """
    files = [base64.b64encode(encode_png(image)).decode() for image in images]
    return ScoreRequest(images=files, prompts=list(prompts), rows=[*map(dict, rows)]).model_dump_json().encode()


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


def open_png(data: bytes, max_pixels: int) -> Image.Image:
    """Open a PNG file from its header; nothing is decoded.

    Args:
        max_pixels: limit of an image: a few bytes can unpack to gigabytes.

    Raises:
        ProtocolError: it is not a PNG file of 8 bits per channel, or has more pixels.
    """
    try:
        picture = Image.open(io.BytesIO(data), formats=("PNG",))
    except Exception as error:  # a corrupt file can raise almost anything
        raise ProtocolError(f"an image of {len(data)} bytes is not a readable PNG file") from error
    if picture.mode not in MODES:
        raise ProtocolError(f"an image has the mode {picture.mode}, not 8-bit RGB")
    if picture.width * picture.height > max_pixels:
        size = f"an image of {picture.width} x {picture.height} pixels exceeds the limit of {max_pixels} pixels"
        raise ProtocolError(f"{size}. Start the server with a larger --max-megapixels", is_too_large=True)
    return picture


def decode_png(picture: Image.Image) -> Tensor:
    """Return the pixels of an opened PNG file, uint8, shape ``(3, H, W)``.

    Raises:
        ProtocolError: the file is corrupt.
    """
    try:
        rgb = picture.convert("RGB")
    except Exception as error:
        raise ProtocolError(f"a PNG file is corrupt ({one_line(error)})") from error
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1).contiguous()
