"""The web application: ``POST /score``, ``GET /health``, ``GET /version``."""

from __future__ import annotations

import asyncio
import base64
import hmac
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from torch import Tensor

from lit_vgrpo import __version__
from lit_vgrpo.apps.serve.worker import Stopping, Worker
from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.protocol import (
    VERSION,
    ProtocolError,
    ScoreAnswer,
    ScoreRequest,
    decode_png,
    open_png,
    validation_message,
)

REQUESTS = 16
"""Requests held at the same time; the others wait in their connections, unread."""
BODY_S = 60.0
"""Time for a body to arrive."""
VALUES_PER_IMAGE = 1000
"""JSON values that a request may contain, per allowed image: parsed, two bytes can take a hundred."""
REQUEST_PIXELS = 64 * 2**20
"""Pixels of all images of a request together; decoded, they take 201 MB."""


def make_app(
    worker: Worker, name: str, token: str | None, max_request_bytes: int, max_images: int, max_pixels: int
) -> FastAPI:
    """Return the application of one reward.

    Args:
        worker: scores the requests.
        name: the reward's name in answers.
        token: required as ``Authorization: Bearer`` everywhere but at ``/health``; None requires none.
        max_request_bytes: a larger request is refused with 413 while it is read.
        max_images: images per request.
        max_pixels: pixels per image.
    """
    app = FastAPI(title="lit-vgrpo reward", openapi_url=None, max_body_size=max_request_bytes)
    room = asyncio.Semaphore(REQUESTS)

    def check_token(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("utf-8", errors="replace")
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "the bearer token is missing or wrong", {"WWW-Authenticate": "Bearer"})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "scored": worker.scored_images}

    @app.get("/version")
    async def version(request: Request) -> dict[str, Any]:
        check_token(request)
        return {"protocol": VERSION, "name": name, "lit_vgrpo": __version__}

    @app.post("/score")
    async def score(request: Request) -> ScoreAnswer:
        check_token(request)
        try:
            async with room:
                body = await asyncio.wait_for(request.body(), BODY_S)
                images, sent = await asyncio.to_thread(_decoded, body, max_images, max_pixels)
                scores = await asyncio.wrap_future(worker.submit(images, sent.prompts, sent.rows))
        except (asyncio.TimeoutError, ClientDisconnect) as error:
            raise HTTPException(408, f"the request did not arrive within {BODY_S:g} s") from error
        except ProtocolError as error:
            raise HTTPException(413 if error.is_too_large else 422, str(error)) from error
        except Stopping as error:
            raise HTTPException(503, str(error)) from error
        except RuntimeError as error:  # a reward that broke its contract, or ran out of memory
            raise HTTPException(500, f"{type(error).__name__}: {one_line(error)}") from error
        why = "; ".join(f"{part}: {one_line(error)}" for part, error in scores.errors.items()) or "no score"
        return ScoreAnswer(scores=scores.total.tolist(), errors=[None if ok else why for ok in scores.ok.tolist()])

    return app


def _decoded(body: bytes, max_images: int, max_pixels: int) -> tuple[list[Tensor], ScoreRequest]:
    # Counted before parsing. Characters inside strings count too: base64 has none of them, and prompts have few.
    if sum(body.count(mark) for mark in (b",", b"[", b"{")) > max_images * VALUES_PER_IMAGE:
        raise ProtocolError(f"more than {max_images * VALUES_PER_IMAGE} JSON values", is_too_large=True)
    try:
        sent = ScoreRequest.model_validate_json(body)
        files = [base64.b64decode(text, validate=True) for text in sent.images]
    except ValidationError as error:
        raise ProtocolError(validation_message(error)) from error
    except ValueError as error:
        raise ProtocolError("an image is not base64") from error
    if len(files) > max_images:
        raise ProtocolError(f"{len(files)} images exceed the limit of {max_images} per request", is_too_large=True)
    pictures = [open_png(data, max_pixels) for data in files]
    pixels = sum(picture.width * picture.height for picture in pictures)
    if pixels > REQUEST_PIXELS:
        raise ProtocolError(f"{pixels} pixels exceed the limit of {REQUEST_PIXELS} per request", is_too_large=True)
    return [decode_png(picture) for picture in pictures], sent
