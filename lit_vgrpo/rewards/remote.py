"""Rewards from unreliable servers: retries, outages, and counts of failures by cause."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from lit_vgrpo.rewards.base import Reward, RewardError, RewardOutage
from lit_vgrpo.rewards.connection import Connection, address_error
from lit_vgrpo.rewards.link import Answer, Link, LinkClosed, RequestError
from lit_vgrpo.rewards.protocol import ProtocolError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
OptionName = Callable[[str], str]
"""Returns the name of an option in messages, such as the key to type in a recipe."""

NOT_INSTALLED = 'httpx is not installed. Run: pip install "lit-vgrpo[http]"'
LONGEST_PAUSE_S = 30.0
WRONG_PATH = (404, 405)
"""Statuses of an address that accepts no POST requests."""
PASSING_STATUS = (408, 425, 429)
"""Statuses below 500 that are retried."""


@dataclass(frozen=True)
class Call(Generic[T_co]):
    """A request.

    Args:
        content: builds the body, as keyword arguments of httpx; called in a worker thread just before sending.
        read: converts the body of a status 200 into the result; a :class:`ProtocolError` is retried.
    """

    content: Callable[[], dict[str, Any]]
    read: Callable[[bytes], T_co]


@dataclass(frozen=True)
class Failed:
    """A request that failed for good, with the reason in one line."""

    reason: str


@dataclass
class _Batch:
    """The requests of one call; the rest is skipped once one finds the server still down."""

    is_skipped: bool = False


class Transport:
    """Sender of concurrent POST requests to one address.

    Counts, for :meth:`take_counts`: each failed attempt by cause (``timeout``, ``reset``, ``unreachable``,
    ``status_500`` and the like, ``garbage``, ``wrong_number``, ``too_large``), of which ``retried`` were followed by
    another attempt and ``gave_up`` were a request's last; ``skipped`` requests were not sent because the server was
    down.

    Args:
        url: address to post to.
        connection: timeouts, retries and limits.
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
        return Transport, (self.url, self.connection)  # a copy, perhaps in another process, opens its own connections

    def check(self, option: OptionName = str) -> list[str]:
        """Return errors in the address, packages and token, without contacting the server.

        Args:
            option: returns an option's name for messages.
        """
        missing = NOT_INSTALLED if find_spec("httpx") is None else None
        errors = (missing, address_error(self.url), self.connection.token_error())
        return [_naming(option, error) for error in errors if error is not None]

    def ask(self, url: str, option: OptionName = str) -> Answer:
        """GET another address of the same server, retrying while it cannot be reached.

        Raises:
            RewardError: the server cannot be reached, does not answer or refuses the token.
            ModuleNotFoundError: httpx is missing.
        """
        link, connection = self._open(), self.connection
        patience = min(connection.timeout_s, 2 * connection.connect_timeout_s)
        for number in range(connection.retries + 1):
            try:
                if number:
                    link.run(asyncio.sleep(self._pause_s(number - 1, 0.0)))
                answer = link.run(link.attempt("GET", url, {}, patience))
                break
            except LinkClosed as error:
                raise RewardError(f"The request to {url} was cancelled.") from error
            except RequestError as failure:
                if failure.cause != "unreachable" or number == connection.retries:
                    advice = "Start the server, or set url to where it listens."
                    raise RewardError(f"{url} {failure.reason}. {advice}") from failure
        if answer.status in (401, 403):
            variable = f"{option('connection.token_env')} to a variable that holds its token"
            raise RewardError(f"{url} answered with status {answer.status}. Set {variable}.")
        return answer

    def send(self, calls: Iterable[Call[T]], option: OptionName = str) -> list[T | Failed]:
        """Post requests, several at once, and return their results in order.

        Args:
            calls: the requests.
            option: returns an option's name for messages.

        Raises:
            RewardOutage: too many requests failed in a row, and ``connection.on_outage`` is stop.
            ModuleNotFoundError: httpx is missing.
        """
        link, posted = self._open(), list(calls)
        try:
            answers = link.run(self._send(link, posted))
        except LinkClosed:
            return [Failed(f"{self.url} was not contacted: the run is ending") for _ in posted]
        if self._is_down and self.connection.on_outage == "stop":
            failed, self._failed_in_a_row = self._failed_in_a_row, 0
            reason = next((answer.reason for answer in answers if isinstance(answer, Failed)), f"{self.url} failed")
            advice = "Repair the server and resume the run"
            if any(f"status {status}" in reason for status in WRONG_PATH):
                address = "its scoring address, which for lightning serve-reward ends in /score"
                advice = f"Set {option('url')} to {address}"
            raise RewardOutage(
                f"{reason}, and so did {failed} requests in a row. {advice}, or set "
                f"{option('connection.on_outage')}=nan to continue without its scores."
            )
        return answers

    def count(self, cause: str, number: int = 1) -> None:
        """Count an event."""
        if number:
            with self._counting:
                self._counts[cause] += number

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
        return dict(sorted(counts.items()))

    def close(self) -> None:
        """Cancel pending requests and close the connections; the next request reopens them."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    @property
    def _is_down(self) -> bool:
        return self._failed_in_a_row >= self.connection.give_up_after

    def _open(self) -> Link:
        link = self._link
        if link is None or link.process != os.getpid():
            for error in self.check():
                raise ModuleNotFoundError(error) if error == NOT_INSTALLED else RewardError(error)
            self._link = link = Link(self.url, self.connection)
            weakref.finalize(self, link.close)
        return link

    async def _send(self, link: Link, calls: list[Call[T]]) -> list[T | Failed]:
        batch = _Batch()
        tasks = [asyncio.create_task(self._request(link, call, batch)) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:  # the content of a request cannot be built
            for task in tasks:
                task.cancel()
            raise

    async def _request(self, link: Link, call: Call[T], batch: _Batch) -> T | Failed:
        async with link.slots:  # held while a retry waits, so that later requests know whether the server is down
            if self._is_down:
                async with link.probing:  # one at a time, without retries, until one is answered
                    if self._is_down and (batch.is_skipped or self.connection.on_outage == "stop"):
                        self.count("skipped")
                        return Failed(f"{self.url} is down and was not contacted again")
                    if self._is_down:
                        answer = await self._post(link, call, 0)
                        batch.is_skipped = isinstance(answer, Failed)
                        return answer
            return await self._post(link, call, self.connection.retries)

    async def _post(self, link: Link, call: Call[T], retries: int) -> T | Failed:
        content = await asyncio.to_thread(call.content)
        for number in range(retries + 1):
            try:
                answer = await self._try(link, content, call.read)
            except RequestError as error:
                self.count(error.cause)
                if not error.may_pass or number == retries or self._is_down:
                    self.count("gave_up")
                    self._failed_in_a_row += 1
                    tries = f" ({number + 1} tries)" if number else ""
                    return Failed(f"{self.url} {error.reason}{tries}")
                self.count("retried")
                await asyncio.sleep(self._pause_s(number, error.retry_after_s))
            else:
                self._failed_in_a_row = 0
                return answer
        raise AssertionError("the last try returns")

    async def _try(self, link: Link, content: dict[str, Any], read: Callable[[bytes], T]) -> T:
        answer = await link.attempt("POST", self.url, content, self.connection.timeout_s)
        if answer.status != 200:
            may_pass = answer.status >= 500 or answer.status in PASSING_STATUS
            reason = f"answered with status {answer.status}" + (f": {answer.detail}" if answer.detail else "")
            raise RequestError(f"status_{answer.status}", reason, may_pass, answer.retry_after_s)
        try:
            return read(answer.body)
        except ProtocolError as error:
            raise RequestError(error.cause, f"answered nonsense: {error}") from error

    def _pause_s(self, number: int, least: float) -> float:
        most = min(LONGEST_PAUSE_S, self.connection.backoff_s * 2**number)
        return min(LONGEST_PAUSE_S, max(least, self._jitter.uniform(0, most)))


class RemoteReward(Reward):
    """A reward whose scores come from a server.

    Args:
        url: address to post to.
        connection: timeouts, retries and limits; None for the defaults.
    """

    concurrent = True

    def __init__(self, url: str, connection: Connection | None) -> None:
        self._transport = Transport(url, connection or Connection())
        self._is_loaded = False

    def check(self) -> list[str]:
        """Return errors in the address, packages and token, without contacting the server."""
        return self._transport.check(self.option)

    def load(self) -> None:
        """Check once that the server is the right one.

        Raises:
            RewardError: it cannot be reached, refuses the token or is not the right one.
        """
        if not self._is_loaded:
            self._check_server()
            self._is_loaded = True

    @abstractmethod
    def _check_server(self) -> None:
        """Check that the server is the right one, or raise :class:`RewardError`."""

    def take_counts(self) -> dict[str, int]:
        return self._transport.take_counts()

    def close(self) -> None:
        self._transport.close()


def _naming(option: OptionName, error: str) -> str:
    """Replace option names in a message by the names the reader types."""
    return re.sub(r"(?<![\w.])(url(?=[= ])|connection\.\w+)", lambda found: option(found.group()), error)
