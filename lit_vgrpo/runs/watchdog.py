"""Ranks on one machine watch one another: which died, and how, ends the job at once; one that is silent is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lit_vgrpo.errors import say
from lit_vgrpo.runs.peers import Peers
from lit_vgrpo.runs.resume import last_words
from lit_vgrpo.system.signals import STOP_SIGNALS

LAUNCHER_PID = "LIT_VGRPO_LAUNCHER_PID"
"""Tells the ranks that Lightning started which process is their first rank."""
POLL_S = 0.3
GRACE_S = 10.0
"""How long the others may take to end by themselves, and in their own words, after one has."""
END_S = 60.0
"""How long they may take after the first rank has finished."""
BLAME_S = 3.0
"""How long after a failed exchange the death of another rank may take to show."""


SILENT_S = 60.0
"""How long a rank may be silent before the others say so, and no longer wait for it once they were asked to stop."""
PATIENCE_S = 3.0
"""The same after a second signal to stop."""
LAST_WORDS_S = 2.0
"""How long a process that is ending tries to say so, to a terminal or pipe that may not take it."""


class Watch:
    """Watches nothing: one process, or a launcher of another make that watches its ranks itself.

    Args:
        folder: gives the run folder.
    """

    def __init__(self, folder: Callable[[], Path] = Path) -> None:
        self._folder = folder

    def says_who_died(self) -> bool:
        """After a failed exchange between ranks: whether another one has died, which is then said."""
        return False

    def hindrance(self, is_urgent: bool) -> str | None:
        """Return why a request to stop, the first or an urgent one, would wait in vain; ``None`` where it need not."""
        return None

    def start(self) -> None:
        """Begin; the process ends when a rank that it watches has died."""

    def stop(self, wait_s: float) -> None:
        """The work is done, or has failed: from here on every rank may end, and has so many seconds to do so."""

    def end(self, status: int, reason: str) -> None:
        """End this process and the ranks that it started, whatever the main thread does."""
        timer = threading.Timer(LAST_WORDS_S, os._exit, [status])
        timer.daemon = True
        timer.start()
        self.kill()
        if self._speaks():
            say(f"\nEnded at once. {reason} {last_words(self._folder())}", error=True)
            sys.stdout.flush()
        os._exit(status)

    def kill(self) -> None:
        """End the ranks that this process started."""

    def _speaks(self) -> bool:
        return True


class RankWatch(Watch):
    """In a rank of several: names those on this machine that are silent.

    Args:
        folder: gives the run folder.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        super().__init__(folder)
        self.peers = Peers()
        self._named: set[int] = set()
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

    @override
    def hindrance(self, is_urgent: bool) -> str | None:
        rank = self.peers.stopped(PATIENCE_S if is_urgent else SILENT_S)
        if rank is not None:
            return f"{self.peers.name(rank)} is stopped."
        return self._death() if is_urgent else None

    def _name_the_silent(self) -> None:
        self.peers.look(POLL_S)
        silent = self.peers.about(SILENT_S)
        self._named &= set(silent)
        for rank in silent.keys() - self._named:
            self._named.add(rank)
            if self.peers.speaks():
                say(f"\n{silent[rank]}", error=True)

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            self._name_the_silent()
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

    @override
    def _speaks(self) -> bool:
        return self.peers.speaks()

    def _death(self) -> str | None:
        """How a rank that is watched died, in a sentence; ``None`` while all live."""
        return None


class ChildrenWatch(RankWatch):
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
        # A signal that asks to stop has probably come to this rank too, which then ends in its own words.
        own = [-signal.Signals[name] for name in STOP_SIGNALS if hasattr(signal, name)]
        return 0.0 if any((child.poll() or 0) < 0 and child.poll() not in own for child in self.children) else GRACE_S

    @override
    def _end(self) -> None:
        self.kill()
        super()._end()

    @override
    def kill(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()


class ParentWatch(RankWatch):
    """In a rank that the first one started, or torchrun: the process that is its parent.

    Args:
        folder: gives the run folder.
        parent: that process.
        name: what to call it.
        speaks: this rank speaks for all that were started with it.
    """

    def __init__(self, folder: Callable[[], Path], parent: int, name: str, speaks: bool) -> None:
        super().__init__(folder)
        self._parent = parent
        self._name = name
        self._says_death = speaks

    @override
    def _death(self) -> str | None:
        return None if os.getppid() == self._parent else f"{self._name} (process {self._parent}) is gone."

    @override
    def _grace(self) -> float:
        return 1.0

    @override
    def _speaks(self) -> bool:
        return self._says_death if self._death() is not None else super()._speaks()


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
    """Watch the ranks on this machine while the block runs.

    Under torchrun, SLURM and the like a death is the launcher's to notice.
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
    launcher = trainer.strategy.launcher
    watch: Watch
    if parent is not None and local_rank > 0:
        watch = ParentWatch(folder, int(parent), "Rank 0", speaks=local_rank == 1)
        watch.start()
    elif type(launcher) is not _SubprocessScriptLauncher or trainer.world_size == 1:
        return Watch(folder)
    elif launcher.cluster_environment.creates_processes_externally:
        by_torchrun = isinstance(launcher.cluster_environment, TorchElasticEnvironment)
        watch = (
            ParentWatch(folder, os.getppid(), "torchrun", speaks=local_rank == 0) if by_torchrun else RankWatch(folder)
        )
        watch.start()
    else:
        watch = ChildrenWatch(folder, launcher.cluster_environment.node_rank() * launcher.num_processes)
        trainer.strategy._launcher = WatchedLauncher(launcher, watch)
    trainer.callbacks.insert(0, watch.peers)  # type: ignore[attr-defined]
    return watch


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
