"""Settings of the connection between a reward and its server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from lit_vgrpo.core.ranges import PositiveInt, Range, checked

OnOutage = Literal["stop", "nan"]


@checked
@dataclass
class Connection:
    """Timeouts, retries and limits of requests to a server.

    Args:
        timeout_s: seconds for one try, from the first byte sent to the last byte read.
        connect_timeout_s: seconds of it for reaching the server.
        retries: tries after the first; a permanent error such as status 404 is not retried.
        backoff_s: the pause before retry k = 0, 1, ... is drawn from 0 to ``backoff_s * 2**k`` seconds, 30 at most. A
            ``Retry-After`` of the server is its minimum, within the same 30.
        max_connections: simultaneous requests, including those waiting for a retry.
        token_env: environment variable that holds the bearer token; no file contains the token itself.
        max_response_bytes: longest answer that is read.
        give_up_after: consecutive failed requests, each after its retries, after which the server counts as down.
        on_outage: ``stop`` ends the run when the server is down; ``nan`` continues with NaN scores and asks the server
            once per batch until it answers.

    Raises:
        ValueError: a number is outside its range.
    """

    timeout_s: Annotated[float, Range(above=0, most=86_400, example=60)] = 60.0
    connect_timeout_s: Annotated[float, Range(above=0, most=86_400, example=5)] = 5.0
    retries: Annotated[int, Range(0, 1000, example=5)] = 5
    backoff_s: Annotated[float, Range(0, 3_600)] = 0.5
    max_connections: Annotated[int, Range(1, 1000, example=4)] = 4
    token_env: str | None = None
    max_response_bytes: PositiveInt = 1_000_000
    give_up_after: PositiveInt = 4
    on_outage: OnOutage = "stop"

    @property
    def token(self) -> str | None:
        """The bearer token, read from the environment on each access."""
        return None if self.token_env is None else os.environ.get(self.token_env, "").strip()

    def token_error(self) -> str | None:
        """Return why the token cannot be sent, or None; never shows the token."""
        if self.token_env is None or self.token is None:
            return None
        if not self.token:
            return f"connection.token_env={self.token_env} is not in the environment. Run: export {self.token_env}=..."
        if not all("!" <= letter <= "~" for letter in self.token):
            return f"connection.token_env={self.token_env} is not a valid token: it has spaces or non-ASCII characters."
        return None


def address_error(url: str) -> str | None:
    """Return why an address cannot be used, or None."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"url={url} is not an address ({error}). Write http://host:8000/score."
    if parts.username is not None or parts.password is not None:
        return "url contains a user name or password, which would be saved to files. Use connection.token_env."
    if parts.scheme not in ("http", "https") or not host:
        return f"url={url} is not a web address. Write http://host:8000/score."
    return None


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine itself."""
    return host in ("localhost", "::1") or host.startswith("127.")
