"""Ranks on one machine watch one another: when one dies, the job ends at once and says which, how, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lit_vgrpo.errors import say
from lit_vgrpo.resume import last_words

LAUNCHER_PID = "LIT_VGRPO_LAUNCHER_PID"
"""Tells the ranks that Lightning started which process is their first rank."""
POLL_S = 0.3
GRACE_S = 10.0
"""How long the others may take to end by themselves, and in their own words, after one has."""
END_S = 60.0
"""How long they may take after the first rank has finished."""
BLAME_S = 3.0
"""How long after a failed exchange the death of another rank may take to show."""


class Watch:
    """Watches nothing: one process, or a launcher of another make that watches its ranks itself."""

    def says_who_died(self) -> bool:
        """After a failed exchange between ranks: whether another one has died, which is then said."""
        return False

    def start(self) -> None:
        """Begin; the process ends when a rank that it watches has died."""

    def stop(self, wait_s: float) -> None:
        """The work is done, or has failed: from here on every rank may end, and has so many seconds to do so."""


class _Thread(Watch, ABC):
    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._done = threading.Event()
        self._saying = threading.Lock()

    @override
    def start(self) -> None:
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    @override
    def stop(self, wait_s: float) -> None:
        self._done.set()

    @override
    def says_who_died(self) -> bool:
        end = time.monotonic() + BLAME_S
        while not self._death() and time.monotonic() < end:
            time.sleep(POLL_S / 3)
        death = self._death()
        if death is not None:
            self._say(death)
        return death is not None

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            death = self._death()
            if death is not None and not self._done.wait(self._grace()):
                self._say(death)
                self._end()

    def _say(self, death: str) -> None:
        with self._saying:
            if not self._done.is_set():
                self._done.set()
                if self._speaks():
                    say(f"\n{death} {last_words(self._folder())}", error=True)

    def _end(self) -> None:
        sys.stdout.flush()
        os._exit(1)

    def _grace(self) -> float:
        return GRACE_S

    def _speaks(self) -> bool:
        return True

    @abstractmethod
    def _death(self) -> str | None:
        """How a rank that is watched died, in a sentence; ``None`` while all live."""


class ChildrenWatch(_Thread):
    """In the first rank: the others are its children.

    Args:
        folder: gives the run folder.
        first_rank: this process's number; the children's follow.
    """

    def __init__(self, folder: Callable[[], Path], first_rank: int = 0) -> None:
        super().__init__(folder)
        self.first_rank = first_rank
        self.children: list[subprocess.Popen[Any]] = []

    @override
    def stop(self, wait_s: float) -> None:
        super().stop(wait_s)
        end = time.monotonic() + wait_s
        for child in self.children:
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()

    @override
    def _death(self) -> str | None:
        codes = [(rank, child.poll()) for rank, child in enumerate(self.children, start=1)]
        # One killed by a signal comes first: the others may have failed because of it.
        failed = sorted((code > 0, rank, code) for rank, code in codes if code)
        return f"Rank {self.first_rank + failed[0][1]} {how_it_ended(failed[0][2])}." if failed else None

    @override
    def _grace(self) -> float:
        return 0.0 if any((child.poll() or 0) < 0 for child in self.children) else GRACE_S

    @override
    def _end(self) -> None:
        self.kill()
        super()._end()

    def kill(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()


class ParentWatch(_Thread):
    """In a rank that the first one started: that one is its parent.

    Args:
        folder: gives the run folder.
        parent: the first rank's process.
        local_rank: this rank's number; the first of the children speaks for all.
    """

    def __init__(self, folder: Callable[[], Path], parent: int, local_rank: int) -> None:
        super().__init__(folder)
        self._parent = parent
        self._local_rank = local_rank

    @override
    def _death(self) -> str | None:
        return None if os.getppid() == self._parent else f"Rank 0 (process {self._parent}) is gone."

    @override
    def _grace(self) -> float:
        return 1.0

    @override
    def _speaks(self) -> bool:
        return self._local_rank == 1


class WatchedLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher with a watch of ours; Lightning's own kills the first rank too, without a word."""

    def __init__(self, launcher: _SubprocessScriptLauncher, watch: ChildrenWatch) -> None:
        super().__init__(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
        self.watch = watch

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        os.environ[LAUNCHER_PID] = str(os.getpid())
        self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        self.watch.children = self.procs
        self.watch.start()
        return function(*args, **kwargs)

    @override
    def kill(self, signum: Any) -> None:
        if signum == signal.SIGKILL:
            self.watch.children = []  # they end because we say so
        super().kill(signum)


@contextmanager
def watched(trainer: Trainer) -> Iterator[Watch]:
    """Watch the ranks that Lightning starts on this machine while the block runs.

    Under torchrun, SLURM and the like the launcher does it.
    """
    watch = _watch_for(trainer)
    try:
        yield watch
    except BaseException:
        watch.stop(GRACE_S)
        raise
    watch.stop(END_S)


def _watch_for(trainer: Trainer) -> Watch:
    def folder() -> Path:
        return Path(trainer.default_root_dir)

    parent = os.environ.get(LAUNCHER_PID)
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    if parent is not None and local_rank > 0:
        watch = ParentWatch(folder, int(parent), local_rank)
        watch.start()
        return watch
    launcher = trainer.strategy.launcher
    if type(launcher) is not _SubprocessScriptLauncher or launcher.cluster_environment.creates_processes_externally:
        return Watch()
    children = ChildrenWatch(folder, launcher.cluster_environment.node_rank() * launcher.num_processes)
    trainer.strategy._launcher = WatchedLauncher(launcher, children)
    return children


def how_it_ended(code: int) -> str:
    """An exit status in words.

    >>> how_it_ended(-9)
    'was killed by SIGKILL'
    >>> how_it_ended(3)
    'ended with exit status 3'
    """
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
