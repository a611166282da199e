"""Sockets and packages of the subcommands that run a server."""

from __future__ import annotations

import socket
from importlib.util import find_spec

from lit_vgrpo.errors import UserError, one_line

LOOPBACK = "127.0.0.1"


def require_packages() -> None:
    """Raise UserError if a package that a server needs is missing, with the command that installs it."""
    missing = [package for package in ("fastapi", "uvicorn") if find_spec(package) is None]
    if missing:
        raise UserError(f'{missing[0]} is not installed. Run: pip install "lit-vgrpo[serve]"')


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet; UserError for a taken port, or another machine's address."""
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = one_line(error.strerror or error)
        raise UserError(f"Cannot listen on {host}:{port}: {reason}. Use another --host or --port.") from error
    return listener


def web_address(host: str, listener: socket.socket) -> str:
    """Return the address of a server that listens on a host, without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
