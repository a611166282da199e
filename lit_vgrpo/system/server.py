"""Applications served until Ctrl-C, or while other work runs."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.middleware.trustedhost import TrustedHostMiddleware

from lit_vgrpo.errors import say

LOCAL_NAMES = ["127.0.0.1", "localhost", "[::1]"]
"""A page under another host name that resolves to this machine may not read the served data."""
SHUTDOWN_S = 2
BACKLOG = 64
CONNECTIONS = 512


def bounded_app(max_body_size: int, is_local: bool) -> FastAPI:
    """Return an application that refuses larger requests and, if local, host names other than this machine's."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, max_body_size=max_body_size)
    if is_local:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES)

    @app.exception_handler(RequestValidationError)
    def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        """Name the first wrong field; FastAPI's answer would repeat the whole request."""
        first = error.errors()[0]
        text = f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}".removeprefix(": ")
        return JSONResponse({"detail": text[:300]}, 422)

    return app


def serve_page(
    app: Any, listener: socket.socket, opening: Iterable[str], shutdown_s: int = SHUTDOWN_S, keep_alive_s: int = 5
) -> None:
    """Print some lines, then serve an ASGI application on a listening socket until Ctrl-C or SIGTERM.

    See :func:`bounded_server`.
    """
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)  # before the lines, which others wait for
    try:
        for line in opening:
            say(line)
        bounded_server(app, shutdown_s, keep_alive_s).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn re-raises the signal when it is done
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def served_in_thread(app: Any, listener: socket.socket) -> Iterator[None]:
    """Serve an ASGI application on a listening socket in a thread until the block ends."""
    server = bounded_server(app, SHUTDOWN_S)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(2 * SHUTDOWN_S)


def bounded_server(app: Any, shutdown_s: int, keep_alive_s: int = 5) -> uvicorn.Server:
    """Return a server of an ASGI application with at most ``CONNECTIONS`` connections.

    Args:
        shutdown_s: Seconds for active requests to finish at shutdown.
        keep_alive_s: Seconds that a connection may be idle.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=shutdown_s,
    )
    return uvicorn.Server(config)
