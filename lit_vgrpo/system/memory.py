"""Measurement of memory use."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from lit_vgrpo.errors import counted

_STATUS, _RESET, _MACHINE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")


@dataclass
class MemoryUse:
    """Peak memory of a step above the memory in use before, in bytes; ``gpu`` is ``None`` without a GPU."""

    resident: int = 0
    gpu: int | None = None

    def __str__(self) -> str:
        gpu = "" if self.gpu is None else f", GPU {self.gpu / 2**20:.0f} MiB"
        return f"{self.resident / 2**20:.0f} MiB{gpu}"


_open: list[MemoryUse] = []
"""The blocks being measured, with their highest peaks before a reset inside, such as a phase's."""


def _restart(on_gpu: bool) -> int:
    """Reset the peak of the GPU or of resident memory, and return what it was."""
    peak = torch.cuda.max_memory_allocated() if on_gpu else _bytes_of("VmHWM")
    for use in _open:
        if on_gpu:
            use.gpu = max(use.gpu or 0, peak)
        else:
            use.resident = max(use.resident, peak)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            _RESET.write_text("5")
    return peak


@contextmanager
def measured_memory() -> Iterator[MemoryUse]:
    """Measure the block's peak; outside of Linux, resident memory below an earlier peak is not detected."""
    use = MemoryUse()
    has_gpu = torch.cuda.is_available()
    _restart(on_gpu=False)
    before = _bytes_of("VmRSS") or peak_resident_bytes()
    if has_gpu:
        torch.cuda.synchronize()
        _restart(on_gpu=True)
        gpu_before = torch.cuda.memory_allocated()
    _open.append(use)
    try:
        yield use
    finally:
        _open.pop()
    use.resident = max(0, max(use.resident, _bytes_of("VmHWM") or peak_resident_bytes()) - before)
    if has_gpu:
        use.gpu = max(use.gpu or 0, torch.cuda.max_memory_allocated()) - gpu_before


class PeakMemory:
    """Peak memory of this process by phase of a run, in bytes: allocated on its GPU, or else resident.

    Resident memory is measured on Linux only.

    Attributes:
        by_phase: By phase, the highest peak so far.
        most: Highest peak so far: reserved by torch on a GPU, or else resident.
    """

    def __init__(self) -> None:
        self.by_phase: dict[str, int] = {}
        self.most = 0
        self._phase = ""

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Attribute the block's peak to a phase."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def enter(self, phase: str) -> str:
        """Start a phase (an empty name for none), and return the previous one."""
        left, self._phase = self._phase, phase
        if torch.cuda.is_initialized() and torch.cuda.max_memory_reserved():
            whole = torch.cuda.max_memory_reserved()
            peak = _restart(on_gpu=True)
        else:
            peak = whole = _restart(on_gpu=False)
        self.most = max(self.most, whole)
        if left and peak:
            self.by_phase[left] = max(self.by_phase.get(left, 0), peak)
        return left


def device_name(device: torch.device) -> str:
    """Describe a device: a GPU by its name, a CPU by its architecture and torch's threads."""
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        return f"{torch.cuda.get_device_name(device)} ({memory:.0f} GiB, {device})"
    if device.type == "cpu":
        return f"CPU ({platform.machine()}, {counted(torch.get_num_threads(), 'thread')})"
    return str(device)


def idle_gpu(device: torch.device) -> str | None:
    """Return the name of a GPU that is present but not used, or None."""
    return torch.cuda.get_device_name() if device.type == "cpu" and torch.cuda.is_available() else None


def peak_resident_bytes() -> int:
    """Return the process's peak resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int:
    """Return the machine's available memory; the total if the system does not report it."""
    return _bytes_of("MemAvailable", _MACHINE) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _bytes_of(name: str, account: Path = _STATUS) -> int:
    """Return an entry of Linux's status of the process or machine, in bytes; 0 if there is none."""
    lines = account.read_text().splitlines() if account.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
