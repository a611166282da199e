"""A live table of the run's progress."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar

from lit_vgrpo.core.ranges import PositiveInt, checked
from lit_vgrpo.errors import say
from lit_vgrpo.module import VGRPOModule

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

MOST_ROWS = 6
"""Evaluations in the table; earlier ones are in ``metrics.csv``."""
NOTEBOOK_COLUMNS = 72
REFRESHES_PER_S = 2
ECHO = 3
"""Columns left free: the ``^C`` that a terminal shows must not wrap, or the table would be drawn a line too low."""
CELLS = ("reward", "images/s", "s/iteration")


class Pace(NamedTuple):
    """Iterations done since training started, and when the last one ended.

    Attributes:
        started: In seconds of ``time.monotonic``.
        ended: The same.
    """

    started: float
    ended: float
    iterations: int = 0

    def left_s(self, iterations: int, now: float) -> float | None:
        """Return the seconds that so many further iterations take; ``None`` before the first has ended."""
        if not self.iterations:
            return None
        return max(0.0, (self.ended - self.started) / self.iterations * iterations - (now - self.ended))


@checked
class ProgressBar(LightningProgressBar):
    """Live table: a row per held-out evaluation and one for the iteration; below, a bar, the time left and the phase.

    In a notebook it is the cell's output, updated in place. Without a terminal it prints lines at intervals.

    Args:
        lines: number of lines printed over a run without a terminal.
    """

    def __init__(self, lines: PositiveInt = 20) -> None:
        super().__init__()
        self.lines = lines
        self._enabled = True
        self._live: Live | None = None
        self._notebook: Any = None
        self._shown_at = 0.0
        self._cells: dict[int, dict[str, str]] = {}
        self._train_s = 0.0
        self._pace = Pace(0, 0)
        self._first_column = "reward"

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VGRPOModule)
        now = time.monotonic()
        self._cells, self._pace = {}, Pace(now, now)
        self._first_column = "reward" if pl_module.objective.needs_reward else "loss"
        if self._enabled and trainer.is_global_zero:
            self._open(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now = time.monotonic()
        self._pace = Pace(now, now)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, VGRPOModule)
        self._train_s = pl_module.ledger.stopwatch.wall_s

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, VGRPOModule)
        record = pl_module.record
        assert record is not None
        cells = self._cells.setdefault(record.iteration + 1, {})
        if pl_module.objective.needs_reward:
            cells["reward"] = f"{float(record.rewards.nanmean()):.3f}"
        elif record.losses:
            cells["loss"] = f"{float(record.losses[-1]):.4f}"
        if batch_idx + 1 == trainer.num_training_batches:
            seconds = pl_module.ledger.stopwatch.wall_s - self._train_s
            cells |= {"images/s": _digits(record.images / max(seconds, 1e-9)), "s/iteration": _digits(seconds)}
        self._refresh(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        done = trainer.current_epoch + 1
        self._pace = Pace(self._pace.started, time.monotonic(), self._pace.iterations + 1)
        if not self._enabled or not trainer.is_global_zero or self._live or self._notebook or not trainer.max_epochs:
            return
        every = max(1, trainer.max_epochs // self.lines)
        if done % every == 0 or done == trainer.max_epochs:
            say(self._line(trainer, pl_module), error=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close(trainer, pl_module)

    def _open(self, trainer: L.Trainer, module: VGRPOModule) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=sys.stderr)
        if console.is_jupyter:
            from IPython.display import display

            self._notebook = display(self._table(trainer, module, NOTEBOOK_COLUMNS), display_id=True)
        elif _columns() and not console.is_dumb_terminal:
            self._live = Live(
                console=console,
                get_renderable=lambda: self._sized(console, trainer, module),
                refresh_per_second=REFRESHES_PER_S,
                redirect_stdout=sys.stdout.isatty(),
            )
            self._live.start()
            console.show_cursor(True)  # it would stay hidden after kill -9

    def _refresh(self, trainer: L.Trainer, module: VGRPOModule, at_once: bool = False) -> None:
        """Update a notebook's output; a terminal's is updated by a thread, so that the time goes on in long phases."""
        now = time.monotonic()
        if self._notebook is not None and (at_once or now > self._shown_at + 1 / REFRESHES_PER_S):
            self._shown_at = now
            self._notebook.update(self._table(trainer, module, NOTEBOOK_COLUMNS))

    def _close(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, VGRPOModule)
        self._refresh(trainer, module, at_once=True)
        if self._live is not None:
            self._live.stop()
        self._live = self._notebook = None

    def _sized(self, console: Console, trainer: L.Trainer, module: VGRPOModule) -> Table:
        console.width = max(1, (_columns() or console.width) - ECHO)
        return self._table(trainer, module)

    def _table(self, trainer: L.Trainer, module: VGRPOModule, columns: int | None = None) -> Table:
        from rich import box
        from rich.progress_bar import ProgressBar as Bar
        from rich.table import Table

        now, total = time.monotonic(), trainer.max_epochs or 0
        titles = (self._first_column, "held-out", *CELLS[1:])
        rows = Table("iteration", *titles, box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", show_edge=False)
        for column in rows.columns:
            column.justify, column.no_wrap = "right", True
        heldout = {evaluation.iteration: f"{evaluation.reward:.3f}" for evaluation in list(module.evaluator.history)}
        cells = dict(self._cells)
        current = max(cells, default=0)
        for iteration in sorted({*sorted(heldout)[-MOST_ROWS:], current}):
            own = {**cells.get(iteration, {}), "held-out": heldout.get(iteration, "")}
            style = "bold" if iteration == current else ""
            rows.add_row(str(iteration), *(own.get(title, "") for title in titles), style=style)
        done = trainer.fit_loop.epoch_progress.current.completed
        steps = trainer.num_training_batches
        part = trainer.fit_loop.batch_idx + 1 if done < current and isinstance(steps, int) else 0
        share = min(1.0, (done + part / max(steps, 1)) / total) if total > 0 else 0.0
        left = self._pace.left_s(total - done, now) if total > 0 else None
        line = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None, None):
            line.add_column(ratio=ratio, no_wrap=True)
        of = f"/{total}" if total > 0 else ""
        times = f"{clock(now - self._pace.started)} < {'?' if left is None else clock(left)}"
        line.add_row(f"{min(done + 1, total or done + 1)}{of}", Bar(1.0, share), times, module.ledger.current_phase)
        whole = Table.grid()
        whole.width = columns
        whole.add_row(rows)
        whole.add_row(line)
        return whole

    def _line(self, trainer: L.Trainer, module: L.LightningModule) -> str:
        assert isinstance(module, VGRPOModule)
        done, total = trainer.current_epoch + 1, trainer.max_epochs or 0
        cells = self._cells.get(done, {})
        parts = [f"iteration {done}/{total}" if total > 0 else f"iteration {done}"]
        if self._first_column in cells:
            parts.append(f"{self._first_column} {cells[self._first_column]}")
        if "heldout/reward" in module.evaluator.latest:
            parts.append(f"held-out {module.evaluator.latest['heldout/reward']:.3f}")
        parts += [f"{cells[name]} {name}" for name in CELLS[1:] if name in cells]
        left = self._pace.left_s(total - done, time.monotonic())
        return ", ".join([*parts, *([f"{clock(left)} left"] if left is not None and done < total else [])])


def _digits(value: float) -> str:
    """Return a rate or a time with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


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
