"""Sockets and packages of the subcommands that serve something."""

from __future__ import annotations

import socket
from importlib.util import find_spec

from lit_vgrpo.errors import UserError, one_line

PACKAGES = ("fastapi", "uvicorn")


def require_packages(*others: str) -> None:
    """Raise UserError if a package that a server needs is missing, with the command that installs it."""
    missing = [package for package in (*PACKAGES, *others) if find_spec(package) is None]
    if missing:
        raise UserError(f'{missing[0]} is not installed. Run: pip install "lit-vgrpo[serve]"')


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet.

    Raises:
        UserError: The port is taken, or the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"--host {host} cannot be listened on: {one_line(error)}. Use 127.0.0.1 or 0.0.0.0.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            raise UserError(f"--port {port} needs administrator rights. Use 1024 or more.") from error
        raise UserError(
            f"Cannot listen on {host}:{port}: {one_line(error.strerror)}. Use another --port, or 0 for a free one."
        ) from error
    return listener


def web_address(host: str, listener: socket.socket) -> str:
    """Return the address of a server that listens on a host, without a path."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
