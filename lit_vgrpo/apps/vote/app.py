"""The voting page's server: comparisons, images, votes."""

from __future__ import annotations

import hmac
import random
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field

from lit_vgrpo.rewards.vote_store import Comparison, VoteRefused, VoteStore, VoteStoreError
from lit_vgrpo.system.server import bounded_app

COOKIE = "lightning_vote"
REPORT_STYLE = files("lit_vgrpo.report") / "templates" / "style.css"
PAGE = files("lit_vgrpo.apps.vote") / "page"
MAX_BODY = 10_000
Voter = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^\S(.*\S)?$")]


class Undo(BaseModel):
    """A request to undo a voter's last vote."""

    voter: Voter


class Vote(Undo):
    """A vote: the best image of a comparison, or none for a skip."""

    comparison: int = Field(ge=0, lt=2**63)
    image: str | None


def make_app(store: VoteStore, token: str | None = None, is_over: Callable[[], bool] = lambda: False) -> FastAPI:
    """Return the page and its server. FastAPI refuses votes that are not sent as JSON, so no other site can send one.

    Args:
        token: Secret in the page's address; ``None`` serves only this machine.
        is_over: Returns True once training has ended.
    """
    app = bounded_app(MAX_BODY, is_local=token is None)
    if token is not None:
        secret = token

        @app.middleware("http")
        async def check_token(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
            if _matches(request.query_params.get("token"), secret):
                answer = RedirectResponse("/", 303)
                answer.set_cookie(COOKIE, secret, httponly=True, samesite="strict")
                return answer
            if _matches(request.cookies.get(COOKIE), secret):
                return await call_next(request)
            return PlainTextResponse("Open the full address that lightning vote printed. It ends with ?token=...", 401)

    @app.exception_handler(VoteRefused)
    @app.exception_handler(VoteStoreError)
    def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 409 if isinstance(error, VoteRefused) else 503)

    def state(voter: str, again: Comparison | None = None) -> dict[str, Any]:
        """Return the voter's page data: a comparison, if any, the progress, and whether training is over."""
        comparison = again or store.next_comparison(voter)
        seen = None
        if comparison is not None:
            images = sorted(comparison.images)
            random.Random(f"{voter}/{comparison.id}").shuffle(images)  # always the same order for a voter
            seen = {"id": comparison.id, "prompt": comparison.prompt, "images": images}
        return {"comparison": seen, "progress": asdict(store.progress()), "is_over": is_over()}

    @app.get("/next")
    def following(voter: Annotated[Voter, Query()]) -> dict[str, Any]:
        return state(voter)

    @app.post("/vote")
    def vote(sent: Vote) -> dict[str, Any]:
        store.vote(sent.comparison, sent.voter, sent.image)
        return state(sent.voter)

    @app.post("/undo")
    def undo(sent: Undo) -> dict[str, Any]:
        return state(sent.voter, again=store.undo(sent.voter))

    @app.get("/image/{image}")
    def image(image: str) -> Response:
        file = store.image(image)
        if file is None:
            return PlainTextResponse("This image no longer exists.", 404)
        return Response(file, media_type="image/png", headers={"Cache-Control": "private, max-age=3600, immutable"})

    @app.get("/report.css")
    def report_style() -> Response:
        return FileResponse(str(REPORT_STYLE))

    app.mount("/", StaticFiles(directory=str(PAGE), html=True))
    return app


def _matches(given: str | None, token: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), token.encode())
