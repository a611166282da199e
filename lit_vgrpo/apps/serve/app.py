"""The web application of ``lightning serve-reward``: ``POST /score`` and ``GET /health``."""

from __future__ import annotations

import asyncio
import hmac
import io
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from PIL import Image
from torch import Tensor

from lit_vgrpo.apps.serve.page import bounded_app
from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards import Scores, Weighted
from lit_vgrpo.rewards.http import ScoreAnswer, ScoreRequest

MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
"""Pillow's modes of at most 8 bits per channel."""
MOST_VALUES = 1000
"""JSON values allowed in a request, per image it may hold; parsed, the smallest take a hundred times their bytes."""
REQUESTS = 16
"""Requests held at the same time; the others wait in their connections, unread."""


class Worker:
    """Scores requests in order of arrival, in one thread.

    Args:
        reward: The reward, called only from the worker's thread.
        batch_size: Images per call of the reward.
        device: Device of the images.

    Attributes:
        scored_images: Images scored so far.
    """

    def __init__(self, reward: Weighted, batch_size: int, device: torch.device) -> None:
        self.reward = reward
        self.batch_size = batch_size
        self.device = device
        self.scored_images = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-worker")

    async def score(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Scores:
        """Wait for the scores of images, uint8, shape ``(B, 3, H, W)``."""
        return await asyncio.wrap_future(self._thread.submit(self._score, images, prompts, rows))

    def close(self) -> None:
        """Cancel waiting requests; the current one finishes."""
        self.reward.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _score(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Scores:
        parts = [slice(start, start + self.batch_size) for start in range(0, len(images), self.batch_size)]
        pixels = [images[part].to(self.device).float() / 255 for part in parts]
        calls = [self.reward.score(of, prompts[part], rows[part]) for of, part in zip(pixels, parts, strict=True)]
        self.scored_images += len(images)
        return Scores.joined(calls)


def make_app(
    worker: Worker, name: str, token: str | None, max_bytes: int, max_images: int, max_pixels: int, is_local: bool
) -> FastAPI:
    """Return the application of one reward.

    Args:
        worker: Scores the requests.
        name: The reward's name, shown at ``/health``.
        token: Required as ``Authorization: Bearer`` except at ``/health``; None requires no token.
        max_bytes: A larger request is refused with 413 while it is read.
        max_images: Images per request.
        max_pixels: Pixels per image.
        is_local: Refuse requests to host names other than this machine's.
    """
    app = bounded_app(max_bytes, is_local)
    room = asyncio.Semaphore(REQUESTS)

    @app.middleware("http")
    async def admit(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path == "/health":
            return await call_next(request)
        given = request.headers.get("authorization", "").encode("utf-8", errors="replace")
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            return JSONResponse({"detail": "the bearer token is missing or wrong"}, 401)
        async with room:
            body = await request.body()
            if sum(map(body.count, (b",", b"[", b"{"))) > max_images * MOST_VALUES:
                return JSONResponse({"detail": f"more than {MOST_VALUES} JSON values per image"}, 413)
            return await call_next(request)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "name": name, "scored": worker.scored_images}

    @app.post("/score")
    async def score(sent: ScoreRequest) -> ScoreAnswer:
        if len(sent.images) > max_images:
            raise HTTPException(413, f"{len(sent.images)} images exceed the limit of {max_images} per request")
        images, rows = await asyncio.to_thread(decoded, sent.images, max_pixels), sent.rows
        if sent.pictures:
            pictures = await asyncio.to_thread(decoded, sent.pictures, max_pixels)
            rows = [{**row, PICTURE: picture} for row, picture in zip(rows, pictures, strict=True)]
        try:
            scores = await worker.score(images, sent.prompts, rows)
        except RuntimeError as error:  # a reward that broke its contract, or ran out of memory
            raise HTTPException(500, f"{type(error).__name__}: {one_line(error)}") from error
        why = "; ".join(f"{part}: {one_line(error)}" for part, error in scores.errors.items()) or "no score"
        values = [None if math.isnan(value) else value for value in scores.total.tolist()]
        return ScoreAnswer(scores=values, errors=[why if value is None else None for value in values])

    return app


def decoded(files: Sequence[bytes], max_pixels: int) -> Tensor:
    """Return the images in PNG files of the same size, uint8, shape ``(B, 3, H, W)``.

    Raises:
        HTTPException: A file is not a PNG file of 8 bits per channel, is corrupt or larger, or the sizes differ.
    """
    images = []
    for data in files:
        try:
            picture = Image.open(io.BytesIO(data), formats=("PNG",))
            if picture.width * picture.height > max_pixels:  # from the header: a few bytes can unpack to gigabytes
                size = f"an image of {picture.width} x {picture.height} pixels exceeds the limit of {max_pixels} pixels"
                raise HTTPException(413, f"{size}. Start the server with a larger --max-megapixels")
            if picture.mode not in MODES:
                raise ValueError(f"the mode is {picture.mode}, not 8-bit RGB")
            rgb = picture.convert("RGB")
        except HTTPException:
            raise
        except Exception as error:  # a corrupt file can raise almost anything
            raise HTTPException(422, f"an image is not a readable PNG file: {one_line(error)}") from error
        pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
        images.append(pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1))
    if len({image.shape for image in images}) > 1:
        raise HTTPException(422, "the images of a request differ in size: send one request per size")
    return torch.stack(images)
