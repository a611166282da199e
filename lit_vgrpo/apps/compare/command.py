"""``lightning compare``: train several methods on the same task, each run in a process, several at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tqdm import tqdm

from lit_vgrpo.apps.compare.options import CompareOptions
from lit_vgrpo.apps.compare.plan import Run, entrants, runs_of
from lit_vgrpo.apps.compare.report import Curve, write_race, write_sweep
from lit_vgrpo.config.recipe import RESUME
from lit_vgrpo.errors import UserError, counted, one_line, say
from lit_vgrpo.options import Compare
from lit_vgrpo.system.paths import start_folder, typed_path
from lit_vgrpo.system.process import bar
from lit_vgrpo.system.signals import handle_stop_signals, how_it_ended
from lit_vgrpo.training.folder import FolderLock, candidates
from lit_vgrpo.training.resume import ENDED, read_summary

POLL_S = 0.2
GRACE_S = 5.0
"""Time that a process has to end after SIGTERM."""


class Stopped(Exception):
    """The comparison was asked to stop by the signal of this number."""


def compare(typed: Compare) -> int:
    """Train methods from the same start, or, with ``--sweep``, search for their settings; return 1 if a run failed."""
    options = CompareOptions(**vars(typed))
    chosen = entrants(options)
    options.refuse_others_results()  # after the errors in what was typed
    with locked(typed_path(options.out)):
        runs = runs_of(options, chosen)
        size = f"{counted(len(runs), 'run')} of {counted(options.iterations, 'iteration')}"
        verb = "Searching for settings of" if options.sweep else "Comparing"
        what = f"{verb} {', '.join(dict.fromkeys(one.method for one in chosen))} on {options.command.recipe.stem}"
        say(f"{what}: {size}, {options.jobs} at a time, in {options.out}", error=True)
        try:
            errors = run_all(runs, options.jobs)
        except Stopped as stopped:
            say(f"Stopped. Finished runs are kept; continue: {options.line}", error=True)
            return 128 + int(stopped.args[0])
        curves = [Curve.of(run, errors.get(run.name, "")) for run in runs]
        write = write_sweep if options.sweep else write_race
        say(f"{write(options, chosen, curves)}\n\nAll files are in {options.out}.")
    if errors:
        say(f"{len(errors)} of {len(runs)} runs failed. Run the same command to retry them.", error=True)
    return 1 if errors else 0


def is_complete(run: Run) -> bool:
    """Return ``True`` if the run folder holds a run that finished and was evaluated."""
    summary = read_summary(run.folder) or {}
    return summary.get("outcome") in ENDED and bool(summary.get("evaluations"))


def is_finished(run: Run) -> bool:
    """Return ``True`` if a complete run of this recipe and seed exists."""
    return run.fingerprint_file.is_file() and run.fingerprint_file.read_text() == run.fingerprint and is_complete(run)


def run_all(runs: Sequence[Run], jobs: int) -> dict[str, str]:
    """Run the unfinished runs, ``jobs`` processes at a time, and return the error of each failed run by its name.

    Raises:
        Stopped: Ctrl-C, SIGTERM or a closed terminal; all processes started here have ended.
    """
    waiting, errors = [run for run in runs if not is_finished(run)], dict[str, str]()
    active: dict[str, tuple[Run, subprocess.Popen[bytes]]] = {}
    caught: list[int] = []  # handled between polls, so that no started process is lost
    if len(waiting) < len(runs):
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs are already finished.", error=True)
    if others := sum(map(is_complete, waiting)):
        say(
            f"{counted(others, 'finished run')} had other settings: repeated; the old one is kept as NAME.old.",
            error=True,
        )
    ended = bar("Runs", total=len(runs), initial=len(runs) - len(waiting))
    started, todo = time.monotonic(), len(waiting)
    with handle_stop_signals(lambda signum, frame: caught.append(signum)):
        try:
            while waiting or active:
                if caught:
                    raise Stopped(caught[0])
                while waiting and len(active) < jobs:
                    run = waiting.pop(0)
                    active[run.name] = run, _start(run)
                    ended.set_postfix_str(", ".join(active))
                time.sleep(POLL_S)
                ended.refresh()  # its clock
                for name, (run, process) in list(active.items()):
                    if process.poll() is not None:
                        del active[name]
                        ended.update()
                        if error := _error_of(run, process.returncode):
                            errors[name] = error
                        left = _time_left(time.monotonic() - started, todo, len(waiting) + len(active))
                        say(f"{name}: {error or 'finished'} (log: {run.log}){left}", error=True)
        finally:
            ended.close()
            _stop([process for _, process in active.values()])
    return errors


def _time_left(elapsed_s: float, todo: int, left: int) -> str:
    """Return the time that the runs left will take at the pace so far, as text; nothing if none is left.

    >>> _time_left(90.0, todo=4, left=1)
    ', 00:30 left'
    """
    return f", {tqdm.format_interval(elapsed_s / (todo - left) * left)} left" if left else ""


def _start(run: Run) -> subprocess.Popen[bytes]:
    prepare_run_folder(run)
    run.fingerprint_file.write_text(run.fingerprint)
    command = [sys.executable, "-m", "lit_vgrpo", "run", str(run.recipe)]
    command += [f"seed_everything={run.seed}", f"run_dir={run.folder}", RESUME]  # RESUME: in no other folder
    with open(run.log, "wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=start_folder(),
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
            # A separate group: Ctrl-C in the terminal reaches only this process, which stops the runs.
            start_new_session=True,
        )


def prepare_run_folder(run: Run) -> None:
    """Rename what is in a run's place, which may hold files of the user; UserError if a process still writes to it."""
    if run.folder.exists():
        free = (path for path in candidates(run.folder.with_name(f"{run.name}.old")) if not path.exists())
        with locked(run.folder):  # a killed comparison's run continues
            run.folder.rename(next(free))


def _error_of(run: Run, returncode: int) -> str:
    if returncode == 0:
        return "" if is_complete(run) else "ended early, or without an evaluation"
    return last_error(run.log) if returncode > 0 else f"{how_it_ended(returncode)}; if memory ran out, try --jobs 1"


def last_error(log: Path) -> str:
    """Return the last line of a failed process's traceback, or of its log."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (")]
    if starts:
        lines = [line for line in lines[starts[-1] + 1 :] if not line[0].isspace()][:1] or lines
    return one_line(lines[-1]) if lines else "failed without output"


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate the processes and their children; kill those that do not end in time."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder of a comparison or run; raise UserError if another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot create {folder}: {error.strerror}. Choose another folder: --out DIR.") from error
    lock = FolderLock()
    lock.take(folder)
    try:
        yield
    finally:
        lock.release()
