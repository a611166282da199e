"""The report as a page on this machine that follows its runs."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from lit_vgrpo.apps.report.kept import FOLDER_NAME, IMAGES_NAME, SCORES_NAME
from lit_vgrpo.apps.report.page import render
from lit_vgrpo.apps.report.run_data import RunData
from lit_vgrpo.apps.serve.page import BACKLOG, LOCAL_NAMES, serve_page
from lit_vgrpo.errors import UserError, say

WATCHED = ("metrics.csv", "summary.json", "samples", f"{FOLDER_NAME}/{SCORES_NAME}", f"{FOLDER_NAME}/{IMAGES_NAME}")

Read = Callable[[], list[RunData]]


class LivePage:
    """The newest page of some runs, rendered when a file of theirs has changed.

    Args:
        read: returns the runs' data.
        folders: their folders.
    """

    def __init__(self, read: Read, folders: Sequence[Path]) -> None:
        self._read = read
        self._folders = folders
        self._version = ""
        self._html = ""

    @property
    def version(self) -> str:
        """A text that changes when a file does."""
        stats = [self._stat(folder / name) for folder in self._folders for name in WATCHED]
        return "-".join(stats)

    @staticmethod
    def _stat(path: Path) -> str:
        try:
            found = path.stat()
        except OSError:
            return "0"
        return f"{found.st_mtime_ns:x}.{found.st_size:x}"

    def html(self) -> str:
        """Return the page; the last one again while a run's files cannot be read."""
        version = self.version
        if version != self._version:
            try:
                self._html = render(self._read(), live=True)
            except UserError:
                if not self._html:
                    raise
            self._version = version
        return self._html


def make_app(page: LivePage) -> FastAPI:
    """Return the server of a page, at ``/``, and of its version, at ``/version``."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES)

    @app.get("/")
    def whole() -> Response:
        return HTMLResponse(page.html(), headers={"Cache-Control": "no-store", "X-Frame-Options": "DENY"})

    @app.get("/version")
    def version() -> Response:
        return PlainTextResponse(page.version, headers={"Cache-Control": "no-store"})

    return app


def serve_report(listener: socket.socket, read: Read, folders: Sequence[Path]) -> None:
    """Serve the report on a bound socket until Ctrl-C or SIGTERM."""
    listener.listen(BACKLOG)
    say(f"Report at http://{LOCAL_NAMES[0]}:{listener.getsockname()[1]}/ on this machine only. Ctrl-C stops it.")
    serve_page(make_app(LivePage(read, folders)), listener)
    say("Stopped.")
