"""Ranks on one machine watch each other: a death ends the job at once with its reason, a stopped rank is named.

Lightning's own observer kills rank 0 without a word, and leaves the others running where rank 0 has died.
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
from typing import Any

from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import Trainer
from typing_extensions import override

from lit_vgrpo.errors import say
from lit_vgrpo.system.signals import STOP_SIGNALS, how_it_ended
from lit_vgrpo.training.peers import Peers
from lit_vgrpo.training.resume import last_words
from lit_vgrpo.training.trainer_internals import hand_over_children, script_launcher

LAUNCHER_PID = "LIT_VGRPO_LAUNCHER_PID"  # environment variable: the process of rank 0, for the ranks that it starts
POLL_S = 0.3
GRACE_S = 10.0  # for the others to end with their own message after one has died
END_S = 60.0  # for the others to end after rank 0 has finished
BLAME_S = 3.0  # for another rank's death to show after a collective has failed
SILENT_S = 60.0  # until a stopped rank is named, and no longer waited for after a request to stop
PATIENCE_S = 3.0  # the same after a second request
LAST_WORDS_S = 2.0  # for the last line, which a terminal or pipe may not take


class Watch:
    """Names stopped ranks on this machine; subclasses also end this process when a rank they watch has died.

    Args:
        folder: returns the run folder.
    """

    def __init__(self, folder: Callable[[], Path] = Path) -> None:
        self._folder = folder
        self.peers = Peers()
        self._done = threading.Event()
        self._saying = threading.Lock()

    def start(self) -> None:
        """Watch in a thread."""
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def stop(self, wait_s: float) -> None:
        """Stop watching, and give every rank ``wait_s`` seconds to end."""
        self._done.set()

    def says_who_died(self) -> bool:
        """Report another rank's death, which an exchange between ranks may show first; ``False`` if none died."""
        end = time.monotonic() + (0.0 if type(self) is Watch else BLAME_S)
        while not (death := self._death()) and time.monotonic() < end:
            time.sleep(POLL_S / 3)
        if death is not None:
            self._say(death)
        return death is not None

    def hindrance(self, is_urgent: bool) -> str | None:
        """Return why waiting for the other ranks is in vain after a request to stop, or ``None``."""
        rank = self.peers.stopped(PATIENCE_S if is_urgent else SILENT_S)
        if rank is not None:
            return f"{self.peers.name(rank)} is stopped."
        return self._death() if is_urgent else None

    def end(self, status: int, reason: str) -> None:
        """End this process and the ranks that it started, whatever the main thread does."""
        timer = threading.Timer(LAST_WORDS_S, os._exit, [status])
        timer.daemon = True
        timer.start()
        self._kill()
        if self._speaks():
            say(f"\nEnded at once. {reason} {last_words(self._folder())}", error=True)
            sys.stdout.flush()
        os._exit(status)

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            self.peers.look(POLL_S)
            for line in self.peers.newly_silent(SILENT_S):
                say(f"\n{line}", error=True)
            if (death := self._death()) is not None and not self._done.wait(self._grace_s()):
                self._say(death)
                self._kill()
                sys.stdout.flush()
                os._exit(1)

    def _say(self, death: str) -> None:
        with self._saying:  # the watch's thread and the main thread may both report
            if not self._done.is_set() and self._speaks():
                say(f"\n{death} {last_words(self._folder())}", error=True)
            self._done.set()

    def _death(self) -> str | None:
        """Return how a watched rank died, in a sentence, or ``None``."""
        return None

    def _grace_s(self) -> float:
        return GRACE_S

    def _speaks(self) -> bool:
        return self.peers.speaks()

    def _kill(self) -> None:
        """Kill the ranks that this process started."""


class ChildrenWatch(Watch):
    """In rank 0, or the first rank of another machine: watches the ranks that it started.

    Args:
        folder: returns the run folder.
        first_rank: this process's rank; the children's follow.
    """

    def __init__(self, folder: Callable[[], Path], first_rank: int = 0) -> None:
        super().__init__(folder)
        self.first_rank = first_rank
        self.children: list[subprocess.Popen[Any]] = []

    def take(self, children: list[subprocess.Popen[Any]]) -> None:
        """Watch these processes, or no longer any."""
        self.children = children
        if children:
            self.start()

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
    def _kill(self) -> None:
        for child in self.children:
            child.kill()

    @override
    def _death(self) -> str | None:
        codes = [(rank, child.poll()) for rank, child in enumerate(self.children, start=self.first_rank + 1)]
        # One killed by a signal comes first: the others may have failed because of it.
        failed = sorted((code > 0, rank, code) for rank, code in codes if code)
        return f"Rank {failed[0][1]} {how_it_ended(failed[0][2])}." if failed else None

    @override
    def _grace_s(self) -> float:
        # A request to stop has probably come to this rank too, which then ends with its own message.
        asked = [-signal.Signals[name] for name in STOP_SIGNALS if hasattr(signal, name)]
        return 0.0 if any((child.poll() or 0) < 0 and child.poll() not in asked for child in self.children) else GRACE_S


class ParentWatch(Watch):
    """In a rank that rank 0 or torchrun started: watches that process.

    Args:
        folder: returns the run folder.
        parent: that process.
        name: its name in messages.
        speaks: report its death.
    """

    def __init__(self, folder: Callable[[], Path], parent: int, name: str, speaks: bool) -> None:
        super().__init__(folder)
        self._parent, self._name, self._says_death = parent, name, speaks

    @override
    def _death(self) -> str | None:
        return None if os.getppid() == self._parent else f"{self._name} (process {self._parent}) is gone."

    @override
    def _grace_s(self) -> float:
        return 1.0

    @override
    def _speaks(self) -> bool:
        return super()._speaks() if self._death() is None else self._says_death


@contextmanager
def watched(trainer: Trainer) -> Iterator[Watch]:
    """Watch the ranks on this machine inside the block; SLURM and the like notice deaths themselves."""
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
    launcher = script_launcher(trainer.strategy)
    watch = Watch(folder)
    if parent is not None and local_rank > 0:
        watch = ParentWatch(folder, int(parent), "Rank 0", speaks=local_rank == 1)
    elif launcher is None or trainer.world_size == 1:
        return watch
    elif isinstance(launcher.cluster_environment, TorchElasticEnvironment):
        watch = ParentWatch(folder, os.getppid(), "torchrun", speaks=local_rank == 0)
    elif not launcher.cluster_environment.creates_processes_externally:
        watch = ChildrenWatch(folder, launcher.cluster_environment.node_rank() * launcher.num_processes)
        hand_over_children(trainer.strategy, watch.take, {LAUNCHER_PID: str(os.getpid())})
    trainer.callbacks.insert(0, watch.peers)  # type: ignore[attr-defined]
    if not isinstance(watch, ChildrenWatch):  # which starts with them
        watch.start()
    return watch
