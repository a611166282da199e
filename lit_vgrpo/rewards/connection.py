"""The way to a server: its address, and the token, proxy and certificates of the environment, checked before httpx."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Annotated, Any
from urllib.request import getproxies

from lit_vgrpo.core.ranges import PositiveInt, Range, checked
from lit_vgrpo.errors import HIDDEN, PASSWORD_IN_ADDRESS, one_line

if TYPE_CHECKING:
    import httpx

SOCKS = ("socks5", "socks5h")
HOST = re.compile(r"[\w.:-]+")


@checked
@dataclass
class Connection:
    """Timeouts, retries and limits of requests to a server.

    Args:
        timeout_s: Seconds for one attempt, from the first byte sent to the last byte read. It starts again whenever
            ``lightning serve-reward`` has scored other requests first. For other servers, set it above ranks x
            ``max_connections`` x seconds per batch.
        retries: Attempts after the first; a permanent error such as status 404 is not retried.
        backoff_s: The pause before retry k = 0, 1, ... is drawn from 0 to ``backoff_s * 2**k`` seconds, 30 at most. The
            server's ``Retry-After`` is its minimum, within the same 30.
        max_connections: Simultaneous requests to each server, including those waiting for a retry.
        token_env: Environment variable that holds the bearer token; no file contains the token itself.
        give_up_after: Consecutive failed requests, each after its retries, after which the server counts as down and
            the run ends.
    """

    timeout_s: Annotated[float, Range(above=0, most=86_400)] = 60.0
    retries: Annotated[int, Range(0, 1000)] = 5
    backoff_s: Annotated[float, Range(0, 3_600)] = 0.5
    max_connections: Annotated[int, Range(1, 1000)] = 4
    token_env: str | None = None
    give_up_after: PositiveInt = 4

    def client_options(self, url: str, option: Callable[[str], str]) -> dict[str, Any]:
        """Return httpx's options for requests to a server, with all that httpx would take from the environment.

        A wrong address or variable of the environment is a ValueError; ``option`` returns an option's name for it.
        """
        import httpx

        headers = {"Accept-Encoding": "identity"}
        if self.token_env is not None:
            token = os.environ.get(self.token_env, "").strip()
            if not (token and token.isascii() and token.isprintable()):
                name = f"{option('connection.token_env')}={self.token_env}"
                raise ValueError(f"{name} is not in the environment, or is no token. Run: export {self.token_env}=...")
            headers["Authorization"] = f"Bearer {token}"
        options = {"headers": headers, "proxy": proxy_of(_checked(url, option("url"))), "trust_env": False}
        try:
            return {**options, "verify": httpx.create_ssl_context()}
        except OSError as error:
            file = os.environ.get("SSL_CERT_FILE")
            raise ValueError(f"SSL_CERT_FILE={file} cannot be read as certificates: {one_line(error)}.") from error


def shown_address(address: str) -> str:
    """Return an address for messages, without its user, password and query, which may be secret.

    >>> shown_address("http://me:key@host:80/score?key=1")
    'http://(hidden)@host:80/score?(hidden)'
    """
    start, mark, _ = PASSWORD_IN_ADDRESS.sub(rf"\g<1>{HIDDEN}@", address).partition("?")
    return f"{start}?{HIDDEN}" if mark else start


def is_loopback(host: str) -> bool:
    """Return True for a host that is this machine itself."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _checked(address: str, name: str, *more_schemes: str) -> httpx.URL:
    """Return a parsed address; raise ValueError, naming its option or variable, if nothing can be sent to it."""
    import httpx

    with suppress(httpx.InvalidURL):  # its text may quote a part of a password
        url = httpx.URL(address)
        is_known = url.scheme in ("http", "https", *more_schemes) and HOST.fullmatch(url.host)
        if is_known and len(address.split()) == 1 and 0 < (80 if url.port is None else url.port) < 2**16:
            return url
    shown = HIDDEN if "@" in PASSWORD_IN_ADDRESS.sub("", address) else shown_address(address)
    raise ValueError(f"{name}={shown} is no address of a server. Write http://HOST:PORT, with a port from 1 to 65535.")


def proxy_of(url: httpx.URL) -> str | None:
    """Return the proxy for an address, or None.

    The variables are those of curl: http_proxy, https_proxy, all_proxy and no_proxy, in lower case before upper case.
    Entries of no_proxy are hosts, domains, patterns, addresses and ranges; others have no effect, as in curl.

    Raises:
        ValueError: The variable of the proxy cannot be used.
    """
    variables, host = getproxies(), url.host.rstrip(".")
    kind = next((kind for kind in (url.scheme, "all") if variables.get(kind)), "")
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    if not kind or is_loopback(host):
        return None
    for entry in re.split(r"[,;\s]+", variables.get("no", "").lower()):
        with suppress(ValueError):
            if ip_address(host) in ip_network(entry.strip("[]"), strict=False):
                return None
        name = entry.removesuffix(f":{port}").strip(".").removeprefix("*.")
        if fnmatchcase(host, name) or fnmatchcase(host, f"*.{name}"):
            return None
    proxy = variables[kind] if "://" in variables[kind] else f"http://{variables[kind]}"
    if _checked(proxy, f"{kind}_proxy", *SOCKS).scheme in SOCKS and find_spec("socksio") is None:
        raise ValueError(f'{kind}_proxy={shown_address(proxy)} needs socksio. Run: pip install "httpx[socks]"')
    return proxy
