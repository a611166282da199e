"""``lightning serve-reward``: score images over HTTP."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lit_vgrpo.errors import UserError, counted, nearest, say
from lit_vgrpo.options import ServeReward
from lit_vgrpo.system.sockets import listening_socket, require_packages, web_address

if TYPE_CHECKING:
    from lit_vgrpo.rewards import Weighted

MEGABYTE = 1_000_000
KEEP_ALIVE_S = 75
SHUTDOWN_S = 5
BACKLOG = 256


def serve(options: ServeReward) -> int:
    """Serve a reward until Ctrl-C or SIGTERM: ``RECIPE_OR_CLASS [key=value ...] [--port 8000] ...``."""
    if options.print_setup:
        from lit_vgrpo.config.tree import judge_preset

        say(judge_preset(options.words[0])["setup"].rstrip())
        return 0
    require_packages()
    # SIGTERM acts like Ctrl-C; uvicorn handles both while it serves
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with listening_socket(options.host, options.port) as listener:  # before the weights: a taken port is known
            return _serve_on(listener, options)
    except KeyboardInterrupt:
        return 0
    finally:
        signal.signal(signal.SIGTERM, previous)


def _serve_on(listener: socket.socket, options: ServeReward) -> int:
    import torch

    from lit_vgrpo.apps.serve.app import Worker, make_app
    from lit_vgrpo.rewards.connection import is_loopback
    from lit_vgrpo.system.server import serve_page

    reward = build_served(options.words)
    splits = ["A reward that compares needs whole groups, which requests split. Use it as model.reward."]
    if errors := splits if reward.compares else reward.check():
        raise UserError(*errors)
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
        reward.load()
    except (RuntimeError, AssertionError, ModuleNotFoundError) as error:  # of torch, or of the reward in one line
        raise UserError(str(error).partition("\n")[0]) from error
    name = "+".join(reward.part_names)
    worker = Worker(reward, options.batch_size, device)
    limits = (options.max_request_mb * MEGABYTE, options.max_images, options.max_megapixels * 2**20)
    app = make_app(worker, name, options.token, *limits, options.token is None and is_loopback(options.host))
    listener.listen(BACKLOG)
    try:
        serve_page(app, listener, opening(name, listener, options, str(device)), SHUTDOWN_S, KEEP_ALIVE_S)
    finally:
        worker.close()
    say(f"Stopped after {counted(worker.scored_images, 'image')}.")
    return 0


def build_served(words: Sequence[str]) -> Weighted:
    """Build a reward; a judge's preset needs only the packages that its environment has."""
    from lit_vgrpo import rewards
    from lit_vgrpo.config.parts import part_of_words
    from lit_vgrpo.config.tree import JUDGE
    from lit_vgrpo.system.paths import import_from_here, shipped

    if words[0] in (judges := shipped("judges")):
        import_from_here()
        reward = part_of_words([f"{JUDGE}:{words[0]}", *words[1:]], "reward", rewards.Reward)
        return rewards.as_weighted(reward, "")
    if words[0] not in rewards.__all__ and (near := nearest(words[0], judges)):
        raise UserError(f"{words[0]} is not a reward. Did you mean {near}? Judges: {', '.join(judges)}.")
    from lit_vgrpo.launch.build import build_reward

    return build_reward(words)


def opening(name: str, listener: socket.socket, options: ServeReward, device: str) -> list[str]:
    """Return the lines to print once requests are accepted."""
    from lit_vgrpo.rewards.connection import is_loopback

    line = f"Serving {name} on {device} at {web_address(options.host, listener)}/score. Ctrl-C stops it."
    if is_loopback(options.host) or options.token is not None:
        return [line]
    advice = "Add --token-env NAME, or listen on 127.0.0.1."
    return [line, f"Warning: anyone who can reach {options.host} can use it. {advice}"]
