"""One request, tried once: what came back, or what went wrong."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any

from lit_vgrpo.errors import one_line, printable

if TYPE_CHECKING:
    import httpx

_SHOWN_DETAIL = 300


@dataclass(eq=False)  # exceptions are hashed
class Fault(Exception):
    """A try that failed.

    Args:
        cause: what it is counted as.
        reason: what the server did, in one line that goes on from its address.
        may_pass: another try may help.
        retry_after_s: how long the server asks to be left alone.
    """

    cause: str
    reason: str
    may_pass: bool = True
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class Answer:
    """What a server said, of any status.

    Args:
        body: cut where the status is not 200 and it is too long.
        retry_after_s: how long the server asks to be left alone.
    """

    status: int
    body: bytes
    retry_after_s: float

    @property
    def detail(self) -> str:
        """The beginning of the body, safe to print."""
        return printable(self.body, _SHOWN_DETAIL)


async def attempt(
    client: httpx.AsyncClient, method: str, url: str, content: dict[str, Any], timeout_s: float, max_bytes: int
) -> Answer:
    """Send a request and read its answer.

    Args:
        content: the body, in the words of httpx.
        timeout_s: for the whole of it.
        max_bytes: a longer answer is not read to its end.

    Raises:
        Fault: there is no answer, or too long a one.
    """
    import httpx

    try:
        # a limit on the whole, since a server that sends a byte now and then never exceeds that of one read
        return await asyncio.wait_for(_exchange(client, method, url, content, max_bytes), timeout_s)
    except httpx.ConnectTimeout as error:
        raise Fault("timeout", f"could not be reached within {client.timeout.connect:g} s") from error
    except (asyncio.TimeoutError, httpx.TimeoutException) as error:
        raise Fault("timeout", f"gave no answer within {timeout_s:g} s") from error
    except httpx.ConnectError as error:
        raise Fault("unreachable", f"cannot be reached ({one_line(error) or type(error).__name__})") from error
    except httpx.NetworkError as error:
        raise Fault("reset", "closed the connection before the whole answer was there") from error
    except httpx.ProtocolError as error:
        # one class for a connection that is closed too early and for an answer that is no HTTP
        if "disconnect" in str(error) or "closed" in str(error):
            raise Fault("reset", "closed the connection before the whole answer was there") from error
        raise Fault("garbage", f"answered something that is not HTTP ({one_line(error)})") from error
    except httpx.HTTPError as error:
        raise Fault("unreachable", f"cannot be reached ({one_line(error)})") from error


async def _exchange(
    client: httpx.AsyncClient, method: str, url: str, content: dict[str, Any], max_bytes: int
) -> Answer:
    async with client.stream(method, url, **content) as response:
        body = b""
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > max_bytes:
                if response.status_code == 200:
                    raise Fault("too_large", f"answered more than {max_bytes} bytes")
                break
        return Answer(response.status_code, body, seconds_of(response.headers.get("retry-after")))


def seconds_of(retry_after: str | None) -> float:
    """``Retry-After``, a number or a date, as seconds from now; 0 where it says nothing."""
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
