"""Pages for a browser, served until Ctrl-C or beside other work."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from lit_vgrpo.apps.serve.connections import BoundedProtocol

LOCAL_NAMES = ["127.0.0.1", "localhost"]
"""A page of another name that resolves to this machine may not read what is served."""
SHUTDOWN_S = 2
BACKLOG = 64


def serve_page(app: Any, listener: socket.socket, shutdown_s: int = SHUTDOWN_S, keep_alive_s: int = 5) -> None:
    """Serve an ASGI application on a listening socket until Ctrl-C or SIGTERM; see :func:`bounded_server`."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        bounded_server(app, shutdown_s, keep_alive_s).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn hands the signal on when it is done
        pass
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def served_beside(app: Any, listener: socket.socket) -> Iterator[None]:
    """Serve an ASGI application on a listening socket in a thread, to the end of the block."""
    server = bounded_server(app, SHUTDOWN_S)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(2 * SHUTDOWN_S)


def bounded_server(app: Any, shutdown_s: int, keep_alive_s: int = 5) -> uvicorn.Server:
    """Return a server of an ASGI application whose connections are bounded in number and time.

    Args:
        shutdown_s: seconds that requests under way get when it ends.
        keep_alive_s: seconds that a connection may be idle.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        http=BoundedProtocol,
        ws="none",
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=shutdown_s,
    )
    return uvicorn.Server(config)
