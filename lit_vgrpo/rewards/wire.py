"""The protocol that ``HTTPReward`` and ``lightning serve-reward`` speak: JSON with lossless pictures.

Request, as JSON: ``{"version": 1, "images": ["<PNG in base64>", ...], "prompts": [...], "rows": [{...}, ...]}``; or as
multipart: one file ``images`` a picture, in order, and a field ``request`` with the rest as JSON. Answer:
``{"version": 1, "scores": [0.5, null, ...], "errors": [null, "why", ...], "name": "..."}``; null is an image that could
not be scored, and never 0. Only JSON and PNG are read: nothing that arrives is executed or unpickled.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from PIL import Image
from torch import Tensor

from lit_vgrpo.errors import one_line, printable

T = TypeVar("T")

VERSION = 1
LARGEST_SCORE = torch.finfo(torch.float32).max
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_ANIMATION_CHUNKS = (b"acTL", b"fcTL", b"fdAT")
MEGAPIXEL = 2**20
VALUES_AN_IMAGE = 1000
"""Values that the JSON of a request may hold for each image that it may hold."""


class WireError(ValueError):
    """A message breaks the protocol, said in one line.

    Attributes:
        cause: ``garbage``, ``wrong_number`` or ``too_large``.
    """

    def __init__(self, message: str, cause: str = "garbage") -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class Limits:
    """What a request may hold.

    Args:
        max_images: images in one request.
        max_pixels: pixels of one image, as its header says: a few bytes can unpack to gigabytes.
        max_request_pixels: pixels of all images of a request together.
    """

    max_images: int = 256
    max_pixels: int = 4 * MEGAPIXEL
    max_request_pixels: int = 128 * MEGAPIXEL


@dataclass(frozen=True)
class EncodedRequest:
    """A request whose limits were checked and whose pictures are still files.

    Args:
        files: PNG files.
        prompts: as many.
        rows: as many.
        pixels: of all files together, as their headers say.
        max_pixels: of one file.
    """

    files: list[bytes]
    prompts: list[str]
    rows: list[dict[str, Any]]
    pixels: int
    max_pixels: int

    def decoded(self) -> ScoreRequest:
        """Decode the pictures; raises :class:`WireError` where a file is broken."""
        images = [_of_each(n, lambda file: decode_png(file, self.max_pixels), f) for n, f in enumerate(self.files)]
        return ScoreRequest(images, self.prompts, self.rows)


@dataclass
class ScoreRequest:
    """What is to be scored.

    Args:
        images: uint8, shape ``(3, H, W)`` each; sizes may differ.
        prompts: as many.
        rows: as many.
    """

    images: list[Tensor]
    prompts: list[str]
    rows: list[dict[str, Any]]


@dataclass
class ScoreAnswer:
    """What came back.

    Args:
        scores: one an image, finite or NaN.
        errors: why a score is NaN, None elsewhere.
        non_finite: how many scores were NaN or infinite instead of null.
    """

    scores: list[float]
    errors: list[str | None]
    non_finite: int = 0


def encode_png(image: Tensor) -> bytes:
    """A picture as a PNG file.

    Args:
        image: uint8, shape ``(3, H, W)``.
    """
    buffer = io.BytesIO()
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().cpu().numpy())
    # half the time of the usual search for repeats, and no larger: the file lives for one request
    picture.save(buffer, format="PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return buffer.getvalue()


def png_size(data: bytes) -> tuple[int, int]:
    """Width and height, as the file's header says; nothing is decoded.

    Raises:
        WireError: it is no PNG file, has more than 8 bits a channel, is an animation, or is built to cost its reader
            more than its header says: a second header, or chunks without end.
    """
    if data[:8] != _PNG_SIGNATURE or data[12:16] != b"IHDR" or len(data) < 26:
        raise WireError(f"{len(data)} bytes are no PNG file")
    width, height, depth = struct.unpack(">IIB", data[16:25])
    if depth > 8:
        raise WireError(f"it has {depth} bits a channel, not 8")
    place, chunks = 8, 0
    while place + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        if kind in _ANIMATION_CHUNKS:
            raise WireError("it is an animation")
        if kind == b"IHDR" and chunks:
            raise WireError("it has two headers")
        if kind == b"IEND":
            break
        chunks += 1
        if chunks > 100 + len(data) // 512:  # encoders write chunks of 4 kB and more
            raise WireError("it has more chunks than a picture needs")
        place += 12 + length
    return width, height


def decode_png(data: bytes, max_pixels: int = Limits.max_pixels) -> Tensor:
    """The pixels of a PNG file, uint8, shape ``(3, H, W)``.

    Raises:
        WireError: it is no whole PNG of 8 bits, or larger than ``max_pixels``.
    """
    width, height = _checked_size(data, max_pixels)
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as picture:
            if picture.size != (width, height):
                raise WireError("its header was read in two ways")
            if picture.mode not in _PNG_MODES:
                raise WireError(f"its mode is {picture.mode}, not 8-bit RGB")
            rgb = picture.convert("RGB")
    except WireError:
        raise
    except Exception as error:  # a broken file can raise almost anything in there
        raise WireError(f"the PNG file is broken ({one_line(error)})") from error
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1).contiguous()


def _checked_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    width, height = png_size(data)
    if width * height > max_pixels:
        allowed = f"{max_pixels / MEGAPIXEL:g} megapixels" if max_pixels >= MEGAPIXEL else f"{max_pixels} pixels"
        raise WireError(
            f"{width} x {height} pixels are more than the {allowed} that an image may have. "
            "Send smaller images, or start the server with a larger --max-megapixels",
            "too_large",
        )
    return width, height


def json_request(images: Tensor, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    """A request with its pictures inside.

    Args:
        images: uint8, shape ``(B, 3, H, W)``.
        prompts: the B prompts.
        rows: the B rows.

    Raises:
        WireError: a row holds what JSON cannot say.
    """
    pictures = [base64.b64encode(encode_png(image)).decode() for image in images]
    return _dump({"version": VERSION, "images": pictures, "prompts": list(prompts), "rows": list(rows)})


def multipart_request(
    images: Tensor, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> tuple[bytes, list[bytes]]:
    """The field ``request`` and the files ``images`` of a request; arguments and errors as in :func:`json_request`."""
    return _dump({"version": VERSION, "prompts": list(prompts), "rows": list(rows)}), [encode_png(i) for i in images]


def row_fault(row: Mapping[str, Any]) -> str | None:
    """Why a row cannot be sent, or None."""
    for key, value in row.items():
        try:
            _dump({key: value})
        except WireError as error:
            return f'the field "{key}" cannot be sent: {error}'
    return None


def read_json_request(body: bytes, limits: Limits) -> EncodedRequest:
    """Raises: WireError: it is no request, or more than the limits allow."""
    request = _load(body, limits.max_images * VALUES_AN_IMAGE)
    pictures = _strings(request, "images", limits.max_images)
    files = []
    for number, text in enumerate(pictures):
        try:
            files.append(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise WireError(f"images[{number}] is not base64") from error
    return _request(request, files, limits)


def read_multipart_request(field: bytes, files: Sequence[bytes], limits: Limits) -> EncodedRequest:
    """Raises: WireError: it is no request, or more than the limits allow."""
    _check_count(len(files), limits.max_images)
    return _request(_load(field, limits.max_images * VALUES_AN_IMAGE), files, limits)


def score_answer(
    scores: Tensor, errors: Sequence[str | None], name: str, parts: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """What a server answers; NaN becomes null.

    Args:
        scores: shape ``(B,)``, float32.
        errors: why a score is NaN, None elsewhere.
        parts: scores of a sum's parts by their name, ``(B,)`` each; for people to read.
    """
    answer: dict[str, Any] = {"version": VERSION, "scores": _nulled(scores), "errors": list(errors), "name": name}
    if parts:
        answer["parts"] = {part: _nulled(own) for part, own in parts.items()}
    return answer


def read_answer(body: bytes, count: int) -> ScoreAnswer:
    """The scores of ``count`` images.

    A number that is not finite as a float32 fails its image alone; anything else that is neither number nor null, the
    whole answer.

    Raises:
        WireError: it is no answer, or one for another number of images.
    """
    answer = _load(body)
    given = answer.get("scores")
    if not isinstance(given, list):
        raise WireError(f'it has no list "scores": {_shown(body)}')
    if len(given) != count:
        raise WireError(f"it has {len(given)} scores for {count} images", "wrong_number")
    reasons = answer.get("errors")
    if reasons is None:
        reasons = [None] * count
    if not isinstance(reasons, list) or len(reasons) != count:
        raise WireError(f'its "errors" are not a list of {count}')
    read = ScoreAnswer([], [])
    for score, reason in zip(given, reasons, strict=True):
        if score is None:
            read.scores.append(math.nan)
            read.errors.append(one_line(reason)[:300] if reason else "the server gave no score and no reason")
        elif isinstance(score, bool) or not isinstance(score, (int, float)):
            raise WireError(f"a score is {_shown(json.dumps(score).encode())}, not a number or null")
        elif abs(score) <= LARGEST_SCORE:  # false for NaN too
            read.scores.append(float(score))
            read.errors.append(None)
        else:
            read.scores.append(math.nan)
            read.errors.append("the server answered NaN or an infinite score")
            read.non_finite += 1
    return read


def _request(request: dict[str, Any], files: Sequence[bytes], limits: Limits) -> EncodedRequest:
    count = len(files)
    if count == 0:
        raise WireError("there are no images")
    prompts = _strings(request, "prompts", limits.max_images)
    rows = request.get("rows")
    if rows is None:
        rows = [{"prompt": prompt} for prompt in prompts]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise WireError("rows is not a list of objects")
    if not count == len(prompts) == len(rows):
        raise WireError(f"{count} images, {len(prompts)} prompts and {len(rows)} rows", "wrong_number")
    sizes = [_of_each(n, lambda file: _checked_size(file, limits.max_pixels), data) for n, data in enumerate(files)]
    pixels = sum(width * height for width, height in sizes)
    if pixels > limits.max_request_pixels:
        raise WireError(
            f"{pixels} pixels are more than the {limits.max_request_pixels} that one request may hold. "
            "Send fewer images at once",
            "too_large",
        )
    return EncodedRequest(list(files), prompts, rows, pixels, limits.max_pixels)


def _of_each(number: int, read: Callable[[bytes], T], data: bytes) -> T:
    try:
        return read(data)
    except WireError as error:
        raise WireError(f"images[{number}]: {error}", error.cause) from error


def _load(body: bytes, max_values: int | None = None) -> dict[str, Any]:
    # Before it is decoded, since a value of two bytes takes a hundred in memory. Marks inside strings count too: base64
    # has none, and prompts have few.
    if max_values is not None and sum(body.count(mark) for mark in (b",", b"[", b"{")) > max_values:
        raise WireError(f"its JSON holds more than {max_values} values", "too_large")
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"it is not JSON: {_shown(body)}") from error
    if not isinstance(message, dict):
        raise WireError(f"it is not a JSON object: {_shown(body)}")
    version = message.get("version", VERSION)
    if version != VERSION:
        raise WireError(f"it speaks version {_shown(str(version).encode())} of the protocol, not {VERSION}")
    return message


def _dump(message: dict[str, Any]) -> bytes:
    try:
        return json.dumps(message, allow_nan=False).encode()
    except TypeError as error:
        raise WireError(f"JSON cannot say it ({one_line(error)})") from error
    except (ValueError, RecursionError) as error:
        raise WireError("JSON has no NaN, no infinity and no circles") from error


def _strings(message: dict[str, Any], key: str, most: int) -> list[str]:
    found = message.get(key)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise WireError(f"{key} is not a list of strings")
    _check_count(len(found), most)
    return found


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise WireError(f"{count} images are more than the {most} that one request may hold", "too_large")


def _nulled(scores: Tensor) -> list[float | None]:
    return [score if math.isfinite(score) else None for score in scores.tolist()]


def _shown(body: bytes) -> str:
    """The beginning of something unreadable, safe to print."""
    return repr(printable(body[:60], 60)) if body else "nothing"
