"""The voting page's server: comparisons, images, votes."""

from __future__ import annotations

import hmac
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from importlib.resources import files
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse
from pydantic import BaseModel, Field
from starlette.middleware.trustedhost import TrustedHostMiddleware

from lit_vgrpo.apps.serve.page import LOCAL_NAMES
from lit_vgrpo.rewards.vote_groups import Comparison
from lit_vgrpo.rewards.vote_store import VoteRefused, VoteStore, VoteStoreError

COOKIE = "lightning_vote"
LEASE_S = 60.0
"""How long a comparison is kept from others after a voter got it."""
REPORT_STYLE = files("lit_vgrpo.apps.report") / "templates" / "style.css"
PAGE = files("lit_vgrpo.apps.vote") / "page"
FILES = {"/": ("page.html", "text/html"), "/script.js": ("script.js", "text/javascript")}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
Voter = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^\S(.*\S)?$")]


class Undo(BaseModel):
    """A request to take back a voter's last vote."""

    voter: Voter


class Vote(Undo):
    """A vote: the best image of a comparison, or none for a skip."""

    comparison: int = Field(ge=0, lt=2**63)
    image: str | None


class Ballots:
    """Who looks at what, and what each sees.

    Args:
        store: the votes.
        seed: of the order in which a voter sees the images of a comparison.
        is_over: returns True once training has ended.
    """

    def __init__(self, store: VoteStore, seed: int, is_over: Callable[[], bool]) -> None:
        self.store = store
        self.seed = seed
        self.is_over = is_over
        self._leases: dict[str, tuple[int, float]] = {}
        self._leasing = threading.Lock()

    def next(self, voter: str, again: Comparison | None = None) -> dict[str, Any]:
        """Return what a voter sees next: a comparison, if there is one, the progress, and whether training is over.

        Args:
            again: a comparison to show once more.
        """
        now = time.monotonic()
        with self._leasing:
            busy = {number for other, (number, end) in self._leases.items() if other != voter and end > now}
            comparison = again or self.store.next_comparison(voter, busy)
            self._leases.pop(voter, None)
            if comparison is not None:
                self._leases[voter] = (comparison.id, now + LEASE_S)
        seen = None
        if comparison is not None:
            seen = {"id": comparison.id, "prompt": comparison.prompt, "images": self.order(voter, comparison)}
        return {"comparison": seen, "progress": asdict(self.store.progress()), "is_over": self.is_over()}

    def order(self, voter: str, comparison: Comparison) -> list[str]:
        """Return the images in the random order in which a voter sees them, always the same."""
        images = sorted(comparison.images)
        random.Random(f"{self.seed}/{voter}/{comparison.id}").shuffle(images)
        return images


def make_app(
    store: VoteStore, seed: int = 0, token: str | None = None, is_over: Callable[[], bool] = lambda: False
) -> FastAPI:
    """Return the page and its server.

    Args:
        store: the votes.
        seed: of the order of the images.
        token: secret in the address that opens the page; ``None`` serves this machine only.
        is_over: returns True once training has ended.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    ballots = Ballots(store, seed, is_over)
    if token is None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES)

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        answer = _refusal(request, token) or await call_next(request)
        for name, value in HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    @app.exception_handler(VoteRefused)
    @app.exception_handler(VoteStoreError)
    def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": str(error)}, 409 if isinstance(error, VoteRefused) else 503)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": "A vote has a voter's name of 1 to 40 letters, a comparison and an image."}, 422)

    for address, (name, media_type) in FILES.items():
        app.add_api_route(address, _of_file((PAGE / name).read_text(), media_type), methods=["GET"])
    style = REPORT_STYLE.read_text() + (PAGE / "style.css").read_text()
    app.add_api_route("/style.css", _of_file(style, "text/css"), methods=["GET"])

    @app.get("/image/{image}")
    def image(image: str) -> Response:
        found = store.image(image)
        if found is None:
            return PlainTextResponse("This image does not exist any more.", 404)
        return Response(found, media_type="image/png", headers={"Cache-Control": "private, max-age=3600, immutable"})

    @app.get("/next")
    def following(voter: Annotated[Voter, Query()]) -> dict[str, Any]:
        return ballots.next(voter)

    @app.post("/vote")
    def vote(sent: Vote) -> dict[str, Any]:
        store.vote(sent.comparison, sent.voter, sent.image)
        return ballots.next(sent.voter)

    @app.post("/undo")
    def undo(sent: Undo) -> dict[str, Any]:
        return ballots.next(sent.voter, again=store.undo(sent.voter))

    return app


def _of_file(text: str, media_type: str) -> Callable[[], Response]:
    return lambda: Response(text, media_type=f"{media_type}; charset=utf-8")


def _refusal(request: Request, token: str | None) -> Response | None:
    """Return the answer to a request without the token, or to one that another site's page sent."""
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    if request.method != "GET":
        is_other = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
        if is_other or site not in (None, "same-origin"):
            return JSONResponse({"detail": "Votes are only accepted from the voting page itself."}, 403)
        if not request.headers.get("content-type", "").startswith("application/json"):
            return JSONResponse({"detail": "Votes are sent as JSON."}, 415)
    if token is None:
        return None
    if _is(request.query_params.get("token"), token):
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return answer
    if _is(request.cookies.get(COOKIE), token):
        return None
    return PlainTextResponse("Open the whole address that lightning vote printed: it ends with ?token=...", 401)


def _is(given: str | None, token: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), token.encode())
