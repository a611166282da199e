"""The messages between ``HTTPReward`` and ``lightning serve-reward``: JSON with lossless images.

A request as JSON: ``{"version": 1, "images": ["<PNG in base64>", ...], "prompts": [...], "rows": [{...}, ...]}``. As
multipart: one file ``images`` per image, in order, and a field ``request`` with the rest as JSON. The answer:
``{"version": 1, "scores": [0.5, null, ...], "errors": [null, "why", ...], "name": "..."}``, where null is an image that
could not be scored, never 0. Only JSON and PNG are read: nothing that arrives is executed or unpickled.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.errors import counted, one_line, printable
from lit_vgrpo.rewards.png import MEGAPIXEL, MOST_PIXELS, ProtocolError, decode_png, encode_png, png_pixels

T = TypeVar("T")

VERSION = 1
_LARGEST_SCORE = torch.finfo(torch.float32).max
VALUES_PER_IMAGE = 1000
"""JSON values that a request may contain, per allowed image."""


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    Args:
        max_images: images per request.
        max_pixels: pixels per image, according to its header: a few bytes can unpack to gigabytes.
        max_request_pixels: pixels of all images of a request together.
    """

    max_images: int = 256
    max_pixels: int = MOST_PIXELS
    max_request_pixels: int = 128 * MEGAPIXEL


@dataclass(frozen=True)
class EncodedRequest:
    """A request within its limits, with images still encoded.

    Args:
        files: PNG files.
        prompts: one per file.
        rows: one per file.
        pixels: of all files together, according to their headers.
        max_pixels: limit of one file.
    """

    files: list[bytes]
    prompts: list[str]
    rows: list[dict[str, Any]]
    pixels: int
    max_pixels: int

    def decoded(self) -> ScoreRequest:
        """Decode the images, or raise :class:`ProtocolError` if a file is corrupt."""
        return ScoreRequest(_each(decode_png, self.files, self.max_pixels), self.prompts, self.rows)


@dataclass
class ScoreRequest:
    """Images to score.

    Args:
        images: uint8, shape ``(3, H, W)`` each; sizes may differ.
        prompts: one per image.
        rows: one per image.
    """

    images: list[Tensor]
    prompts: list[str]
    rows: list[dict[str, Any]]


@dataclass
class ScoreAnswer:
    """The scores of a request.

    Args:
        scores: one per image, finite or NaN.
        errors: why a score is NaN; None elsewhere.
        non_finite: number of scores that were NaN or infinite instead of null.
    """

    scores: list[float]
    errors: list[str | None]
    non_finite: int = 0


def without_files(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without the paths of their pictures, which name files of the client's machine.

    A server that read them would open files of its own that a stranger names.
    """
    return [{name: value for name, value in row.items() if name != PICTURE} for row in rows]


def json_request(images: Tensor, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a request as JSON, including its images.

    Args:
        images: uint8, shape ``(B, 3, H, W)``.
        prompts: the B prompts.
        rows: the B rows.

    Raises:
        ProtocolError: a row holds a value that JSON cannot represent.
    """
    files = [base64.b64encode(encode_png(image)).decode() for image in images]
    return _dump({"version": VERSION, "images": files, "prompts": list(prompts), "rows": without_files(rows)})


def multipart_request(
    images: Tensor, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> tuple[bytes, list[bytes]]:
    """Return the field ``request`` and the files ``images``; arguments and errors as in :func:`json_request`."""
    return _dump({"version": VERSION, "prompts": list(prompts), "rows": without_files(rows)}), [
        encode_png(i) for i in images
    ]


def row_error(row: Mapping[str, Any]) -> str | None:
    """Return why a row cannot be sent, or None."""
    for key, value in row.items():
        try:
            _dump({key: value})
        except ProtocolError as error:
            return f'the field "{key}" cannot be sent: {error}'
    return None


def read_json_request(body: bytes, limits: Limits) -> EncodedRequest:
    """Read a request, or raise :class:`ProtocolError` if it is invalid or exceeds the limits."""
    request = _load(body, limits.max_images * VALUES_PER_IMAGE)
    texts = _strings(request, "images", limits.max_images)
    files = []
    for number, text in enumerate(texts):
        try:
            files.append(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError) as error:
            raise ProtocolError(f"images[{number}] is not base64") from error
    return _request(request, files, limits)


def read_multipart_request(field: bytes, files: Sequence[bytes], limits: Limits) -> EncodedRequest:
    """Read a request, or raise :class:`ProtocolError` if it is invalid or exceeds the limits."""
    _check_count(len(files), limits.max_images)
    return _request(_load(field, limits.max_images * VALUES_PER_IMAGE), files, limits)


def score_answer(
    scores: Tensor, errors: Sequence[str | None], name: str, parts: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Return the server's answer; NaN becomes null.

    Args:
        scores: shape ``(B,)``, float32.
        errors: why a score is NaN; None elsewhere.
        parts: scores of each reward of a weighted sum by name, ``(B,)`` each; informative only.
    """
    answer: dict[str, Any] = {"version": VERSION, "scores": _nulled(scores), "errors": list(errors), "name": name}
    if parts:
        answer["parts"] = {part: _nulled(own) for part, own in parts.items()}
    return answer


def read_answer(body: bytes, count: int) -> ScoreAnswer:
    """Read the scores of ``count`` images.

    A number that is not finite as float32 fails its own image; anything else that is neither a number nor null fails
    the whole answer.

    Raises:
        ProtocolError: it is not an answer, or has the wrong number of scores.
    """
    answer = _load(body)
    given = answer.get("scores")
    if not isinstance(given, list):
        raise ProtocolError(f'it has no list "scores": {_shown(body)}')
    if len(given) != count:
        raise ProtocolError(f"it has {counted(len(given), 'score')} for {counted(count, 'image')}", "wrong_number")
    reasons = answer.get("errors")
    if reasons is None:
        reasons = [None] * count
    if not isinstance(reasons, list) or len(reasons) != count:
        raise ProtocolError(f'its "errors" are not a list of {count}')
    read = ScoreAnswer([], [])
    for score, reason in zip(given, reasons, strict=True):
        if score is None:
            read.scores.append(math.nan)
            read.errors.append(one_line(reason)[:300] if reason else "the server gave no score and no reason")
        elif isinstance(score, bool) or not isinstance(score, (int, float)):
            raise ProtocolError(f"a score is {_shown(json.dumps(score).encode())}, not a number or null")
        elif abs(score) <= _LARGEST_SCORE:  # false for NaN too
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
        raise ProtocolError("there are no images")
    prompts = _strings(request, "prompts", limits.max_images)
    rows = request.get("rows")
    if rows is None:
        rows = [{"prompt": prompt} for prompt in prompts]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProtocolError("rows is not a list of objects")
    if not count == len(prompts) == len(rows):
        numbers = counted(count, "image"), counted(len(prompts), "prompt"), counted(len(rows), "row")
        raise ProtocolError("{}, {} and {}".format(*numbers), "wrong_number")
    pixels = sum(_each(png_pixels, files, limits.max_pixels))
    if pixels > limits.max_request_pixels:
        raise ProtocolError(
            f"{pixels} pixels exceed the limit of {limits.max_request_pixels} per request. Send fewer images at once",
            "too_large",
        )
    return EncodedRequest(list(files), prompts, without_files(rows), pixels, limits.max_pixels)


def _each(read: Callable[[bytes, int], T], files: Sequence[bytes], max_pixels: int) -> list[T]:
    results: list[T] = []
    for data in files:
        try:
            results.append(read(data, max_pixels))
        except ProtocolError as error:
            raise ProtocolError(f"images[{len(results)}]: {error}", error.cause) from error
    return results


def _load(body: bytes, max_values: int | None = None) -> dict[str, Any]:
    # Counted before decoding, since a value of two bytes takes a hundred in memory. Characters inside strings count
    # too: base64 has none of them, and prompts have few.
    if max_values is not None and sum(body.count(mark) for mark in (b",", b"[", b"{")) > max_values:
        raise ProtocolError(f"its JSON has more than {max_values} values", "too_large")
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"it is not JSON: {_shown(body)}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"it is not a JSON object: {_shown(body)}")
    version = message.get("version", VERSION)
    if version != VERSION:
        raise ProtocolError(f"it uses version {_shown(str(version).encode())} of the protocol, not {VERSION}")
    return message


def _dump(message: dict[str, Any]) -> bytes:
    try:
        return json.dumps(message, allow_nan=False).encode()
    except TypeError as error:
        raise ProtocolError(f"JSON cannot represent it ({one_line(error)})") from error
    except (ValueError, RecursionError) as error:
        raise ProtocolError("JSON allows no NaN, infinity or circular reference") from error


def _strings(message: dict[str, Any], key: str, most: int) -> list[str]:
    found = message.get(key)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ProtocolError(f"{key} is not a list of strings")
    _check_count(len(found), most)
    return found


def _check_count(count: int, most: int) -> None:
    if count > most:
        raise ProtocolError(f"{count} images exceed the limit of {most} per request", "too_large")


def _nulled(scores: Tensor) -> list[float | None]:
    return [score if math.isfinite(score) else None for score in scores.tolist()]


def _shown(body: bytes) -> str:
    """Return the beginning of something unreadable, safe to print."""
    return repr(printable(body[:60], 60)) if body else "nothing"
