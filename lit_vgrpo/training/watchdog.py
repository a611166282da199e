"""Ranks on one machine watch each other: the death of one ends the job with a reason, and no rank outlives its parent.

Lightning's observer silently kills rank 0, and leaves the others running if rank 0 has died.
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

from lit_vgrpo.errors import say
from lit_vgrpo.system.signals import STOP_SIGNALS, how_it_ended, is_stop_requested
from lit_vgrpo.training.resume import last_words
from lit_vgrpo.training.trainer_internals import hand_over_children, run_folder, script_launcher

LAUNCHER_PID = "LIT_VGRPO_LAUNCHER_PID"  # environment variable: the process of rank 0, for the ranks that it starts
POLL_S = 0.3
GRACE_S = 10.0  # for the others to end with a message after one has died
END_S = 60.0  # for the others to end after rank 0 has finished
BLAME_S = 3.0  # for another rank's death to appear after a collective has failed
LAST_WORDS_S = 2.0  # for the last line, which a terminal or pipe may not take


class Watch:
    """Ends this process when a process that it watches has died, with a line that names it.

    Rank 0, or the first rank of another machine, watches the ranks that it started. Those watch rank 0, or torchrun.

    Args:
        folder: Returns the run folder.
        first_rank: This process's rank; the children's follow.
        parent: Process id and name of the process that started this rank; ``None`` watches none.
        speaks: Report deaths.
    """

    def __init__(
        self,
        folder: Callable[[], Path] = Path,
        first_rank: int = 0,
        parent: tuple[int, str] | None = None,
        speaks: bool = True,
    ) -> None:
        self.children: list[subprocess.Popen[Any]] = []
        self._folder, self._first_rank, self._parent, self._speaks = folder, first_rank, parent, speaks
        self._done = threading.Event()
        self._reporting = threading.Lock()

    def start(self, children: list[subprocess.Popen[Any]] | None = None) -> None:
        """Watch in a thread, these processes too; an empty list ends their watch."""
        if children is not None:
            self.children = children
        if children != []:
            threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()

    def stop(self, wait_s: float) -> None:
        """Stop watching, and kill the children that do not end within ``wait_s`` seconds."""
        self._done.set()
        end = time.monotonic() + wait_s
        for child in self.children:
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()

    def report_death(self) -> bool:
        """Report another rank's death, which a failed collective may show first; ``False`` if none died."""
        end = time.monotonic() + (BLAME_S if self.children or self._parent else 0.0)
        while not (death := self.death()) and time.monotonic() < end:
            time.sleep(POLL_S / 3)
        if death is not None:
            self._report(death)
        return death is not None

    def end(self, status: int, reason: str) -> None:
        """End this process and the ranks that it started, even if the main thread hangs."""
        timer = threading.Timer(LAST_WORDS_S, os._exit, [status])
        timer.daemon = True
        timer.start()
        for child in self.children:
            child.kill()
        if self._speaks:
            say(f"\nStopped immediately. {reason} {last_words(self._folder())}", error=True)
            sys.stdout.flush()
        os._exit(status)

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            if (death := self.death()) is not None and not self._done.wait(GRACE_S):
                self._report(self.death() or death)  # others may have ended since
                for child in self.children:
                    child.kill()
                sys.stdout.flush()
                os._exit(1)

    def _report(self, death: str) -> None:
        with self._reporting:  # the watch's thread and the main thread may both report
            if not self._done.is_set() and self._speaks:
                say(f"\n{death} {last_words(self._folder())}", error=True)
            self._done.set()

    def death(self) -> str | None:
        """Return how a watched process died, in a sentence, or ``None``."""
        if self._parent is not None and os.getppid() != self._parent[0]:
            return f"{self._parent[1]} (process {self._parent[0]}) is gone."
        codes = [(rank, child.poll()) for rank, child in enumerate(self.children, start=self._first_rank + 1)]
        # One killed by a signal comes first: the others may have failed because of it.
        failed = sorted((code > 0, rank, code) for rank, code in codes if code)
        stops = [stop for *_, code in failed if (stop := -code if code < 0 else code - 128) in STOP_SIGNALS]
        if len(stops) > 1 or (stops and is_stop_requested()):  # a scheduler, or timeout, asks all ranks
            return f"The run was ended from outside by {signal.Signals(stops[0]).name}."
        return f"Rank {failed[0][1]} {how_it_ended(failed[0][2])}." if failed else None


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
        return run_folder(trainer)

    started_by = os.environ.get(LAUNCHER_PID)
    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    launcher = script_launcher(trainer.strategy)
    if started_by is not None and local_rank > 0:
        watch = Watch(folder, parent=(int(started_by), "Rank 0"), speaks=local_rank == 1)
        watch.start()
    elif launcher is None or trainer.world_size == 1:
        watch = Watch(folder)
    elif isinstance(launcher.cluster_environment, TorchElasticEnvironment):
        watch = Watch(folder, parent=(os.getppid(), "torchrun"), speaks=local_rank == 0)
        watch.start()
    else:
        watch = Watch(folder, launcher.cluster_environment.node_rank() * launcher.num_processes)
        if not launcher.cluster_environment.creates_processes_externally:
            hand_over_children(trainer.strategy, watch.start, {LAUNCHER_PID: str(os.getpid())})
    return watch
