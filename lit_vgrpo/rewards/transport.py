"""Requests to a server that may hang, break off or answer nonsense: tried again within limits, and counted by cause."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import urlsplit

from lit_vgrpo.rewards.attempt import Answer, Fault, attempt
from lit_vgrpo.rewards.base import RewardError, RewardOutage
from lit_vgrpo.rewards.connection import Connection, address_fault, is_loopback
from lit_vgrpo.rewards.link import Link, LinkClosed
from lit_vgrpo.rewards.wire import WireError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

NOT_INSTALLED = 'httpx is not installed. Run: pip install "lit-vgrpo[http]"'
LONGEST_PAUSE_S = 30.0
WRONG_PATH = (404, 405)
"""What a server answers where it has nothing to post to."""
KEEP_ALIVE_S = 4.0
"""An idle connection is not used after that: servers of uvicorn's kind drop it after 5 seconds."""
PASSING_STATUS = (408, 425, 429)
"""Below 500, what another try may cure."""


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request.

    Args:
        content: its body, in the words of httpx: ``content`` and ``headers``, ``json``, or ``data`` and ``files``.
        read: what an answer of status 200 says; raises :class:`WireError`, after which the request is tried again.
    """

    content: dict[str, Any]
    read: Callable[[bytes], T]


@dataclass(frozen=True)
class Failed:
    """A request that was given up, and why, in one line."""

    reason: str


OptionName = Callable[[str], str]
"""Gives an option the name that messages use, such as the key to type in a recipe."""


@dataclass
class _Batch:
    """The requests of one call, while the server is down."""

    is_skipped: bool = False


class Transport:
    """Posts requests to one address, several at once.

    Counts, for :meth:`take_counts`: each failed try under its cause (``timeout``, ``reset``, ``unreachable``,
    ``status_500`` and the like, ``garbage``, ``wrong_number``, ``too_large``), of which ``retried`` were followed by
    another try and ``gave_up`` were a request's last; ``skipped`` requests were not tried, as the server was down.

    Args:
        url: where requests are posted.
        connection: how patiently.
    """

    def __init__(self, url: str, connection: Connection) -> None:
        self.url = url
        self.connection = connection
        self._jitter = random.Random()  # the global generators belong to the run
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._failed_in_a_row = 0
        self._link: Link | None = None

    def __reduce__(self) -> tuple[type[Transport], tuple[str, Connection]]:
        return Transport, (self.url, self.connection)  # a copy, in another process perhaps, connects for itself

    def check(self, option: OptionName = str) -> list[str]:
        """A wrong address, a missing package or token; asks no server.

        Args:
            option: how messages name an option of the reward.
        """
        missing = NOT_INSTALLED if find_spec("httpx") is None else None
        faults = (missing, address_fault(self.url), self.connection.token_fault())
        return [_naming(option, fault) for fault in faults if fault is not None]

    def ask(self, url: str) -> Answer:
        """Get another address of the same server, trying again where there is none yet.

        Raises:
            RewardError: the server cannot be reached, or does not answer.
            ModuleNotFoundError: httpx is missing.
        """
        link = self._open()
        try:
            answer = link.start(self._ask(link, url)).result()
        except (LinkClosed, CancelledError) as error:
            raise RewardError(f"The question to {url} was given up.") from error
        if isinstance(answer, Fault):
            raise RewardError(f"{url} {answer.reason}. Start the server, or set url to where it listens.")
        return answer

    def send(self, calls: Iterable[Call[T]], option: OptionName = str) -> list[T | Failed]:
        """Post requests, several at once; what they answered, in their order.

        Args:
            calls: the requests.
            option: how messages name an option of the reward.

        Raises:
            RewardOutage: too many requests failed in a row, and ``connection.on_outage`` says stop.
            ModuleNotFoundError: httpx is missing.
        """
        link, batch = self._open(), _Batch()
        closed = Failed(f"{self.url} was not asked: the run is ending")
        futures: list[Future[T | Failed] | None] = []
        try:
            for call in calls:
                work = self._request(link, call, batch)
                try:
                    futures.append(link.start(work))
                except LinkClosed:
                    futures.append(None)
            answers: list[T | Failed] = []
            for future in futures:
                try:
                    answers.append(closed if future is None else future.result())
                except CancelledError:
                    answers.append(closed)
        except BaseException:  # Ctrl-C too: nothing goes on behind the caller's back
            for future in futures:
                if future is not None:
                    future.cancel()
            raise
        if self._is_down and self.connection.on_outage == "stop":
            failed, self._failed_in_a_row = self._failed_in_a_row, 0
            reason = next((answer.reason for answer in answers if isinstance(answer, Failed)), f"{self.url} failed")
            advice = "Look after the server and resume the run"
            if any(f"status {status}" in reason for status in WRONG_PATH):
                address = "the address that it scores at; lightning serve-reward's ends in /score"
                advice = f"Set {option('url')} to {address}"
            raise RewardOutage(
                f"{reason}, and so did {failed} requests in a row. {advice}, or set "
                f"{option('connection.on_outage')}=nan to go on without its scores."
            )
        return answers

    def count(self, cause: str, number: int = 1) -> None:
        """Count something."""
        if number:
            with self._counting:
                self._counts[cause] += number

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
        return dict(sorted(counts.items()))

    def close(self) -> None:
        """Give up what is under way and close the connections; the next request opens them again."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    @property
    def _is_down(self) -> bool:
        return self._failed_in_a_row >= self.connection.give_up_after

    def _open(self) -> Link:
        link = self._link
        if link is None or link.process != os.getpid():
            link = Link(self._client(), self.connection.max_connections)
            weakref.finalize(self, link.close)
            self._link = link
        return link

    def _client(self) -> httpx.AsyncClient:
        for fault in self.check():
            raise ModuleNotFoundError(fault) if fault == NOT_INSTALLED else RewardError(fault)
        import httpx

        connection = self.connection
        headers = {"Accept-Encoding": "identity"}  # a few compressed bytes can become gigabytes
        if connection.token is not None:
            headers["Authorization"] = f"Bearer {connection.token}"
        return httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(connection.timeout_s, connect=connection.connect_timeout_s, pool=None),
            limits=httpx.Limits(
                max_connections=connection.max_connections,
                max_keepalive_connections=connection.max_connections,
                keepalive_expiry=KEEP_ALIVE_S,
            ),
            # a proxy of the environment cannot reach this machine
            trust_env=not is_loopback(urlsplit(self.url).hostname or ""),
        )

    async def _ask(self, link: Link, url: str) -> Answer | Fault:
        connection = self.connection
        patience = min(connection.timeout_s, 2 * connection.connect_timeout_s)
        for number in range(connection.retries + 1):
            try:
                return await attempt(link.client, "GET", url, {}, patience, connection.max_response_bytes)
            except Fault as fault:
                if fault.cause != "unreachable" or number == connection.retries:
                    return fault
            await asyncio.sleep(self._pause_s(number, 0.0))
        raise AssertionError("the last try returns")

    async def _request(self, link: Link, call: Call[T], batch: _Batch) -> T | Failed:
        async with link.slots:  # kept while a retry waits, so that what comes later learns whether the server is down
            if self._is_down:
                async with link.probing:  # one at a time, without retries, until one is answered
                    if self._is_down:
                        return await self._probe(link, call, batch)
            return await self._patiently(link, call, self.connection.retries)

    async def _probe(self, link: Link, call: Call[T], batch: _Batch) -> T | Failed:
        if batch.is_skipped or self.connection.on_outage == "stop":
            self.count("skipped")
            return Failed(f"{self.url} is down and was not asked again")
        answer = await self._patiently(link, call, 0)
        batch.is_skipped = isinstance(answer, Failed)
        return answer

    async def _patiently(self, link: Link, call: Call[T], retries: int) -> T | Failed:
        for number in range(retries + 1):
            try:
                answer = await self._answer(link, call)
            except Fault as fault:
                self.count(fault.cause)
                if not fault.may_pass or number == retries or self._is_down:
                    self.count("gave_up")
                    self._failed_in_a_row += 1
                    tries = f" ({number + 1} tries)" if number else ""
                    return Failed(f"{self.url} {fault.reason}{tries}")
                self.count("retried")
                await asyncio.sleep(self._pause_s(number, fault.retry_after_s))
            else:
                self._failed_in_a_row = 0
                return answer
        raise AssertionError("the last try returns")

    async def _answer(self, link: Link, call: Call[T]) -> T:
        connection = self.connection
        answer = await attempt(
            link.client, "POST", self.url, call.content, connection.timeout_s, connection.max_response_bytes
        )
        if answer.status != 200:
            may_pass = answer.status >= 500 or answer.status in PASSING_STATUS
            reason = f"answered with status {answer.status}" + (f": {answer.detail}" if answer.detail else "")
            raise Fault(f"status_{answer.status}", reason, may_pass, answer.retry_after_s)
        try:
            return call.read(answer.body)
        except WireError as error:
            raise Fault(error.cause, f"answered nonsense: {error}") from error

    def _pause_s(self, number: int, least: float) -> float:
        most = min(LONGEST_PAUSE_S, self.connection.backoff_s * 2**number)
        return min(LONGEST_PAUSE_S, max(least, self._jitter.uniform(0, most)))


def _naming(option: OptionName, fault: str) -> str:
    """A message with its options named for who reads it."""
    return re.sub(r"(?<![\w.])(url(?=[= ])|connection\.\w+)", lambda found: option(found.group()), fault)
