"""The choice of a server for each request of a reward that has several.

httpx and urllib3 only repeat a request at the same address; clients that balance exist for gRPC.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lit_vgrpo.rewards.connection import Connection, shown_address

if TYPE_CHECKING:
    import httpx

LATE, LATE_S, ANSWERS = 4.0, 1.0, 8
"""A request is late after 4 times the median of the last answers, of at least 8, and not within a second."""
MOST_PAUSES = 10.0
"""The longest pause of a server, in lengths of the request that failed."""
LONGEST_PAUSE_S = 30.0
"""The longest pause before a retry, and that a server can ask for."""
POLL_S = 1.0
FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(eq=False)
class Server:
    """One address, and what is known of it."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)  # of its client
    extensions: dict[str, str] = field(default_factory=dict)  # of its requests
    busy: int = 0  # requests under way
    requests: int = 0
    failures: int = 0  # in a row
    late: int = 0  # in a row
    back_at: float = 0.0  # seconds of the monotonic clock; later than now if it is left out

    @property
    def name(self) -> str:
        """Host and port, for the log."""
        return urlsplit(self.url).netloc.rpartition("@")[2]

    @property
    def shown(self) -> str:
        """The address for messages, with its proxy."""
        proxy = self.options.get("proxy")
        return shown_address(self.url) + (f" (through the proxy {shown_address(proxy)})" if proxy else "")


@dataclass(eq=False)  # exceptions are hashed
class RequestError(Exception):
    """A failed attempt."""

    reason: str  # one line that starts with the address
    is_permanent: bool = False  # another attempt at this server cannot help
    retry_after_s: float = 0.0  # as the server asks
    server: Server | None = None
    is_late: bool = False  # the server may work, but another is asked


@dataclass(eq=False)
class Attempt:
    """A request under way."""

    server: Server
    start: float  # seconds of the event loop's clock
    limit_s: float  # of the whole exchange
    limit: asyncio.Timeout
    may_be_late: bool  # another server may be asked instead, once per request


class Servers:
    """Servers that give the same scores, used from one event loop at a time.

    A request goes to the server with the fewest under way. A server that fails, or is late twice in a row, is left out
    for as long as that request took, and then gets one request at a time; each further failure doubles the pause. In a
    list of addresses, a name that resolves to several counts as several servers.
    """

    def __init__(self, url: str | list[str], path: str, connection: Connection) -> None:
        self.connection, self.path, self.several = connection, path, not isinstance(url, str)
        self.urls = [url] if isinstance(url, str) else url
        if len(set(self.urls)) < len(self.urls) or not self.urls:
            raise ValueError(f"url={[*map(shown_address, self.urls)]}: list at least one address, and each once.")
        self.all = [Server(with_path(one, path)) for one in self.urls]
        self._seconds: deque[float] = deque(maxlen=64)  # of the last answers
        self._waiting: list[asyncio.Future[None]] = []
        self._under_way: list[Attempt] = []

    def find(self, option: Callable[[str], str]) -> None:
        """Resolve names, and set the options of all clients; errors as of :meth:`Connection.client_options`."""
        import httpx

        found, known = [], {server.url: server for server in self.all}
        for one in self.urls:
            options, address = self.connection.client_options(one, option), with_path(one, self.path)
            url = httpx.URL(address)
            hosts = addresses_of(url) if self.several and options["proxy"] is None else []
            for place in [str(url.copy_with(host=host)) for host in hosts] or [address]:
                found.append(known.get(place) or Server(place))
                found[-1].options = options
                if hosts:  # for HTTP and TLS, it is still the server of that name
                    found[-1].options = options | {"headers": options["headers"] | {"Host": url.netloc.decode()}}
                    found[-1].extensions = {"sni_hostname": url.host}
        self.all = found

    def has_other(self, server: Server | None) -> bool:
        """Return True if another server is not left out."""
        others = [other for other in self.all if other is not server]
        return server is not None and any(other.back_at <= time.monotonic() for other in others)

    @asynccontextmanager
    async def lease(self, earlier: list[RequestError], count: Callable[[str, float], None]) -> AsyncIterator[Attempt]:
        """Wait for a free server for a request's next attempt; the caller keeps its limit, which may get shorter."""
        server = await self._free(earlier[-1].server if earlier else None)
        start, timeout_s, error = asyncio.get_running_loop().time(), self.connection.timeout_s, None
        may_be_late = len(earlier) < self.connection.retries and not any(error.is_late for error in earlier)
        limit_s = min(timeout_s, self._late_s(server)) if may_be_late else timeout_s
        attempt = Attempt(server, start, limit_s, asyncio.timeout_at(start + limit_s), may_be_late)
        self._under_way.append(attempt)
        server.busy, server.requests = server.busy + 1, server.requests + 1
        try:
            try:
                yield attempt
            except RequestError as caught:
                caught.server, error = server, caught
            self._under_way.remove(attempt)
            seconds = asyncio.get_running_loop().time() - start
            self._note(server, seconds, error, seconds >= self._late_s(server))
            if self.several:
                counts = {"requests": 1, "seconds": seconds, "failures": int(error is not None)}
                for event, number in counts.items():
                    count(f"{server.name}/{event}", number)
            if error is not None:
                raise error
        finally:
            if attempt in self._under_way:  # cancelled
                self._under_way.remove(attempt)
            server.busy -= 1
            if waiter := next((one for one in self._waiting if not one.done()), None):
                waiter.set_result(None)

    def _late_s(self, server: Server) -> float:
        """Return the seconds after which a request to a server is late; infinity if that is not known, or no help."""
        if len(self._seconds) < ANSWERS or not self.has_other(server):
            return math.inf
        return max(LATE_S, LATE * median(self._seconds))

    async def _free(self, last: Server | None) -> Server:
        while True:
            now, most = time.monotonic(), self.connection.max_connections
            back = [one for one in self.all if one.back_at <= now and (one is not last or not self.has_other(last))]
            if free := [one for one in back if one.busy < (1 if one.failures else most)]:
                return min(free, key=lambda one: (one.busy, one.requests))
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            pauses = [one.back_at - now for one in self.all if one.back_at > now]
            try:
                await asyncio.wait([waiter], timeout=min([POLL_S, *pauses]))
            finally:
                self._waiting.remove(waiter)

    def _note(self, server: Server, seconds: float, error: RequestError | None, is_late: bool) -> None:
        if error is None:
            self._seconds.append(seconds)
            for other in self._under_way if len(self._seconds) == ANSWERS else ():  # sent before that was known
                if other.may_be_late and (late_s := self._late_s(other.server)) < other.limit_s:
                    other.limit_s = late_s
                    other.limit.reschedule(other.start + late_s)
        if not self.several or server.back_at > time.monotonic():
            return
        server.late = server.late + 1 if is_late else 0
        if server.late > 1 or (error is not None and not error.is_late):
            length_s = max(seconds, self.connection.backoff_s) * min(2.0**server.failures, MOST_PAUSES)
            asked_s = min(LONGEST_PAUSE_S, error.retry_after_s) if error else 0.0
            server.back_at = time.monotonic() + max(length_s, asked_s)
            server.failures += 1
        elif not is_late:
            server.failures = 0


def with_path(url: str, path: str) -> str:
    """Add a path to an address, before its query.

    >>> with_path("http://host/v1/?key=1", "/models")
    'http://host/v1/models?key=1'
    """
    start, mark, query = url.partition("?")
    return f"{start.rstrip('/')}{path}{mark}{query}" if path else url


def addresses_of(url: httpx.URL) -> list[str]:
    """Return the addresses of a name that has several of one kind, IPv4 first; else nothing."""
    try:
        found = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError:  # the request reports it
        return []
    kinds = {family: [*dict.fromkeys(str(one[4][0]) for one in found if one[0] == family)] for family in FAMILIES}
    return next((hosts for hosts in kinds.values() if len(hosts) > 1), [])
