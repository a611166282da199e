"""Runs as independent processes, so many at once; what is finished is not run again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lit_vgrpo.apps.compare.plan import Run
from lit_vgrpo.apps.compare.progress import Display, Status
from lit_vgrpo.apps.compare.results import COSTS
from lit_vgrpo.callbacks.progress import clock
from lit_vgrpo.errors import UserError, one_line
from lit_vgrpo.system.signals import handle_stop_signals
from lit_vgrpo.training.folder import FolderLock
from lit_vgrpo.training.resume import read_summary

POLL_S = 0.2
REFRESH_S = 1.0
GRACE_S = 5.0
"""Time that a process has to end after SIGTERM."""


class Stopped(Exception):
    """The comparison was asked to stop.

    Args:
        signum: the signal that asked.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def is_finished(run: Run) -> bool:
    """Return ``True`` if a run of this recipe and seed is there and complete."""
    try:
        same = run.fingerprint_file.read_text() == run.fingerprint
    except OSError:
        return False
    return same and not _shortcoming(run)


def _shortcoming(run: Run) -> str:
    """Return why a run's result cannot be used; empty for a complete one."""
    summary = read_summary(run.folder)
    if summary is None:
        return "it wrote no summary.json"
    if summary.get("outcome") != "finished" or summary.get("iterations") != run.iterations:
        return (
            f"it ended as {summary.get('outcome')!r} after {summary.get('iterations')} of {run.iterations} iterations"
        )
    evaluations = summary.get("evaluations")
    if not evaluations:
        return "its summary.json holds no evaluations"
    lacking = [name for name in COSTS if any(evaluation.get(name) is None for evaluation in evaluations)]
    return f"an earlier version ran it: its summary.json holds no {', '.join(lacking)}" if lacking else ""


def run_all(runs: Sequence[Run], jobs: int) -> list[Status]:
    """Run what is not finished yet, ``jobs`` processes at once.

    Returns:
        A status for each run, in their order; a failed one carries its last line.

    Raises:
        Stopped: by Ctrl-C, SIGTERM or a closed terminal; all processes started here have ended.
    """
    statuses = [Status(run) for run in runs]
    for status in statuses:
        if is_finished(status.run):
            status.keep()
    display = Display(statuses)
    waiting = [status for status in statuses if status.state == "waiting"]
    active: dict[int, tuple[Status, subprocess.Popen[bytes]]] = {}
    refreshed = 0.0
    caught: list[int] = []  # nothing is interrupted, so no started process is lost
    with handle_stop_signals(lambda signum, frame: caught.append(signum)):
        try:
            while waiting or active:
                if caught:
                    raise Stopped(caught[0])
                while waiting and len(active) < jobs:
                    status = waiting.pop(0)
                    process = _start(status, display)
                    active[process.pid] = (status, process)
                    display.refresh()
                time.sleep(POLL_S)
                for pid, (status, process) in list(active.items()):
                    if process.poll() is not None:
                        del active[pid]
                        _finish(status, process.returncode, display)
                if time.monotonic() - refreshed >= REFRESH_S:
                    refreshed = time.monotonic()
                    for status, _ in active.values():
                        status.read()
                    display.refresh()
        finally:
            _stop([process for _, process in active.values()])
    display.close()
    return statuses


def _start(status: Status, display: Display) -> subprocess.Popen[bytes]:
    run = status.run
    aside = clear_the_way(run)
    if aside is not None:
        display.say(f"{run.name} was run with other settings: its folder was moved to {aside}")
    run.fingerprint_file.write_text(run.fingerprint)
    command = [sys.executable, "-m", "lit_vgrpo", "run", str(run.recipe)]
    command += [f"seed_everything={run.seed}", f"run_dir={run.folder}"]
    with open(run.log, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
            # A group of its own: Ctrl-C in the terminal reaches us alone, and we stop it with its own children.
            start_new_session=True,
        )
    status.start()
    if not display.live:
        display.say(f"{run.name}: started")
    return process


def clear_the_way(run: Run) -> Path | None:
    """Remove an unfinished run's folder; move anything else that stands there aside.

    Returns:
        Where the folder was moved to, if it was.
    """
    if not run.folder.exists():
        return None
    summary = read_summary(run.folder)
    if run.fingerprint_file.exists() and (summary is None or summary.get("outcome") != "finished"):
        shutil.rmtree(run.folder)
        return None
    number = 1
    while (aside := run.folder.with_name(f"{run.name}.old{number}")).exists():
        number += 1
    return run.folder.rename(aside)


def _finish(status: Status, returncode: int, display: Display) -> None:
    run = status.run
    status.read()
    error = "" if returncode == 0 else last_error(run.log, returncode)
    if not error and (lack := _shortcoming(run)):
        error = f"{lack[0].upper()}{lack[1:]}."
    status.end(error)
    if error:
        display.say(f"{run.name} failed: {error} (see {run.log})")
        return
    summary = read_summary(run.folder) or {}
    start, end = (_shown(summary.get(f"heldout_reward_{when}")) for when in ("start", "end"))
    display.say(f"{run.name}: held-out {start} -> {end} in {clock(status.seconds)}")


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "?"


def last_error(log: Path, returncode: int) -> str:
    """Return the last line of a failed process's traceback, or of its log."""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = " Out of memory? Try --jobs 1." if name == "SIGKILL" else ""
        return f"Ended by {name}.{hint}"
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (")]
    if starts:
        ends = [line for line in lines[starts[-1] + 1 :] if not line[0].isspace()]
        lines = ends[:1] or lines
    return one_line(lines[-1]) if lines else f"Exit status {returncode} and no output."


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate the processes and their children; kill those that do not end in time."""
    for process in processes:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal_group(process, signal.SIGKILL)
            process.wait()


def _signal_group(process: subprocess.Popen[bytes], signum: int) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a comparison's folder, so that no second one writes to it.

    Raises:
        UserError: Another process holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot create {folder}: {error.strerror}. Set --out /another/folder.") from error
    lock = FolderLock()
    lock.take(folder)
    try:
        yield
    finally:
        lock.release()
