"""``lightning vote``: people choose between a run's images on a page."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from inspect import signature
from pathlib import Path

from lit_vgrpo.config.recipe import STAGES, SUFFIXES, Command, find_run, loaded
from lit_vgrpo.errors import UserError, say, shell_line
from lit_vgrpo.launch.build import train_recipe
from lit_vgrpo.launch.recipe_cli import RecipeCLI
from lit_vgrpo.options import Vote
from lit_vgrpo.rewards import VoteReward
from lit_vgrpo.rewards.connection import is_loopback
from lit_vgrpo.rewards.vote_store import FILE_NAME, VoteStore
from lit_vgrpo.system.paths import typed_path
from lit_vgrpo.system.process import is_first_process
from lit_vgrpo.system.sockets import listening_socket, require_packages, web_address
from lit_vgrpo.training.resume import SUMMARY_NAME, UNDONE, read_summary, trained_by

LAST_LOOK_S = 1.5
"""Time for pages, which poll once per second, to learn that training has ended."""


def vote(options: Vote) -> int:
    """Serve the page of a run, or train a recipe with it and return its status: ``RUN|RECIPE [key=value ...] ...``."""
    require_packages()
    if not is_loopback(options.host):
        options.token = options.token or secrets.token_urlsafe(16)
    name, *settings = options.words
    path = typed_path(name)
    if path.is_dir() or (path.parent.name == "runs" and path.suffix not in SUFFIXES):
        run = find_run(name)[0]
        if settings or options.resume:
            raise UserError(f"{run} is a run folder and takes no settings. To train it, give its config.yaml.")
        with listening_socket(options.host, options.port) as listener:
            return _serve(options, listener, run)
    command = Command.parse(options.words, options.resume)
    if STAGES in loaded(command.recipe):
        raise UserError(f"{name} is a curriculum. Run it, and vote on each run: lightning vote RUN")
    if not is_first_process():  # only the first rank serves the page
        return train_recipe(command)
    with listening_socket(options.host, options.port) as listener:  # before the weights: a taken port is known at once
        return train_recipe(command, partial(_page_during, options, listener))


def _serve(options: Vote, listener: socket.socket, run: Path) -> int:
    from lit_vgrpo.apps.vote.app import make_app
    from lit_vgrpo.system.server import serve_page

    if not (run / FILE_NAME).is_file():
        raise UserError(f"{run} has no {FILE_NAME}. It has not started, or its reward does not ask people.")
    store = VoteStore(run / FILE_NAME)
    serve_page(make_app(store, options.token, partial(has_ended, run, store)), listener, _listen(options, listener))
    progress = store.progress()
    left = progress.needed - progress.given
    say(f"Stopped. Every vote is in {store.path}{f'; still needed: {left}' if left else ''}.")
    return 0


def has_ended(run: Path, store: VoteStore) -> bool:
    """Return True if a run has ended and has not asked for votes since; one that was interrupted may continue."""
    if (read_summary(run) or {}).get("outcome") in UNDONE:
        return False
    return (run / SUMMARY_NAME).stat().st_mtime_ns >= store.path.stat().st_mtime_ns


def _page_during(options: Vote, listener: socket.socket, cli: RecipeCLI) -> AbstractContextManager[None]:
    """Return :func:`_page` of a recipe, before its run writes a file; raise UserError if it does not ask people."""
    asking = [reward for reward in cli.model.reward.rewards if isinstance(reward, VoteReward)]
    if not asking:
        # Held-out images need another reward: one of those that the recipe trains on, if its name is enough.
        kinds = [
            type(reward) for reward in cli.model.reward.rewards if type(reward).__module__.startswith("lit_vgrpo.")
        ]
        names = [
            kind.__name__
            for kind in kinds
            if all(p.default is not p.empty for p in signature(kind).parameters.values())
        ]
        other = [*names, "PickScore"][0]
        untrained = [] if cli.model.evaluator.untrained else [f"model.untrained_reward={other}"]
        again = shell_line("lightning", "vote", *options.words, "model.reward=VoteReward", *untrained)
        raise UserError(f"The reward of {options.words[0]} does not ask people. Run: {again}")
    for reward in asking:
        reward.page = _address(options, listener)
    return _page(options, listener, cli.folder)


@contextmanager
def _page(options: Vote, listener: socket.socket, folder: Path) -> Iterator[None]:
    """Serve the page while a recipe trains."""
    from lit_vgrpo.apps.vote.app import make_app
    from lit_vgrpo.system.server import served_in_thread

    is_over = threading.Event()
    app = make_app(VoteStore(folder / FILE_NAME), options.token, is_over.is_set)
    for line in _listen(options, listener):
        say(line)
    with served_in_thread(app, listener), trained_by("vote"):
        yield
        is_over.set()
        time.sleep(LAST_LOOK_S)


def _listen(options: Vote, listener: socket.socket) -> list[str]:
    """Accept connections, and return the line to print."""
    from lit_vgrpo.system.server import BACKLOG

    listener.listen(BACKLOG)
    whom = "on this machine only" if options.token is None else "for everyone who has this address"
    return [f"Vote at {_address(options, listener)} {whom}. Ctrl-C stops it."]


def _address(options: Vote, listener: socket.socket) -> str:
    secret = "" if options.token is None else f"?token={options.token}"
    return f"{web_address(options.host, listener)}/{secret}"
