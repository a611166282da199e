"""The web application: ``POST /score``, ``GET /health``, ``GET /version``."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException

from lit_vgrpo import __version__
from lit_vgrpo.apps.serve.worker import Busy, Stopping, Worker
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
"""Requests decoded at the same time; each takes several times the memory of its body."""
BODIES = 16
"""Bodies of the largest size that are held at the same time, whole or in part."""


def make_app(worker: Worker, name: str, token: str | None, max_request_bytes: int, limits: Limits) -> FastAPI:
    """Return the application of one reward.

    Args:
        worker: scores the requests.
        name: the reward's name in answers.
        token: required as ``Authorization: Bearer`` everywhere but at ``/health``; None requires none.
        max_request_bytes: a larger request is refused with 413 while it is read.
        limits: limits of a request.
    """
    app = FastAPI(title="lit-vgrpo reward", openapi_url=None)
    decoding = asyncio.Semaphore(DECODERS)
    room = _Room(max_request_bytes)

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
                with room.counted(request) as counted:
                    parse = await _read(counted, max_request_bytes, limits)
                    async with decoding:  # in threads, so that others go on meanwhile
                        sent = await asyncio.to_thread(parse)
                        held.enter_context(worker.room_for(sent))
                        wanted = await asyncio.to_thread(sent.decoded)
                    del counted, parse, sent
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


async def _read(request: Request, most_bytes: int, limits: Limits) -> Callable[[], EncodedRequest]:
    """Read the body and return the function that parses it."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        return partial(read_json_request, await request.body(), limits)
    async with request.form(max_files=limits.max_images + 1, max_fields=1, max_part_size=most_bytes) as fields:
        text = fields.get("request")
        if not isinstance(text, str):
            raise ProtocolError("the field request is missing")
        uploads = [upload for upload in fields.getlist("images") if isinstance(upload, UploadFile)]
        files = [await upload.read() for upload in uploads]
    return partial(read_multipart_request, text.encode(), files, limits)


class _Room:
    """Room for request bodies: ``most`` bytes for one, ``BODIES`` times that for all together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0

    @contextmanager
    def counted(self, request: Request) -> Iterator[Request]:
        """Count the body of a request while it arrives and until the block ends.

        Raises:
            HTTPException: 413, as soon as the body is larger than ``most``.
            Busy: there is no room for it beside those of other requests.
        """
        read = 0
        too_large = HTTPException(413, f"the request is larger than {self.most} bytes", {"Connection": "close"})

        async def receive() -> Any:
            nonlocal read
            message = await request.receive()
            size = len(message.get("body", b""))
            read += size
            self.held += size
            if read > self.most:
                raise too_large
            if self.held > BODIES * self.most:
                raise Busy(f"{self.held} bytes of requests are already held")
            return message

        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > self.most:
            raise too_large
        try:
            yield Request(request.scope, receive)
        finally:
            self.held -= read
