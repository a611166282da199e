"""``lightning serve-reward``: score images over HTTP."""

from __future__ import annotations

import signal
import socket
from importlib.util import find_spec

from lit_vgrpo.commands.serve.options import ServeOptions
from lit_vgrpo.config.arguments import subcommand
from lit_vgrpo.errors import UserError, one_line, report, say

PACKAGES = ("fastapi", "uvicorn", "python_multipart")
KEEP_ALIVE_S = 75
SHUTDOWN_S = 5
BACKLOG = 256


@subcommand(ServeOptions)
def serve(options: ServeOptions) -> int:
    """Serve a reward: ``RECIPE_OR_CLASS [key=value ...] [--host 127.0.0.1] [--port 8000] ...``.

    Returns:
        0 after Ctrl-C or SIGTERM; 1 when the reward cannot be loaded; 2 for a mistake in what was typed.
    """
    # SIGTERM ends like Ctrl-C; uvicorn takes both over while it serves
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _serve(options)
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)


def _serve(options: ServeOptions) -> int:
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise UserError(f'{missing[0]} is not installed. Run: pip install "lit-vgrpo[serve]"')
    with listening_socket(options.host, options.port) as listener:  # before the weights: a taken port is known at once
        return _serve_on(listener, options)


def _serve_on(listener: socket.socket, options: ServeOptions) -> int:
    import torch

    from lit_vgrpo.commands.reward_spec import build_reward
    from lit_vgrpo.commands.serve.app import make_app
    from lit_vgrpo.commands.serve.page import bounded_server
    from lit_vgrpo.commands.serve.worker import Worker
    from lit_vgrpo.system.hub import LoadError

    reward = build_reward(options.words)
    errors = reward.check()
    if errors:
        raise UserError(*errors)
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {options.device} cannot be used: {one_line(error)}. Use cpu or cuda:0.") from error
    try:
        reward.load()
    except (LoadError, ModuleNotFoundError) as error:
        report([str(error)])
        return 1
    name = "+".join(reward.part_names)
    worker = Worker(reward, options.batch_size, options.max_wait_ms, device)
    app = make_app(worker, name, options.token, options.max_request_bytes, options.limits)
    listener.listen(BACKLOG)
    for line in opening(name, listener, options, str(device)):
        say(line)
    try:
        bounded_server(app, SHUTDOWN_S, KEEP_ALIVE_S).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn hands the signal on when it is done
        pass
    finally:
        worker.close()
    say(f"Stopped after {worker.scored_images} images.")
    return 0


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


def opening(name: str, listener: socket.socket, options: ServeOptions, device: str) -> list[str]:
    """Return the lines to print once requests are accepted."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    lines = [f"Serving {name} on {device} at http://{host}:{listener.getsockname()[1]}/score. Ctrl-C stops it."]
    if not options.is_local and options.token is None:
        lines.append(
            f"Warning: anyone who can reach {options.host} can use it. Add --token-env NAME, or listen on 127.0.0.1."
        )
    return lines
