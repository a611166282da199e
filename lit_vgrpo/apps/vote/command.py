"""``lightning vote``: ask people which images are better, beside a run or with it."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lit_vgrpo.apps.curriculum.curriculum import is_curriculum
from lit_vgrpo.apps.serve.listening import listening_socket, require_packages, web_address
from lit_vgrpo.apps.serve.options import LOOPBACK
from lit_vgrpo.config.recipe import Command, is_override
from lit_vgrpo.config.tree import class_name
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.launch.build import train_recipe
from lit_vgrpo.launch.recipe_cli import RecipeCLI
from lit_vgrpo.rewards.connection import is_loopback
from lit_vgrpo.rewards.vote import VoteReward
from lit_vgrpo.rewards.vote_store import FILE_NAME, VoteStore, VoteStoreError
from lit_vgrpo.system.process import is_first_process
from lit_vgrpo.training.folder import CONFIG_NAME
from lit_vgrpo.training.resume import SUMMARY_NAME, read_summary
from lit_vgrpo.training.saved_run import find_run

UNFINISHED = ("interrupted", "failed")
LAST_LOOK_S = 1.5
"""Time for pages, which ask once a second, to learn that training has ended."""
NOT_ASKED = "does not ask people. Set model.reward=VoteReward, and model.heldout_reward for the held-out images"


@dataclass(kw_only=True)
class VoteOptions:
    """Options of ``lightning vote``, whose help describes the first ones.

    Attributes:
        words: A run folder, or a recipe with overlays and overrides.
        run: The run folder; ``None`` for a recipe.
        command: The recipe; ``None`` for a run folder.
    """

    words: Sequence[str]
    host: str = LOOPBACK
    port: int = 8009
    token: str | None = None
    seed: int = 0
    resume: bool = False
    run: Path | None = field(init=False, default=None)
    command: Command | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        require_packages()
        if is_loopback(self.host):
            if self.token is not None:
                raise UserError("--token-env has no effect on this machine alone. Add --host, or leave it out.")
        else:
            self.token = self.token or secrets.token_urlsafe(16)
        if not Path(self.words[0]).expanduser().is_dir():
            self.command = Command.parse(self.words, self.resume)
            if is_curriculum(self.command.recipe):
                raise UserError(f"{self.words[0]} is a curriculum. Run it, and vote on each run: lightning vote RUN")
            return
        self.run = find_run(self.words[0])[0]
        settings = [word for word in self.words if is_override(word)]
        if settings or len(self.words) > 1 or self.resume:
            extra = "--resume" if self.resume else (settings or self.words[1:])[0]
            config = self.run / CONFIG_NAME
            raise UserError(f"{extra} has no effect on a run folder. To train it too: lightning vote {config} {extra}")

    def address(self, listener: socket.socket) -> str:
        """Return the page's address."""
        secret = "" if self.token is None else f"?token={self.token}"
        return f"{web_address(self.host, listener)}/{secret}"


def vote(options: VoteOptions) -> int:
    """Serve the voting page of a run, or train a recipe with it: ``RUN|RECIPE [key=value ...] [--port 8009] ...``.

    Returns:
        Exit status: 0, or that of the training; 2 for a mistake in what was typed.
    """
    if options.command is not None and not is_first_process():  # the page is served by the first rank alone
        return train_recipe(options.command)
    with listening_socket(options.host, options.port) as listener:  # before the weights: a taken port is known at once
        if options.run is not None:
            return _serve(options, listener, options.run)
        assert options.command is not None
        return train_recipe(options.command, partial(_page_beside, options, listener))


def _serve(options: VoteOptions, listener: socket.socket, run: Path) -> int:
    from lit_vgrpo.apps.serve.page import serve_page

    store = _open(_folder_of_votes(run))
    app = _listen(options, listener, store, partial(has_ended, run, store))
    serve_page(app, listener)
    found = store.progress()
    left = found.needed - found.given
    missing = f"; still needed: {left}" if left else ""
    say(f"Stopped. Every vote is in {store.path}{missing}.")
    return 0


def has_ended(run: Path, store: VoteStore) -> bool:
    """Return True if a run has ended and has not asked for votes since; one that was interrupted may continue."""
    summary = run / SUMMARY_NAME
    if (read_summary(run) or {}).get("outcome") in (None, *UNFINISHED):
        return False
    return summary.stat().st_mtime_ns >= store.path.stat().st_mtime_ns


def _page_beside(options: VoteOptions, listener: socket.socket, cli: RecipeCLI) -> AbstractContextManager[object]:
    """Return a context that serves the page while a recipe trains.

    Raises:
        UserError: the recipe does not ask people.
    """
    asking = [reward for reward in cli.model.reward.rewards if isinstance(reward, VoteReward)]
    if not asking:
        raise UserError(f"The reward of {options.words[0]} {NOT_ASKED}.")
    folder = asking[0].folder or cli.folder
    return _page(options, listener, folder)


@contextmanager
def _page(options: VoteOptions, listener: socket.socket, folder: Path) -> Iterator[None]:
    from lit_vgrpo.apps.serve.page import served_beside

    is_over = threading.Event()
    with served_beside(_listen(options, listener, _open(folder), is_over.is_set), listener):
        yield
        is_over.set()
        time.sleep(LAST_LOOK_S)


def _listen(
    options: VoteOptions, listener: socket.socket, store: VoteStore, is_over: Callable[[], bool] = lambda: False
) -> Any:
    from lit_vgrpo.apps.serve.page import BACKLOG
    from lit_vgrpo.apps.vote.app import make_app

    app = make_app(store, options.seed, options.token, is_over)
    listener.listen(BACKLOG)
    whom = "on this machine only" if options.token is None else "for everyone who has this address"
    say(f"Vote at {options.address(listener)} {whom}. Ctrl-C stops it.")
    return app


def _open(folder: Path) -> VoteStore:
    try:
        return VoteStore(folder / FILE_NAME)
    except VoteStoreError as error:
        raise UserError(str(error)) from error


def _folder_of_votes(run: Path) -> Path:
    """Return the folder that holds a run's votes.

    Raises:
        UserError: the run does not ask people, or its recipe cannot be read.
    """
    try:
        recipe = yaml.safe_load((run / CONFIG_NAME).read_text())
        own = [node for node in _parts(recipe["model"]["reward"]) if class_name(node) == VoteReward.__name__]
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(f"{run / CONFIG_NAME} cannot be read as a recipe. Restore it from a copy.") from error
    if not own:
        raise UserError(f"The reward of {run} {NOT_ASKED}, in a new run: lightning vote {run / CONFIG_NAME} ...")
    return Path((own[0].get("init_args") or {}).get("folder") or run).expanduser()


def _parts(reward: Any) -> list[Mapping[str, Any]]:
    """Return a reward of a recipe, and those in its list."""
    if not isinstance(reward, Mapping):
        return [{"class_path": str(reward)}]
    inner = (reward.get("init_args") or {}).get("rewards") or []
    return [reward, *(part for one in inner for part in _parts(one))]
