"""Scores from servers: the messages, retries, outages, and counts of failures by cause.

``HTTPReward`` and ``lightning serve-reward`` exchange JSON with lossless images. Nothing that arrives is executed or
unpickled.
"""

from __future__ import annotations

import asyncio
import base64
import math
import random
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import torch
from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from lit_vgrpo.core.pictures import PICTURE, several_pictures_error
from lit_vgrpo.core.pixels import encode_png, to_uint8
from lit_vgrpo.core.ranges import BatchSize, checked
from lit_vgrpo.errors import one_line, printable
from lit_vgrpo.rewards.base import Reward, RewardOutage
from lit_vgrpo.rewards.combine import ROW_FIELD
from lit_vgrpo.rewards.connection import Connection
from lit_vgrpo.rewards.servers import LONGEST_PAUSE_S, RequestError, Server, Servers

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

T = TypeVar("T")
Call = tuple[Callable[[], dict[str, Any]], Callable[[bytes], T]]
"""A POST request. Its first function builds the body, as keyword arguments of httpx, in a thread just before sending;
its second converts the body of a status 200 into the result. A ``ValueError`` of the latter is retried."""

CONNECT_TIMEOUT_S = 5.0
RETRIED_STATUS = (408, 425, 429)
"""Statuses below 500 that are retried."""
SHOWN = 300
"""Letters of an error response in messages."""
LARGEST_ANSWER = 10_000_000
"""Bytes of an answer; the rest is not read."""
SENDS_SPACES = "X-Sends-Spaces"
"""Header of an answer that starts with spaces, one each time the server has scored others while the request waits."""
LATE_STATUS = re.compile(rb' *\{"status": (\d{3}),')
"""Start of the body, if an error came after the spaces."""
CALLS_AT_ONCE = 64
"""Batches of images that are scored at once, within the connections that are allowed."""


class ScoreRequest(BaseModel):
    """Images to score, and the pictures that their prompts edit, or none: PNG files in base64.

    By default the rows hold only the prompts. Paths of pictures are removed from them: they name files of the client,
    and a server that read them would open any of its files that a stranger names.
    """

    model_config = ConfigDict(strict=True, ser_json_inf_nan="constants")

    version: Literal[1] = 1
    images: list[Annotated[Base64Bytes, Field(strict=False)]]
    prompts: list[str]
    rows: list[dict[str, Any]] = []
    pictures: list[Annotated[Base64Bytes, Field(strict=False)]] = []

    @model_validator(mode="after")
    def _check_lengths(self) -> ScoreRequest:
        rows = self.rows or [{"prompt": prompt} for prompt in self.prompts]
        self.rows = [{name: value for name, value in row.items() if name != PICTURE} for row in rows]
        if not 0 < len(self.images) == len(self.prompts) == len(self.rows):
            numbers = f"{len(self.images)} images, {len(self.prompts)} prompts and {len(self.rows)} rows"
            raise ValueError(f"{numbers}: send one prompt and one row per image, and at least one")
        if len(self.pictures) not in (0, len(self.images)):
            raise ValueError(
                f"{len(self.pictures)} pictures for {len(self.images)} images: send one per image, or none"
            )
        for number, named in enumerate(row.get(ROW_FIELD) or () for row in self.rows):
            if not isinstance(named, str | list | tuple) or not all(isinstance(name, str) for name in named):
                raise ValueError(f"rows.{number}.{ROW_FIELD}: send the names of rewards, not {named!r:.40}")
        return self


class ScoreAnswer(BaseModel):
    """The scores of a request."""

    model_config = ConfigDict(strict=True)

    version: Literal[1] = 1
    scores: list[float | None]  # one per image; null if it could not be scored, never 0
    errors: list[str | None] = []  # for each image why it was not scored, whatever its score; may be left out


def validation_message(error: ValidationError) -> str:
    """Return the first error of pydantic in one line, without the input."""
    first = error.errors(include_url=False, include_context=False)[0]
    text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return one_line(text.removeprefix(": ").removeprefix("Value error, "))[:SHOWN]


def score_request(
    images: Tensor, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]], pictures: Iterable[Tensor] = ()
) -> bytes:
    """Return a request as JSON, of images ``(B, 3, H, W)`` and the B pictures that the prompts edit, or none, in uint8.

    In rows, NaN and infinity arrive as they are, dates as text, and tuples and sets as lists. A value of another type
    that JSON does not have is a ValueError.
    """
    files, sources = ([base64.b64encode(encode_png(image)) for image in of] for of in (images, pictures))
    request = ScoreRequest(images=files, prompts=list(prompts), rows=[*map(dict, rows)], pictures=sources)
    return request.model_dump_json(exclude=None if sources else {"pictures"}).encode()


@cache
def _portal() -> Any:
    """Return the event loop of all remote rewards, in a thread that lives while any of them is called."""
    from anyio.from_thread import BlockingPortalProvider

    return BlockingPortalProvider()


_LOCK = threading.Lock()


class RemoteReward(Reward):
    """A reward whose scores come from a server, or from several equal ones; nothing is asked before the first batch.

    It counts each failed attempt by cause (``timeout``, ``unreachable``, ``invalid``, ``status_500`` and the like), of
    which ``retried`` were followed by another attempt and ``gave_up`` were a request's last; ``skipped`` requests were
    not sent because the server was down. The address is ``url`` with the ``path`` added. With a list of them, it also
    counts requests that were ``late``, and ``HOST:PORT/requests``, ``/seconds`` and ``/failures``.
    """

    concurrent = True
    calls_at_once = CALLS_AT_ONCE
    loads_nothing = False

    def __init__(self, url: str | list[str], connection: Connection | None, path: str = "") -> None:
        self.connection = connection or Connection()
        self.url = url
        self._servers = Servers(url, path, self.connection)
        self._jitter = random.Random()  # the global generators belong to the run
        self._counts: dict[str, float] = {}
        self._failed_in_a_row = 0
        self._calls: list[Future[Any]] = []
        self._slots: asyncio.Semaphore | None = None  # of all calls under way

    def check(self) -> list[str]:
        """Report a missing package, and what makes requests impossible, without contacting a server."""
        if find_spec("httpx") is None or find_spec("tenacity") is None:
            return ['httpx or tenacity is not installed. Run: pip install "lit-vgrpo[http]"']
        try:
            for url in self._servers.urls:
                self.connection.client_options(url, self.option)
        except ValueError as error:
            return [str(error)]
        return []

    def take_counts(self) -> dict[str, float]:
        with _LOCK:
            counts, self._counts = self._counts, {}
        return dict(sorted(counts.items()))

    def close(self) -> None:
        """Cancel pending requests; their images get NaN."""
        for call in [*self._calls]:
            call.cancel()

    def _count(self, event: str, number: float = 1) -> None:
        with _LOCK:
            self._counts[event] = self._counts.get(event, 0) + number

    @property
    def _is_down(self) -> bool:
        return self._failed_in_a_row >= self.connection.give_up_after

    def _post(self, calls: Sequence[Call[T]]) -> list[T | RequestError]:
        """Post requests, several at once; return their results or last errors in order, or raise RewardOutage."""
        with _LOCK:
            if not self._calls:
                self._servers.find(self.option)
            portal = _portal()
        with portal as loop:  # the caller's thread may run an event loop
            call = loop.start_task_soon(self._post_all, calls)
            self._calls.append(call)
            try:
                answers: list[T | RequestError] = call.result()
            except CancelledError:
                reason = f"{self._servers.all[0].shown} was not contacted: the run is ending"
                return [RequestError(reason) for _ in calls]
            except KeyboardInterrupt:
                self.close()
                raise
            finally:
                self._calls.remove(call)
                self._slots = self._slots if self._calls else None  # the next call may have another event loop
        failed = [answer for answer in answers if isinstance(answer, RequestError)]
        if self._is_down and failed:
            number = self._failed_in_a_row
            self._failed_in_a_row = number if self._calls else 0  # the calls under way must end too
            advice = f"Fix the server or {self.option('url')}, and resume the run."
            raise RewardOutage(f"{failed[0].reason}; {number} requests in a row failed. {advice}")
        return answers

    async def _post_all(self, calls: Sequence[Call[T]]) -> list[T | RequestError]:
        most = self.connection.max_connections * len(self._servers.all)
        slots = self._slots = self._slots or asyncio.Semaphore(most)
        clients: dict[Server, httpx.AsyncClient] = {}
        try:
            return await asyncio.gather(*(self._post_one(clients, slots, call) for call in calls))
        finally:
            for client in clients.values():
                await client.aclose()

    async def _post_one(
        self, clients: dict[Server, httpx.AsyncClient], slots: asyncio.Semaphore, call: Call[T]
    ) -> T | RequestError:
        from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt

        build, read = call
        errors: list[RequestError] = []
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self.connection.retries + 1),
            retry=retry_if_exception(partial(self._is_retried, errors)),
            wait=self._pause_s,
            before_sleep=lambda _: self._count("retried"),
            reraise=True,
        )
        async with slots:  # held while a retry waits, so that later requests know whether the server is down
            if self._is_down:
                self._count("skipped")
                return RequestError(f"{self._servers.all[0].shown} is down and was not contacted again")
            try:
                answer: T = await retrying(self._attempt, clients, await asyncio.to_thread(build), read, errors)
            except RequestError as error:
                self._count("gave_up")
                self._failed_in_a_row += 1
                return error
            self._failed_in_a_row = 0
            return answer

    def _is_retried(self, earlier: list[RequestError], error: BaseException) -> bool:
        if not isinstance(error, RequestError) or self._is_down:
            return False
        is_new = not any(one.is_permanent for one in earlier)
        earlier.append(error)
        return not error.is_permanent or (is_new and self._servers.has_other(error.server))

    def _pause_s(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        if isinstance(error, RequestError) and self._servers.has_other(error.server):
            return 0.0
        least = error.retry_after_s if isinstance(error, RequestError) else 0.0
        most = min(LONGEST_PAUSE_S, self.connection.backoff_s * 2.0 ** (state.attempt_number - 1))
        return min(LONGEST_PAUSE_S, max(least, self._jitter.uniform(0, most)))

    async def _attempt(
        self,
        clients: dict[Server, httpx.AsyncClient],
        content: dict[str, Any],
        read: Callable[[bytes], T],
        earlier: list[RequestError],
    ) -> T:
        import httpx

        timeout_s, body = self.connection.timeout_s, bytearray()
        async with self._servers.lease(earlier, self._count) as attempt:
            server = attempt.server
            if server not in clients:
                timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
                limits = httpx.Limits(max_connections=self.connection.max_connections)
                clients[server] = httpx.AsyncClient(timeout=timeout, limits=limits, **server.options)
            post = partial(clients[server].stream, "POST", server.url, extensions=server.extensions, **content)
            try:
                # a limit on the whole exchange: a server that trickles bytes never exceeds the one on a read
                async with attempt.limit, post() as answer:
                    sends_spaces = SENDS_SPACES in answer.headers
                    async for block in answer.aiter_bytes():
                        body += block
                        if sends_spaces and attempt.limit_s == timeout_s and body.isspace():  # others are scored first
                            body.clear()
                            attempt.limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
                        if len(body) > LARGEST_ANSWER:
                            raise ValueError(f"it is larger than {LARGEST_ANSWER // 10**6} MB")
                late = LATE_STATUS.match(body) if sends_spaces else None
                status = answer.status_code if late is None else int(late[1])
                if status == 200:
                    return read(bytes(body))
            except (TimeoutError, httpx.TimeoutException) as error:
                is_late = isinstance(error, TimeoutError) and attempt.limit_s < timeout_s
                reason = f"did not respond within {attempt.limit_s:.4g} s"
                failure = self._counted(server, "late" if is_late else "timeout", reason)
                failure.is_late = is_late
                raise failure from error
            except httpx.HTTPError as error:
                reason = one_line(error) or type(error).__name__
                raise self._counted(server, "unreachable", f"cannot be reached ({reason})") from error
            except ValueError as error:
                reason = validation_message(error) if isinstance(error, ValidationError) else one_line(error)
                raise self._counted(server, "invalid", f"returned an invalid response: {reason}") from error
            pause, text = answer.headers.get("retry-after", ""), printable(bytes(body), SHOWN)
            failure = self._counted(server, f"status_{status}", f"returned status {status}: {text}")
            failure.is_permanent = status < 500 and status not in RETRIED_STATUS
            failure.retry_after_s = float(pause) if pause.isdecimal() else 0.0  # it may be a date
            raise failure

    def _counted(self, server: Server, cause: str, reason: str) -> RequestError:
        self._count(cause)
        return RequestError(f"{server.shown} {reason}")


@checked
class HTTPReward(RemoteReward):
    """Scores from a server that takes a :class:`ScoreRequest` and returns a :class:`ScoreAnswer`.

    An image that the server cannot score, or whose request failed after all retries, gets NaN.

    Args:
        url: Address to post to, such as ``http://127.0.0.1:8000/score``, or a list of addresses of equal servers.
        name: Key of the score.
        batch_size: Images per request.
        connection: Timeouts, retries, simultaneous requests, and the token.
        send_pictures: Send the picture that each prompt edits, for a reward that needs it. A prompt with several is
            refused.
    """

    def __init__(
        self,
        url: str | list[str],
        name: str = "http",
        batch_size: BatchSize = 8,
        connection: Connection | None = None,
        send_pictures: bool = False,
    ) -> None:
        super().__init__(url, connection)
        self.name = name
        self.batch_size = batch_size
        self.send_pictures = send_pictures

    @property
    def takes_references(self) -> bool:
        return self.send_pictures

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        return several_pictures_error(prompt, row) if self.send_pictures else None

    def __call__(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        self.failure = self.failure if self._calls else None  # other calls may not have read it
        pixels, sources = (to_uint8(of).cpu() for of in (images, images[:0] if references is None else references))
        slices = [slice(start, start + self.batch_size) for start in range(0, len(prompts), self.batch_size)]
        parts = [(pixels[part], prompts[part], rows[part], sources[part]) for part in slices]
        answers = self._post([(partial(_content, *part), partial(_read, count=len(part[1]))) for part in parts])
        scores: list[float] = []
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, RequestError):
                scores += [math.nan] * len(part[1])
                self.failure = answer.reason
                continue
            errors = answer.errors or [None] * len(answer.scores)
            pairs = zip(answer.scores, errors, strict=True)
            scores += [math.nan if score is None or error else score for score, error in pairs]
            reasons = [*filter(None, errors)]
            self.failure = reasons[-1][:SHOWN] if reasons else self.failure
        return torch.tensor(scores, dtype=torch.float32)


def _content(*parts: Any) -> dict[str, Any]:
    return {"content": score_request(*parts), "headers": {"Content-Type": "application/json"}}


def _read(body: bytes, count: int) -> ScoreAnswer:
    answer = ScoreAnswer.model_validate_json(body)
    if len(answer.scores) != count or len(answer.errors) not in (0, count):
        raise ValueError(f"{len(answer.scores)} scores and {len(answer.errors)} errors for {count} images")
    return answer
