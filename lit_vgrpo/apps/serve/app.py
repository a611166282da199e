"""The web application of ``lightning serve-reward``: ``POST /score`` and ``GET /health``."""

from __future__ import annotations

import asyncio
import hmac
import io
import json
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from PIL import Image, UnidentifiedImageError
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from torch import Tensor

from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards import Scores, Weighted
from lit_vgrpo.rewards.http import SENDS_SPACES, ScoreAnswer, ScoreRequest, validation_message
from lit_vgrpo.system.server import bounded_app

MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Pillow's modes of at most 8 bits per channel."""
MOST_VALUES = 1000
"""JSON values allowed in a request, per image it may hold; parsed, the smallest take a hundred times their bytes."""
REQUESTS = 64
"""Requests held at the same time; the others wait in their connections, unread, and silently."""
SPACE_S = 0.2
"""Seconds between looks at a waiting request: it gets a space if images were scored, and ends if its client left."""
LARGEST_IMAGES = 16
"""Images of the largest size in a request, or more that are smaller."""
CALL_PIXELS = 2**24
"""Pixels in a call of the reward, which takes 50 to 60 bytes for each, unless one image has more."""
PATIENCE_S, SLOWEST = 10.0, 100_000
"""Seconds without a byte of a request, and bytes per second in the long run, after which its client is sent away."""


class Worker:
    """Scores batches of requests in order of arrival, in one thread.

    Args:
        reward: The reward, called only from the worker's thread.
        batch_size: Images per call of the reward, or fewer large ones.

    Attributes:
        scored_images: Images scored so far.
    """

    def __init__(self, reward: Weighted, batch_size: int, device: torch.device) -> None:
        self.reward = reward
        self.batch_size = batch_size
        self.device = device
        self.scored_images = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-worker")

    async def score(self, sent: ScoreRequest, pixels: int) -> Scores:
        """Return the scores of a request of so many pixels, decoded by batches; HTTPException for a corrupt image."""
        size, calls = max(1, min(self.batch_size, CALL_PIXELS * len(sent.images) // pixels)), []
        for part in (slice(start, start + size) for start in range(0, len(sent.images), size)):
            images, rows = await asyncio.to_thread(decoded, sent.images[part], pixels), sent.rows[part]
            if sent.pictures:
                pictures = await asyncio.to_thread(decoded, sent.pictures[part], pixels)
                rows = [{**row, PICTURE: picture} for row, picture in zip(rows, pictures, strict=True)]
            call = self._thread.submit(self._score, images, sent.prompts[part], rows)
            calls.append(await asyncio.wrap_future(call))
        return Scores.joined(calls)

    def close(self) -> None:
        """Cancel waiting requests; the current one finishes."""
        self.reward.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _score(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Scores:
        scores = self.reward.score(images.to(self.device).float().div_(255), prompts, rows)
        self.scored_images += len(images)
        return scores


def make_app(
    worker: Worker, name: str, token: str | None, max_bytes: int, max_images: int, max_pixels: int, is_local: bool
) -> FastAPI:
    """Return the application of one reward.

    Args:
        name: The reward's name, shown at ``/health``.
        token: Required as ``Authorization: Bearer`` except at ``/health``; None requires no token.
        max_bytes: A larger request is refused with 413 while it is read.
        max_pixels: Pixels per image; a request may have ``LARGEST_IMAGES`` times as many.
        is_local: Refuse requests to host names other than this machine's.
    """
    app = bounded_app(max_bytes, is_local)
    room = asyncio.Semaphore(REQUESTS)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "name": name, "scored": worker.scored_images}

    @app.post("/score")
    async def score(request: Request) -> StreamingResponse:
        given = request.headers.get("authorization", "").encode("utf-8", errors="replace")
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "the bearer token is missing or wrong")
        parts = answer(request)
        first = await anext(parts)  # an error before it sets the status
        headers = {SENDS_SPACES: "1", "X-Accel-Buffering": "no"}  # nginx passes each on at once
        return StreamingResponse(with_errors(first, parts), headers=headers, media_type="application/json")

    async def answer(request: Request) -> AsyncIterator[bytes]:
        """Yield a space whenever other requests were scored, then the answer; its client times out in silence only."""
        async with room:
            body = await whole_body(request)
            if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise HTTPException(422, "send JSON, with Content-Type: application/json")  # other sites' pages cannot
            sent = await asyncio.to_thread(read_request, body, max_images, max_pixels)
            del body
            scored, work = worker.scored_images, asyncio.create_task(worker.score(*sent))
            try:
                while not (await asyncio.wait([work], timeout=SPACE_S))[0]:
                    if await request.is_disconnected():
                        raise HTTPException(400, "the client left")
                    if worker.scored_images > scored:
                        scored = worker.scored_images
                        yield b" "
                scores = work.result()
            except (RuntimeError, MemoryError) as error:  # a reward that broke its contract, or ran out of memory
                raise HTTPException(500, f"{type(error).__name__}: {one_line(error)}") from error
            finally:
                work.cancel()  # before it is scored for nobody
        why = "; ".join(f"{part}: {one_line(error)}" for part, error in scores.errors.items()) or "no score"
        values = [None if math.isnan(value) else value for value in scores.total.tolist()]
        errors = [why if value is None else None for value in values]
        yield ScoreAnswer(scores=values, errors=errors).model_dump_json().encode()

    return app


async def with_errors(first: bytes, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of an answer; an error becomes the last one, since the status is sent."""
    yield first
    try:
        async for part in parts:
            yield part
    except HTTPException as error:
        yield json.dumps({"status": error.status_code, "detail": error.detail}).encode()


async def whole_body(request: Request) -> bytes:
    """Return the body of a request; raise HTTPException if its client left, or is so slow that it keeps others out."""
    body, clock = bytearray(), asyncio.get_running_loop().time
    start = clock()
    try:
        async with asyncio.timeout(PATIENCE_S) as limit:
            async for block in request.stream():
                body += block
                limit.reschedule(PATIENCE_S + min(clock(), start + len(body) / SLOWEST))
    except TimeoutError as error:
        reason = f"the request stopped for {PATIENCE_S:g} s, or came slower than {SLOWEST // 1000} kB/s"
        raise HTTPException(408, reason, {"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the request is not complete") from error
    return bytes(body)


def read_request(body: bytes, max_images: int, max_pixels: int) -> tuple[ScoreRequest, int]:
    """Return a body's request and the pixels of its images, by their headers; raise HTTPException if not valid."""
    if sum(map(body.count, (b",", b"[", b"{"))) > max_images * MOST_VALUES:
        raise HTTPException(413, f"more than {MOST_VALUES} JSON values per image")
    try:
        sent = ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        raise HTTPException(422, validation_message(error)) from error
    if len(sent.images) > max_images:
        raise HTTPException(413, f"{len(sent.images)} images exceed the limit of {max_images} per request")
    total, most = 0, LARGEST_IMAGES * max_pixels
    for files in (sent.images, sent.pictures):
        sizes = set()
        for data in files:
            with png(data, max_pixels) as picture:
                sizes.add(picture.size)
                total += picture.width * picture.height
        if len(sizes) > 1:
            raise HTTPException(422, "the images of a request differ in size: send one request per size")
    if total > most:
        advice = "Send fewer images, or start the server with a larger --max-megapixels"
        raise HTTPException(413, f"{total} pixels exceed the limit of {most} pixels per request. {advice}")
    return sent, total


def decoded(files: Sequence[bytes], max_pixels: int) -> Tensor:
    """Return the images in PNG files of one size, uint8, ``(B, 3, H, W)``; raise HTTPException for other files."""
    images = []
    for data in files:
        with png(data, max_pixels) as picture:
            rgb = picture.convert("RGB")
        pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
        images.append(pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1))
    return torch.stack(images)


@contextmanager
def png(data: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """Open a PNG file of at most ``max_pixels`` and 8 bits per channel; errors, also in the block, become a status."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as picture:
            if picture.width * picture.height > max_pixels:  # from the header: a few bytes can unpack to gigabytes
                size = f"an image of {picture.width} x {picture.height} pixels exceeds the limit of {max_pixels} pixels"
                raise HTTPException(413, f"{size}. Start the server with a larger --max-megapixels")
            if picture.mode not in MODES:
                raise ValueError(f"the mode is {picture.mode}, not 8-bit RGB")
            yield picture
    except HTTPException:
        raise
    except Exception as error:  # a corrupt file can raise almost anything
        reason = "it is another file" if isinstance(error, UnidentifiedImageError) else one_line(error)
        raise HTTPException(422, f"an image is not a readable PNG file: {reason}") from error
