"""The other ranks on this machine, and which of them are stopped or blocked."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

STOPPED, ON_DISK = "Tt", "D"
"""Process states as in ``ps``: stopped by SIGSTOP, Ctrl-Z or a debugger; in uninterruptible disk sleep."""


class Peers(Callback):
    """The processes of the other ranks, exchanged at the start and then observed through ``/proc`` (Linux only).

    Attributes:
        rank: this process's rank.
        processes: process ids of the other ranks on this machine, by rank.
        silent_s: seconds since each stopped or blocked rank was last seen running.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.processes: dict[int, int] = {}
        self.silent_s: dict[int, float] = {}
        self._states: dict[int, str] = {}
        self._named: set[int] = set()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if dist.is_available() and dist.is_initialized():
            told: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
            dist.all_gather_object(told, (machine(), os.getpid()))
            self.meet(dist.get_rank(), told)

    def meet(self, rank: int, told: list[tuple[str, int]]) -> None:
        """Store which ranks are on this machine; ``told`` holds every rank's machine and process id."""
        self.rank, own = rank, told[rank][0]
        others = {other: process for other, (there, process) in enumerate(told) if there == own and other != rank}
        self.processes = others if own else {}

    def look(self, elapsed_s: float) -> None:
        """Check each rank's state, ``elapsed_s`` seconds after the last check."""
        for rank, process in self.processes.items():
            state = state_of(process)
            if state is not None and state in STOPPED + ON_DISK:
                self.silent_s[rank] = self.silent_s.get(rank, 0.0) + elapsed_s if self._states.get(rank) == state else 0
                self._states[rank] = state
            else:
                self.silent_s.pop(rank, None)

    def stopped(self, at_least_s: float) -> int | None:
        """Return a rank that has been stopped for ``at_least_s`` seconds, or ``None``."""
        return next((rank for rank in self._silent(at_least_s) if self._states[rank] in STOPPED), None)

    def speaks(self) -> bool:
        """Return ``True`` in the first rank of this machine that is running."""
        return all(rank > self.rank or rank in self.silent_s for rank in self.processes)

    def about(self, at_least_s: float) -> dict[int, str]:
        """Return a message about each rank that has been silent for ``at_least_s`` seconds."""
        said = {}
        for rank in self._silent(at_least_s):
            name, process = self.name(rank), self.processes[rank]
            if self._states[rank] in STOPPED:
                said[rank] = f"{name} is stopped, and the others wait for it. Let it go on: kill -CONT {process}"
            else:
                said[rank] = f"{name} is waiting for a disk or network drive, and the others wait for it."
        return said

    def newly_silent(self, at_least_s: float) -> list[str]:
        """Return :meth:`about`'s messages on ranks newly silent since the last call, if this rank speaks."""
        silent = self.about(at_least_s)
        new, self._named = silent.keys() - self._named, set(silent)
        return [silent[rank] for rank in sorted(new)] if self.speaks() else []

    def name(self, rank: int) -> str:
        """Return a rank's name in messages."""
        return f"Rank {rank} (process {self.processes[rank]})"

    def _silent(self, at_least_s: float) -> list[int]:
        return [rank for rank, seconds in sorted(self.silent_s.items()) if seconds >= at_least_s]


def machine() -> str:
    """Return an identifier of this machine or container; empty where the system has none."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def state_of(process: int) -> str | None:
    """Return the letter of a process's state, or ``None`` if there is no such process."""
    try:
        # The process name in parentheses may contain anything.
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
