"""The web application: ``POST /score``, ``GET /health``, ``GET /version``."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException

from lit_vgrpo import __version__
from lit_vgrpo.commands.serve.worker import Busy, Stopping, Worker
from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.protocol import (
    VERSION,
    EncodedRequest,
    Limits,
    ProtocolError,
    read_json_request,
    read_multipart_request,
    score_answer,
)

RETRY_AFTER_S = 1
DECODERS = 4
"""Requests that are decoded at once; each takes its body several times over."""
BODIES = 16
"""Bodies of the largest size that are held at once, whole or in part."""


def make_app(worker: Worker, name: str, token: str | None, max_request_bytes: int, limits: Limits) -> FastAPI:
    """The application of one reward.

    Args:
        worker: scores what comes in.
        name: of the reward, for answers.
        token: what requests but those for ``/health`` must bring along as ``Authorization: Bearer``; None for none.
        max_request_bytes: a larger request is refused with 413, as soon as it is.
        limits: what a request may hold.
    """
    app = FastAPI(title="lit-vgrpo reward", openapi_url=None)
    decoding = asyncio.Semaphore(DECODERS)
    room = _Room(BODIES * max_request_bytes)

    def admit(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("utf-8", errors="replace")
        if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise HTTPException(401, "the bearer token is missing or wrong", {"WWW-Authenticate": "Bearer"})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "waiting": worker.waiting}

    @app.get("/version")
    async def version(request: Request) -> dict[str, Any]:
        admit(request)
        return {"protocol": VERSION, "name": name, "lit_vgrpo": __version__}

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        admit(request)
        try:
            with ExitStack() as held:
                with _Body(request, max_request_bytes, room) as body:
                    parse = await _read(request, body, limits)
                    async with decoding:  # in threads: it takes a while, and others go on
                        sent = await asyncio.to_thread(parse)
                        held.enter_context(worker.room_for(sent))
                        wanted = await asyncio.to_thread(sent.decoded)
                    del parse, sent
                scores = await asyncio.wrap_future(worker.submit(wanted))
        except StarletteHTTPException:  # FastAPI's own are of that kind, and so is one of a form with too many files
            raise
        except ProtocolError as error:
            raise HTTPException(413 if error.cause == "too_large" else 422, one_line(error)) from error
        except (Busy, Stopping) as error:
            raise HTTPException(503, one_line(error), {"Retry-After": str(RETRY_AFTER_S)}) from error
        except Exception as error:  # a client that went away among them, who reads no answer
            raise HTTPException(500, f"{type(error).__name__}: {one_line(error)}") from error
        parts = scores.parts if len(scores.parts) > 1 else None
        return JSONResponse(score_answer(scores.total, scores.errors, name, parts))

    return app


async def _read(request: Request, body: _Body, limits: Limits) -> Callable[[], EncodedRequest]:
    """Read the body; what is returned parses it."""
    limited = Request(request.scope, body.receive)
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        return partial(read_json_request, await limited.body(), limits)
    form = limited.form(max_files=limits.max_images + 1, max_fields=1, max_part_size=body.most)
    async with form as fields:
        text = fields.get("request")
        if not isinstance(text, str):
            raise ProtocolError("there is no field request")
        uploads = [upload for upload in fields.getlist("images") if isinstance(upload, UploadFile)]
        files = [await upload.read() for upload in uploads]
    return partial(read_multipart_request, text.encode(), files, limits)


class _Room:
    """Bytes that may be held at once, and those that are."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0


class _Body:
    """A request's body, counted while it comes in and until the block's end.

    Raises:
        HTTPException: 413, as soon as it is larger than ``most``.
        Busy: there is no room for it beside those of other requests.
    """

    def __init__(self, request: Request, most: int, room: _Room) -> None:
        self.most = most
        self._request = request
        self._room = room
        self._read = 0
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            raise self._too_large()

    def __enter__(self) -> _Body:
        return self

    def __exit__(self, *_: object) -> None:
        self._room.held -= self._read

    async def receive(self) -> Any:
        """The next message of the request."""
        message = await self._request.receive()
        size = len(message.get("body", b""))
        self._read += size
        self._room.held += size
        if self._read > self.most:
            raise self._too_large()
        if self._room.held > self._room.most:
            raise Busy(f"{self._room.held} bytes of requests are held already")
        return message

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the request is larger than {self.most} bytes", {"Connection": "close"})
