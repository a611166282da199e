"""A live table of the run's progress."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar

from lit_vgrpo.core.ranges import PositiveInt, checked
from lit_vgrpo.errors import say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from lit_vgrpo.module import VGRPOModule

MOST_ROWS = 6
"""Evaluations in the table; earlier ones are in ``metrics.csv``."""
REFRESHES_PER_S = 2
ECHO = 3
"""Columns left free: the ``^C`` that a terminal shows must not wrap, or the table would be drawn a line too low."""


@checked
class ProgressBar(LightningProgressBar):
    """Live table: a row per held-out evaluation and one for the iteration; below, a bar, the time left and the phase.

    Without a terminal, as in a notebook, it prints lines at intervals.

    Args:
        lines: number of lines printed over a run without a terminal.
    """

    def __init__(self, lines: PositiveInt = 20) -> None:
        super().__init__()
        self.lines = lines
        self._enabled = True
        self._live: Live | None = None
        self._cells: dict[int, dict[str, str]] = {}
        self._train_s = 0.0
        self._titles = ["reward", "held-out", "images/s", "s/iteration"]
        self._started = self._ended = 0.0
        self._iterations = 0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_fit_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._start_clock()
        self._titles[0] = "reward" if pl_module.objective.needs_reward else "loss"
        # rich's own check takes a terminal of unknown size for one of 80 columns
        if not self._enabled or not trainer.is_global_zero or not _columns():
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stderr)
        if not console.is_dumb_terminal:
            self._live = Live(
                console=console,
                get_renderable=lambda: self._table(console, trainer, pl_module),
                refresh_per_second=REFRESHES_PER_S,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start()
            console.show_cursor(True)  # it would stay hidden after kill -9

    def on_train_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._start_clock()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._train_s = pl_module.ledger.stopwatch.wall_s

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: VGRPOModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        record = pl_module.record
        assert record is not None
        cells = self._cells.setdefault(record.iteration + 1, {})
        if pl_module.objective.needs_reward:
            cells["reward"] = f"{float(record.rewards.nanmean()):.3f}"
        elif record.losses:
            cells["loss"] = f"{float(record.losses[-1]):.4f}"
        if batch_idx + 1 == trainer.num_training_batches:
            seconds = pl_module.ledger.stopwatch.wall_s - self._train_s
            for title, value in (("images/s", record.images / max(seconds, 1e-9)), ("s/iteration", seconds)):
                cells[title] = f"{value:.0f}" if value >= 100 else f"{value:.3g}"

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        done = trainer.current_epoch + 1
        self._ended, self._iterations = time.monotonic(), self._iterations + 1
        if not self._enabled or not trainer.is_global_zero or self._live or not trainer.max_epochs:
            return
        every = max(1, trainer.max_epochs // self.lines)
        if done % every == 0 or done == trainer.max_epochs:
            say(self._line(trainer, pl_module), error=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: VGRPOModule, exception: BaseException) -> None:
        self._close()

    def _start_clock(self) -> None:
        self._started = self._ended = time.monotonic()
        self._iterations = 0

    def _left_s(self, iterations: int) -> float | None:
        """Return the estimated seconds of further iterations; ``None`` before the first has ended."""
        if not self._iterations:
            return None
        each = (self._ended - self._started) / self._iterations
        return max(0.0, each * iterations - (time.monotonic() - self._ended))

    def _close(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = None

    def _table(self, console: Console, trainer: L.Trainer, module: VGRPOModule) -> Table:
        from rich import box
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table

        console.width = max(1, (_columns() or console.width) - ECHO)
        total, cells = trainer.max_epochs or 0, dict(self._cells)
        rows = Table(
            "iteration", *self._titles, box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", show_edge=False
        )
        for column in rows.columns:
            column.justify, column.no_wrap = "right", True
        heldout = {evaluation.iteration: f"{evaluation.reward:.3f}" for evaluation in list(module.evaluator.history)}
        current = max(cells, default=0)
        for iteration in sorted({*sorted(heldout)[-MOST_ROWS:], current}):
            own = {**cells.get(iteration, {}), "held-out": heldout.get(iteration, "")}
            style = "bold" if iteration == current else ""
            rows.add_row(str(iteration), *(own.get(title, "") for title in self._titles), style=style)
        done = trainer.fit_loop.epoch_progress.current.completed
        steps = trainer.num_training_batches
        part = trainer.fit_loop.batch_idx + 1 if done < current and isinstance(steps, int) else 0
        share = min(1.0, (done + part / max(steps, 1)) / total) if total > 0 else 0.0
        left = self._left_s(total - done) if total > 0 else None
        line = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None, None):
            line.add_column(ratio=ratio, no_wrap=True)
        of = f"/{total}" if total > 0 else ""
        times = f"{clock(time.monotonic() - self._started)} < {'?' if left is None else clock(left)}"
        line.add_row(f"{min(done + 1, total or done + 1)}{of}", Bar(1.0, share), times, module.ledger.current_phase)
        whole = Table.grid()
        whole.add_row(rows)
        whole.add_row(line)
        return whole

    def _line(self, trainer: L.Trainer, module: VGRPOModule) -> str:
        done, total = trainer.current_epoch + 1, trainer.max_epochs or 0
        first, _, *others = self._titles
        cells = self._cells.get(done, {})
        parts = [f"iteration {done}/{total}" if total > 0 else f"iteration {done}"]
        parts += [f"{first} {cells[first]}"] if first in cells else []
        if "heldout/reward" in module.evaluator.latest:
            parts.append(f"held-out {module.evaluator.latest['heldout/reward']:.3f}")
        parts += [f"{cells[name]} {name}" for name in others if name in cells]
        left = self._left_s(total - done)
        return ", ".join([*parts, *([f"{clock(left)} left"] if left is not None and done < total else [])])


def clock(seconds: float) -> str:
    """Return a time as hours, minutes and seconds.

    >>> clock(65), clock(3700.4)
    ('1:05', '1:01:40')
    """
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def _columns() -> int:
    """Return the width of stderr's terminal; 0 if there is none or its size is unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else 0
    except (OSError, ValueError):
        return 0
