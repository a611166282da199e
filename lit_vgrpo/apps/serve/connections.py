"""HTTP connections with time limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
HEAD_S = 10.0
"""Time for the head of a request, from the connection or the request's first byte on."""
BODY_S = 60.0
"""Time from a request's head to the last byte of its body."""


class BoundedProtocol(H11Protocol):
    """Uvicorn's connection, closed with status 408 where a request takes too long to arrive.

    Uvicorn itself only limits the time between two requests. A connection beyond ``MOST_CONNECTIONS`` is closed at
    once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._awaited: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._await(HEAD_S)

    @override
    def handle_events(self) -> None:
        super().handle_events()
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._await(BODY_S)
        elif state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._await(HEAD_S)
        else:
            self._await(None)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        super().connection_lost(exc)

    def _await(self, seconds: float | None) -> None:
        """Start the timer of what is awaited now; bytes that arrive meanwhile do not restart it."""
        if seconds == self._awaited:
            return
        self._awaited = seconds
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            detail = json.dumps({"detail": f"the request did not arrive within {self._awaited:g} s"}).encode()
            headers = [("Content-Type", "application/json"), ("Connection", "close")]
            for event in (h11.Response(status_code=408, headers=headers), h11.Data(data=detail), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
