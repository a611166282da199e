"""Scores from servers: retries, outages, and counts of failures by cause."""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import torch
from pydantic import ValidationError
from torch import Tensor

from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.ranges import BatchSize, PositiveInt, Range, checked
from lit_vgrpo.errors import one_line, printable
from lit_vgrpo.rewards.base import Reward, RewardOutage
from lit_vgrpo.rewards.protocol import ProtocolError, ScoreAnswer, score_request, validation_message

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

T = TypeVar("T")
Call = tuple[Callable[[], dict[str, Any]], Callable[[bytes], T]]
"""A POST request. Its first function builds the body, as keyword arguments of httpx, in a thread just before sending;
its second converts the body of a status 200 into the result. A :class:`ProtocolError` of the latter is retried."""
OnOutage = Literal["stop", "nan"]

LONGEST_PAUSE_S = 30.0
RETRIED_STATUS = (408, 425, 429)
"""Statuses below 500 that are retried."""
SHOWN = 300
"""Letters of an error response in messages."""


@checked
@dataclass
class Connection:
    """Timeouts, retries and limits of requests to a server.

    Args:
        timeout_s: seconds for one attempt, from the first byte sent to the last byte read.
        connect_timeout_s: seconds of it for reaching the server.
        retries: attempts after the first; a permanent error such as status 404 is not retried.
        backoff_s: the pause before retry k = 0, 1, ... is drawn from 0 to ``backoff_s * 2**k`` seconds, 30 at most. The
            server's ``Retry-After`` is its minimum, within the same 30.
        max_connections: simultaneous requests, including those waiting for a retry.
        token_env: environment variable that holds the bearer token; no file contains the token itself.
        give_up_after: consecutive failed requests, each after its retries, after which the server counts as down.
        on_outage: ``stop`` ends the run when the server is down; ``nan`` continues with NaN scores and tries the server
            again with the next batch.

    Raises:
        ValueError: a number is outside its range.
    """

    timeout_s: Annotated[float, Range(above=0, most=86_400)] = 60.0
    connect_timeout_s: Annotated[float, Range(above=0, most=86_400)] = 5.0
    retries: Annotated[int, Range(0, 1000)] = 5
    backoff_s: Annotated[float, Range(0, 3_600)] = 0.5
    max_connections: Annotated[int, Range(1, 1000)] = 4
    token_env: str | None = None
    give_up_after: PositiveInt = 4
    on_outage: OnOutage = "stop"

    @property
    def token(self) -> str | None:
        """The bearer token, read from the environment on each access."""
        return None if self.token_env is None else os.environ.get(self.token_env, "").strip()


@dataclass(eq=False)  # exceptions are hashed
class RequestError(Exception):
    """A failed attempt.

    Args:
        cause: its name in the counts.
        reason: one line that continues after the address.
        is_permanent: another attempt cannot help.
        retry_after_s: seconds that the server asks the client to wait.
    """

    cause: str
    reason: str
    is_permanent: bool = False
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class Failed:
    """A request that failed for good, with the reason in one line."""

    reason: str


class RemoteReward(Reward):
    """A reward whose scores come from a server; nothing is asked before the first batch.

    It counts each failed attempt by cause (``timeout``, ``disconnected``, ``unreachable``, ``invalid``, ``status_500``
    and the like), of which ``retried`` were followed by another attempt and ``gave_up`` were a request's last;
    ``skipped`` requests were not sent because the server was down.

    Args:
        url: address to post to.
        connection: timeouts, retries and limits; None for the defaults.
    """

    concurrent = True

    def __init__(self, url: str, connection: Connection | None) -> None:
        self.connection = connection or Connection()
        self._url = url
        self._jitter = random.Random()  # the global generators belong to the run
        self._counts: Counter[str] = Counter()
        self._failed_in_a_row = 0
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def check(self) -> list[str]:
        """Report a missing package or token, without contacting the server."""
        if find_spec("httpx") is None or find_spec("tenacity") is None:
            return ['httpx or tenacity is not installed. Run: pip install "lit-vgrpo[http]"']
        if self.connection.token == "":
            name = self.connection.token_env
            return [f"{self.option('connection.token_env')}={name} is not in the environment. Run: export {name}=..."]
        return []

    def take_counts(self) -> dict[str, int]:
        counts, self._counts = self._counts, Counter()
        return dict(sorted(counts.items()))

    def close(self) -> None:
        """Cancel pending requests; their images get NaN."""
        if self._running is not None:
            loop, task = self._running
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(task.cancel)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_running": None}

    def _post(self, calls: Sequence[Call[T]]) -> list[T | Failed]:
        """Post requests, several at once, and return their results in order.

        Raises:
            RewardOutage: too many requests failed in a row, and ``connection.on_outage`` is stop.
        """
        limit = self.connection.give_up_after
        was_down = self._failed_in_a_row >= limit
        if was_down:  # the next failure counts as an outage again
            self._failed_in_a_row = limit - 1
        try:
            answers = self._run(self._post_all(calls, 0 if was_down else self.connection.retries))
        except asyncio.CancelledError:
            return [Failed(f"{self._url} was not contacted: the run is ending") for _ in calls]
        if self._failed_in_a_row >= limit and self.connection.on_outage == "stop":
            failed, self._failed_in_a_row = self._failed_in_a_row, 0
            reason = next((answer.reason for answer in answers if isinstance(answer, Failed)), f"{self._url} failed")
            raise RewardOutage(
                f"{reason}; {failed} requests in a row failed. Repair the server or {self.option('url')} and resume "
                f"the run, or set {self.option('connection.on_outage')}=nan to continue without its scores."
            )
        return answers

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in a thread, since the caller's may already have an event loop (notebooks do)."""

        async def cancellable() -> T:
            self._running = asyncio.get_running_loop(), cast("asyncio.Task[Any]", asyncio.current_task())
            try:
                return await work
            finally:
                self._running = None

        with ThreadPoolExecutor(1, thread_name_prefix="reward-http") as thread:
            try:
                return thread.submit(asyncio.run, cancellable()).result()
            except KeyboardInterrupt:
                self.close()
                raise

    def _client(self) -> httpx.AsyncClient:
        import httpx

        connection = self.connection
        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {connection.token}"} if connection.token else {},
            timeout=httpx.Timeout(connection.timeout_s, connect=connection.connect_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=connection.max_connections),
            trust_env=not is_loopback(urlsplit(self._url).hostname or ""),  # a proxy cannot reach this machine
        )

    async def _post_all(self, calls: Sequence[Call[T]], retries: int) -> list[T | Failed]:
        slots = asyncio.Semaphore(self.connection.max_connections)
        async with self._client() as client:
            return await asyncio.gather(*(self._post_one(client, slots, call, retries) for call in calls))

    async def _post_one(
        self, client: httpx.AsyncClient, slots: asyncio.Semaphore, call: Call[T], retries: int
    ) -> T | Failed:
        async with slots:  # held while a retry waits, so that later requests know whether the server is down
            if self._failed_in_a_row >= self.connection.give_up_after:
                self._counts["skipped"] += 1
                return Failed(f"{self._url} is down and was not contacted again")
            build, read = call
            content = await asyncio.to_thread(build)
            try:
                answer = await self._with_retries(partial(self._attempt, client, content, read), retries)
            except RequestError as error:
                self._counts["gave_up"] += 1
                self._failed_in_a_row += 1
                return Failed(f"{self._url} {error.reason}")
            self._failed_in_a_row = 0
            return answer

    async def _with_retries(self, attempt: Callable[[], Coroutine[Any, Any, T]], retries: int) -> T:
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        def count(state: RetryCallState) -> None:
            self._counts["retried"] += 1

        retrying = AsyncRetrying(
            stop=stop_after_attempt(retries + 1),
            retry=retry_if_exception(self._may_pass),
            wait=self._pause_s,
            before_sleep=count,
            reraise=True,
        )
        return await retrying(attempt)

    def _may_pass(self, error: BaseException) -> bool:
        is_down = self._failed_in_a_row >= self.connection.give_up_after
        return isinstance(error, RequestError) and not error.is_permanent and not is_down

    def _pause_s(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        least = error.retry_after_s if isinstance(error, RequestError) else 0.0
        most = min(LONGEST_PAUSE_S, self.connection.backoff_s * 2.0 ** (state.attempt_number - 1))
        return min(LONGEST_PAUSE_S, max(least, self._jitter.uniform(0, most)))

    async def _attempt(self, client: httpx.AsyncClient, content: dict[str, Any], read: Callable[[bytes], T]) -> T:
        try:
            answer = await self._exchange(client, content)
            status = answer.status_code
            if status != 200:
                detail = printable(answer.content, SHOWN)
                pause_s = seconds_of(answer.headers.get("retry-after"))
                is_permanent = status < 500 and status not in RETRIED_STATUS
                raise RequestError(f"status_{status}", f"returned status {status}: {detail}", is_permanent, pause_s)
            try:
                return read(answer.content)
            except ProtocolError as error:
                raise RequestError("invalid", f"returned an invalid response: {error}") from error
        except RequestError as error:
            self._counts[error.cause] += 1
            raise

    async def _exchange(self, client: httpx.AsyncClient, content: dict[str, Any]) -> httpx.Response:
        import httpx

        timeout_s = self.connection.timeout_s
        try:
            # a limit on the whole exchange: a server that trickles bytes never exceeds the one on a read
            return await asyncio.wait_for(client.post(self._url, **content), timeout_s)
        except (asyncio.TimeoutError, httpx.TimeoutException) as error:
            seconds = self.connection.connect_timeout_s if isinstance(error, httpx.ConnectTimeout) else timeout_s
            raise RequestError("timeout", f"did not respond within {seconds:g} s") from error
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.DecodingError) as error:
            raise RequestError("disconnected", f"broke off its response ({one_line(error)})") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = one_line(error) or type(error).__name__
            raise RequestError("unreachable", f"cannot be reached ({reason})") from error


@checked
class HTTPReward(RemoteReward):
    """Scores from a server that speaks the protocol of :mod:`lit_vgrpo.rewards.protocol`.

    An image that the server cannot score, or whose request failed after all retries, gets NaN.

    Args:
        url: address to post to, such as ``http://127.0.0.1:8000/score``.
        name: key of the score.
        batch_size: images per request.
        connection: timeouts, retries, simultaneous requests, the token, and the reaction to an outage.
    """

    def __init__(
        self, url: str, name: str = "http", batch_size: BatchSize = 8, connection: Connection | None = None
    ) -> None:
        super().__init__(url, connection)
        self.url = url
        self.name = name
        self.batch_size = batch_size

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        """Return why JSON cannot represent the row, or None."""
        try:
            score_request(torch.zeros(1, 3, 1, 1, dtype=torch.uint8), [prompt], [row])
        except ValueError as error:
            return f'The row of the prompt "{prompt}" cannot be sent as JSON: {one_line(error)}.'
        return None

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.failure = None
        pixels = to_uint8(images).cpu()
        slices = [slice(start, start + self.batch_size) for start in range(0, len(prompts), self.batch_size)]
        parts = [(pixels[part], prompts[part], rows[part]) for part in slices]
        answers = self._post([(partial(_content, *part), partial(_read, count=len(part[1]))) for part in parts])
        scores: list[float] = []
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, Failed):
                scores += [math.nan] * len(part[1])
                self.failure = answer.reason
                continue
            scores += [math.nan if score is None else score for score in answer.scores]
            reasons = [
                one_line(reason or "the server gave no score and no reason")[:SHOWN]
                for score, reason in zip(answer.scores, answer.errors, strict=True)
                if score is None
            ]
            self.failure = reasons[-1] if reasons else self.failure
        return torch.tensor(scores, dtype=torch.float32)


def _content(pixels: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": score_request(pixels, prompts, rows), "headers": {"Content-Type": "application/json"}}


def _read(body: bytes, count: int) -> ScoreAnswer:
    try:
        answer = ScoreAnswer.model_validate_json(body)
    except ValidationError as error:
        raise ProtocolError(validation_message(error)) from error
    if len(answer.scores) != count:
        raise ProtocolError(f"{len(answer.scores)} scores for {count} images")
    return answer


def seconds_of(retry_after: str | None) -> float:
    """Return ``Retry-After`` in seconds; 0 where it is missing, a date or unreadable."""
    try:
        seconds = float(retry_after or 0)
    except ValueError:
        return 0.0
    return seconds if seconds > 0 else 0.0


def is_loopback(host: str) -> bool:
    """Return True for a host that is this machine itself."""
    return host in ("localhost", "::1") or host.startswith("127.")
