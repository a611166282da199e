"""A bar, or lines, that show the run's progress."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from tqdm import tqdm

from lit_vgrpo.callbacks.hack_alarm import RewardHackAlarm
from lit_vgrpo.core.ranges import PositiveInt, checked
from lit_vgrpo.errors import say, score_text
from lit_vgrpo.system.process import BAR, bar, shows_bars
from lit_vgrpo.system.signals import is_stop_requested
from lit_vgrpo.training.trainer_internals import callbacks_of

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule


class IterationBar(tqdm):
    """A bar that shows no time left once the run ends before its last iteration, as after Ctrl-C."""

    is_cut_short = False

    @property
    def format_dict(self) -> Any:
        ends = self.is_cut_short or is_stop_requested()
        return super().format_dict | ({"bar_format": BAR.replace("<{remaining}", "")} if ends else {})


@checked
class ProgressBar(LightningProgressBar):
    """Bar of the iterations with the current rewards, speed and time left; without a terminal, lines at intervals.

    On a terminal, bars also show what an iteration is waiting for, from the loading of the weights on.

    Args:
        lines: Number of lines printed over a run without a terminal.
    """

    def __init__(self, lines: PositiveInt = 20) -> None:
        super().__init__()
        self.lines = lines
        self._enabled = True
        self._bar: IterationBar | None = None
        self._shown: dict[str, str] = {}
        self._first = 0
        self._started = self._train_s = 0.0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        shows_bars.set(self._enabled)

    def on_train_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._first, self._started = trainer.current_epoch, time.monotonic()
        if self._enabled and trainer.is_global_zero and sys.stderr.isatty():
            total = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else None
            self._bar = bar("iteration", kind=IterationBar, total=total, initial=self._first, leave=True)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._train_s = pl_module.ledger.stopwatch.wall_s

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: VGRPOModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        record = pl_module.record
        assert record is not None
        votes = [part["given"] for part in record.parts.values() if "given" in part]
        if votes and len(record.parts) == 1:  # whose strengths have a mean of 0 in each group
            self._shown["votes"] = f"{votes[0]:.0f}"
        elif pl_module.objective.needs_reward:
            self._shown["reward"] = score_text(float(record.rewards.nanmean()))
        elif "loss" in record.metrics:
            self._shown["loss"] = f"{float(record.metrics['loss'][-1][-1]):.4f}"
        seconds = pl_module.ledger.stopwatch.wall_s - self._train_s
        speed = record.images / max(seconds, 1e-9)
        self._shown["images/s"] = f"{speed:.{2 if speed < 10 else 1}f}"
        self._show_heldout(pl_module)

    def _show_heldout(self, module: VGRPOModule) -> None:
        if module.evaluator.history:  # of a resumed run before its first evaluation, too
            newest = module.evaluator.history[-1]
            self._shown["held-out"] = score_text(newest.reward) + ("" if newest.iteration else " (start)")
        if self._bar is not None:
            self._bar.set_postfix(self._shown)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        done, total = trainer.current_epoch + 1, trainer.max_epochs or 0
        self._show_heldout(pl_module)
        self._shown.pop("alarm", None)
        if any(alarm.is_on for alarm in callbacks_of(trainer, RewardHackAlarm)):
            self._shown["alarm"] = "reward hacking?"
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=False)
            self._bar.update()
            return
        is_due = done % max(1, total // self.lines) == 0 or done == total
        if is_due and total and self._enabled and trainer.is_global_zero:
            parts = [f"iteration {done}/{total}" if total > 0 else f"iteration {done}"]
            parts += [f"{title} {value}" for title, value in self._shown.items()]
            left_s = (time.monotonic() - self._started) / (done - self._first) * (total - done)
            parts += [f"{tqdm.format_interval(left_s)} left"] if done < total else []
            say(", ".join(parts), error=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        if self._bar is not None:
            self._bar.is_cut_short = self._bar.total is not None and self._bar.n < self._bar.total
            self._show_heldout(pl_module)  # the evaluation at the end
            self._bar.close()
        self._bar = None

    def on_exception(self, trainer: L.Trainer, pl_module: VGRPOModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
