"""An HTTP client in a thread of its own: one request, tried once within limits of time and size."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, TypeVar
from urllib.parse import urlsplit

from lit_vgrpo.errors import one_line, printable
from lit_vgrpo.rewards.connection import Connection, is_loopback

T = TypeVar("T")

STOP_S = 5.0
KEEP_ALIVE_S = 4.0
"""Idle connections are dropped after this; uvicorn drops them after 5 seconds."""
_SHOWN_DETAIL = 300


class LinkClosed(RuntimeError):
    """The link is closed, so nothing can be sent."""


@dataclass(eq=False)  # exceptions are hashed
class RequestError(Exception):
    """A failed try.

    Args:
        cause: the name in the counts.
        reason: what the server did, in one line that continues after its address.
        may_pass: another try may help.
        retry_after_s: seconds that the server asks the client to wait.
    """

    cause: str
    reason: str
    may_pass: bool = True
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """An answer of any status.

    Args:
        body: truncated if the status is not 200 and the body is too long.
        retry_after_s: seconds that the server asks the client to wait.
    """

    status: int
    body: bytes
    retry_after_s: float

    @property
    def detail(self) -> str:
        """The beginning of the body, safe to print."""
        return printable(self.body, _SHOWN_DETAIL)


class Link:
    """An HTTP client and the event loop it runs in, for threads that may have a loop of their own (notebooks do).

    Args:
        url: the server; no proxy is used for this machine's own addresses.
        connection: timeouts, limits and the token.

    Attributes:
        slots: semaphore of the requests in flight.
        probing: lock for the single request that checks whether the server is back.
    """

    def __init__(self, url: str, connection: Connection) -> None:
        import httpx

        headers = {"Accept-Encoding": "identity"}  # a few compressed bytes can become gigabytes
        if connection.token is not None:
            headers["Authorization"] = f"Bearer {connection.token}"
        most = connection.max_connections
        self._connection = connection
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(connection.timeout_s, connect=connection.connect_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=KEEP_ALIVE_S),
            trust_env=not is_loopback(urlsplit(url).hostname or ""),  # a proxy cannot reach this machine's own address
        )
        self.slots = asyncio.Semaphore(most)
        self.probing = asyncio.Lock()
        self.process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="reward-link", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the link's thread and return its result.

        Raises:
            LinkClosed: the link is closed, or was closed meanwhile.
        """
        with self._lock:
            if self._is_closed:
                work.close()
                raise LinkClosed
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError as error:
            raise LinkClosed from error
        except BaseException:  # Ctrl-C too: do not continue in the background
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel pending requests and close the connections; from any thread, any number of times."""
        if self.process != os.getpid():
            return  # a fork does not copy the thread
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:  # unless the last reference to a reward is dropped there
            self._thread.join(STOP_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._client.aclose())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def attempt(self, method: str, url: str, content: dict[str, Any], timeout_s: float) -> Answer:
        """Send a request and read its answer.

        Args:
            content: the body, as keyword arguments of httpx.
            timeout_s: limit for the whole exchange.

        Raises:
            RequestError: there is no answer, or it is too long.
        """
        import httpx

        try:
            # a limit on the whole exchange: a server that trickles bytes never exceeds the one on a read
            return await asyncio.wait_for(self._exchange(method, url, content), timeout_s)
        except httpx.ConnectTimeout as error:
            reason = f"could not be reached within {self._connection.connect_timeout_s:g} s"
            raise RequestError("timeout", reason) from error
        except (asyncio.TimeoutError, httpx.TimeoutException) as error:
            raise RequestError("timeout", f"gave no answer within {timeout_s:g} s") from error
        except httpx.ConnectError as error:
            raise RequestError(
                "unreachable", f"cannot be reached ({one_line(error) or type(error).__name__})"
            ) from error
        except (httpx.NetworkError, httpx.ProtocolError) as error:
            # httpx has one class for a connection that is closed too early and for an answer that is not HTTP
            if isinstance(error, httpx.NetworkError) or "disconnect" in str(error) or "closed" in str(error):
                raise RequestError("reset", "closed the connection before the answer was complete") from error
            raise RequestError("garbage", f"sent something other than HTTP ({one_line(error)})") from error
        except httpx.HTTPError as error:
            raise RequestError("unreachable", f"cannot be reached ({one_line(error)})") from error

    async def _exchange(self, method: str, url: str, content: dict[str, Any]) -> Answer:
        most, body = self._connection.max_response_bytes, b""
        async with self._client.stream(method, url, **content) as response:
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > most:
                    if response.status_code == 200:
                        raise RequestError("too_large", f"answered more than {most} bytes")
                    break
            return Answer(response.status_code, body, seconds_of(response.headers.get("retry-after")))


def seconds_of(retry_after: str | None) -> float:
    """Return ``Retry-After``, a number or a date, in seconds from now; 0 where it is missing or unreadable."""
    if not retry_after:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
