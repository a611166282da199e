"""The ranks on one machine watch each other: a death ends the job at once with its reason, a silent rank is named.

Lightning's own observer of its child processes kills the first rank too, without a word and within 5 s, and ranks
whose first one died are left running.
"""

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
from typing import Any, ClassVar

from lightning.fabric.plugins.environments import TorchElasticEnvironment
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
"""How long the others may take to end by themselves, with their own message, after one has."""
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
    """Names the ranks on this machine that are silent; subclasses also see that a rank has died.

    By itself it serves a single process, and ranks whose launcher notices deaths.

    Args:
        folder: returns the run folder.
    """

    sees_deaths: ClassVar[bool] = False

    def __init__(self, folder: Callable[[], Path] = Path) -> None:
        self._folder = folder
        self.peers = Peers()
        self._named: set[int] = set()
        self._done = threading.Event()
        self._saying = threading.Lock()

    def start(self) -> None:
        """Watch in a thread; the process ends when a rank that it watches has died."""
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def stop(self, wait_s: float) -> None:
        """Stop watching: the work is done or has failed, and every rank has ``wait_s`` seconds to end."""
        self._done.set()

    def says_who_died(self) -> bool:
        """Report, after a failed exchange between ranks, the death of another one; return ``False`` if none died."""
        end = time.monotonic() + BLAME_S
        while self.sees_deaths and not self._death() and time.monotonic() < end:
            time.sleep(POLL_S / 3)
        death = self._death()
        if death is not None:
            self._say(death)
        return death is not None

    def hindrance(self, is_urgent: bool) -> str | None:
        """Return why a request to stop, the first or an urgent one, would wait in vain; ``None`` where it need not."""
        rank = self.peers.stopped(PATIENCE_S if is_urgent else SILENT_S)
        if rank is not None:
            return f"{self.peers.name(rank)} is stopped."
        return self._death() if is_urgent else None

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

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            self._name_the_silent()
            death = self._death()
            if death is not None and not self._done.wait(self._grace()):
                self._say(death)
                self.kill()
                sys.stdout.flush()
                os._exit(1)

    def _name_the_silent(self) -> None:
        self.peers.look(POLL_S)
        silent = self.peers.about(SILENT_S)
        for rank in silent.keys() - self._named:
            if self.peers.speaks():
                say(f"\n{silent[rank]}", error=True)
        self._named = set(silent)

    def _say(self, death: str) -> None:
        with self._saying:
            if not self._done.is_set():
                self._done.set()
                if self._speaks():
                    say(f"\n{death} {last_words(self._folder())}", error=True)

    def _death(self) -> str | None:
        """Return how a rank that is watched died, in a sentence; ``None`` while all live."""
        return None

    def _grace(self) -> float:
        return GRACE_S

    def _speaks(self) -> bool:
        return self.peers.speaks()


class ChildrenWatch(Watch):
    """In the first rank: the others are its children.

    Args:
        folder: returns the run folder.
        first_rank: this process's number; the children's follow.
    """

    sees_deaths = True

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
    def kill(self) -> None:
        for child in self.children:
            child.kill()  # nothing happens to one that has ended

    @override
    def _death(self) -> str | None:
        codes = [(rank, child.poll()) for rank, child in enumerate(self.children, start=self.first_rank + 1)]
        # One killed by a signal comes first: the others may have failed because of it.
        failed = sorted((code > 0, rank, code) for rank, code in codes if code)
        return f"Rank {failed[0][1]} {how_it_ended(failed[0][2])}." if failed else None

    @override
    def _grace(self) -> float:
        # A signal that asks to stop has probably come to this rank too, which then ends with its own message.
        own = [-signal.Signals[name] for name in STOP_SIGNALS if hasattr(signal, name)]
        killed = any(code < 0 and code not in own for code in (child.poll() or 0 for child in self.children))
        return 0.0 if killed else GRACE_S


class ParentWatch(Watch):
    """In a rank that the first one started, or torchrun: the process that is its parent.

    Args:
        folder: returns the run folder.
        parent: that process.
        name: what to call it.
        speaks: this rank speaks for all that were started with it.
    """

    sees_deaths = True

    def __init__(self, folder: Callable[[], Path], parent: int, name: str, speaks: bool) -> None:
        super().__init__(folder)
        self._parent, self._name, self._says_death = parent, name, speaks

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
    """Lightning's launcher, whose children our watch has in place of Lightning's own observer."""

    def __init__(self, launcher: _SubprocessScriptLauncher, watch: ChildrenWatch) -> None:
        super().__init__(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
        self.watch = watch

    @override
    def _call_children_scripts(self) -> None:
        os.environ[LAUNCHER_PID] = str(os.getpid())
        super()._call_children_scripts()
        self.watch.children, self.procs = self.procs, []  # an observer of no children ends by itself
        self.watch.start()

    @override
    def kill(self, signum: Any) -> None:
        children = self.watch.children
        if signum == signal.SIGKILL:
            self.watch.children = []  # they end because we say so
        for child in children:
            child.send_signal(signum)


@contextmanager
def watched(trainer: Trainer) -> Iterator[Watch]:
    """Watch the ranks on this machine while the block runs.

    Under SLURM and the like the launcher notices a death.
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
    watch = Watch(folder)
    if parent is not None and local_rank > 0:
        watch = ParentWatch(folder, int(parent), "Rank 0", speaks=local_rank == 1)
    elif type(launcher) is not _SubprocessScriptLauncher or trainer.world_size == 1:
        return watch
    elif isinstance(launcher.cluster_environment, TorchElasticEnvironment):
        watch = ParentWatch(folder, os.getppid(), "torchrun", speaks=local_rank == 0)
    elif not launcher.cluster_environment.creates_processes_externally:
        watch = ChildrenWatch(folder, launcher.cluster_environment.node_rank() * launcher.num_processes)
        trainer.strategy._launcher = WatchedLauncher(launcher, watch)
    trainer.callbacks.insert(0, watch.peers)  # type: ignore[attr-defined]
    if not isinstance(watch, ChildrenWatch):  # which its launcher starts
        watch.start()
    return watch


def how_it_ended(code: int) -> str:
    """Return an exit status in words.

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
