"""The web application: ``POST /score``, ``GET /health``, ``GET /version``."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import UploadFile

from lit_vgrpo import __version__
from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.wire import (
    VERSION,
    Limits,
    ScoreRequest,
    WireError,
    read_json_request,
    read_multipart_request,
    score_answer,
)
from lit_vgrpo.serving.worker import Busy, Stopping, Worker

RETRY_AFTER_S = 1


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
            wanted = await _read(request, max_request_bytes, limits)
        except WireError as error:
            raise HTTPException(413 if error.cause == "too_large" else 422, one_line(error)) from error
        try:
            scores = await asyncio.wrap_future(worker.submit(wanted))
        except (Busy, Stopping) as error:
            raise HTTPException(503, one_line(error), {"Retry-After": str(RETRY_AFTER_S)}) from error
        except Exception as error:
            raise HTTPException(500, f"{type(error).__name__}: {one_line(error)}") from error
        parts = scores.parts if len(scores.parts) > 1 else None
        return JSONResponse(score_answer(scores.total, scores.errors, name, parts))

    return app


async def _read(request: Request, max_request_bytes: int, limits: Limits) -> ScoreRequest:
    limited = Request(request.scope, _counted(request, max_request_bytes))
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        body = await limited.body()
        return await asyncio.to_thread(read_json_request, body, limits)  # decoding takes a while: others go on
    form = limited.form(max_files=limits.max_images + 1, max_fields=1, max_part_size=max_request_bytes)
    async with form as fields:
        text = fields.get("request")
        if not isinstance(text, str):
            raise WireError("there is no field request")
        uploads = [upload for upload in fields.getlist("images") if isinstance(upload, UploadFile)]
        files = [await upload.read() for upload in uploads]
    return await asyncio.to_thread(read_multipart_request, text.encode(), files, limits)


def _counted(request: Request, most: int) -> Callable[[], Awaitable[Any]]:
    """The request's stream, which ends with 413 where it grows too large."""
    fault = HTTPException(413, f"the request is larger than {most} bytes", {"Connection": "close"})
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise fault
    read = 0

    async def receive() -> Any:
        nonlocal read
        message = await request.receive()
        read += len(message.get("body", b""))
        if read > most:
            raise fault
        return message

    return receive
