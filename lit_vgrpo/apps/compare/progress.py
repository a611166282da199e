"""Progress of each run, read from its files, and the display of all runs."""

from __future__ import annotations

import csv
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from lit_vgrpo.apps.compare.plan import Run
from lit_vgrpo.callbacks.progress import clock
from lit_vgrpo.errors import without_controls

BAR_WIDTH = 16
LINE_EVERY_S = 60.0
"""Interval of the summary line if the output is not a terminal."""


@dataclass
class Status:
    """One run, as the display shows it.

    Attributes:
        state: waiting, running, finished, kept (was finished before) or failed.
        iteration: iterations done.
        reward: mean training reward of the last iteration.
        heldout: last held-out reward.
        error: the last line of a run that failed.
    """

    run: Run
    state: str = "waiting"
    iteration: int = 0
    reward: float | None = None
    heldout: float | None = None
    error: str = ""
    started: float = 0.0
    seconds: float = 0.0

    def keep(self) -> None:
        """Count the run as finished before."""
        self.state, self.iteration = "kept", self.run.iterations

    def start(self) -> None:
        """Count the seconds from now on."""
        self.state, self.started = "running", time.monotonic()

    def end(self, error: str) -> None:
        """Stop counting.

        Args:
            error: why the run failed; empty if it finished.
        """
        self.seconds, self.error = time.monotonic() - self.started, error
        self.state = "failed" if error else "finished"
        self.iteration = self.iteration if error else self.run.iterations

    def read(self) -> None:
        """Read the latest values from the run's ``metrics.csv``, ignoring a partially written line."""
        try:
            with open(self.run.folder / "metrics.csv", newline="") as file:
                rows = list(csv.DictReader(file))
        except (OSError, csv.Error, UnicodeDecodeError):
            return
        for row in rows:
            if number(row.get("reward/mean")) is not None and (epoch := number(row.get("epoch"))) is not None:
                self.iteration = int(epoch) + 1
                self.reward = number(row.get("reward/mean"))
            heldout = number(row.get("heldout/reward"))
            self.heldout = self.heldout if heldout is None else heldout

    def text(self) -> str:
        """Return a line on the run."""
        total = self.run.iterations
        filled = BAR_WIDTH * min(self.iteration, total) // total
        shown = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {self.iteration:>3}/{total}"
        if self.reward is not None:
            shown += f"  reward {self.reward:.3f}"
        if self.heldout is not None:
            shown += f"  held-out {self.heldout:.3f}"
        return shown


def number(text: str | None) -> float | None:
    """Return the number in a table's cell, ``None`` for an empty or partially written one.

    >>> number("0.5"), number(""), number(None), number("0.5e")
    (0.5, None, None, None)
    """
    try:
        return float(text) if text else None
    except ValueError:
        return None


def totals(statuses: Sequence[Status], elapsed: float) -> str:
    """Return a line on all runs, with the remaining time at the current pace."""
    states = [status.state for status in statuses]
    done = states.count("finished") + states.count("kept")
    words = [f"{done}/{len(states)} runs done"]
    if kept := states.count("kept"):
        words[0] += f" ({kept} from before)"
    words += [f"{states.count('running')} running"]
    if failed := states.count("failed"):
        words.append(f"{failed} failed")
    words.append(clock(elapsed))
    here = [status for status in statuses if status.state in ("waiting", "running", "finished")]
    work = sum(status.run.iterations for status in here)
    behind = sum(status.run.iterations if status.state == "finished" else status.iteration for status in here)
    if 0 < behind < work:
        words.append(f"about {clock(elapsed * (work - behind) / behind)} left")
    return ", ".join(words)


class Display:
    """A line per active run and a summary, redrawn on a terminal; elsewhere a line per event.

    Args:
        statuses: Status of every run, in starting order.
        stream: Output stream; stderr by default, so that stdout has only the tables.
    """

    def __init__(self, statuses: Sequence[Status], stream: TextIO | None = None) -> None:
        self.statuses = statuses
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty()
        self._drawn = 0
        self._started = time.monotonic()
        self._last_line = self._started
        self._width = max((len(status.run.name) for status in statuses), default=0)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._erase()
        print(without_controls(text), file=self.stream, flush=True)
        self.refresh()

    def refresh(self) -> None:
        """Draw the current state."""
        now = time.monotonic()
        if not self.live:
            if now - self._last_line >= LINE_EVERY_S:
                self._last_line = now
                print(totals(self.statuses, now - self._started), file=self.stream, flush=True)
            return
        self._erase()
        active = [status for status in self.statuses if status.state == "running"]
        lines = [f"  {status.run.name:<{self._width}}  {status.text()}" for status in active]
        lines.append(totals(self.statuses, now - self._started))
        columns = shutil.get_terminal_size().columns
        # A wrapped line would make the number of lines to erase wrong.
        self.stream.write("".join(f"{line[: columns - 1]}\n" for line in lines))
        self.stream.flush()
        self._drawn = len(lines)

    def close(self) -> None:
        """Draw the final totals."""
        if not self.live:
            self._last_line = -LINE_EVERY_S
        self.refresh()

    def _erase(self) -> None:
        if self.live and self._drawn:
            self.stream.write(f"\x1b[{self._drawn}F\x1b[J")
            self._drawn = 0
