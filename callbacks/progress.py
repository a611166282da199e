"""A progress bar with iterations and rewards."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from tqdm import tqdm

from lit_vgrpo.core.ranges import PositiveInt, checked
from lit_vgrpo.errors import say
from lit_vgrpo.module import VGRPOModule

NARROW = 90
"""Minimum columns; below it the text would push out the times."""


@checked
class ProgressBar(LightningProgressBar):
    """One bar for the whole run: iteration, reward, held-out reward, step, time left.

    Without a terminal it prints lines at intervals instead.

    Args:
        lines: number of lines printed over a run without a terminal.
    """

    def __init__(self, lines: PositiveInt = 20) -> None:
        super().__init__()
        self.lines = lines
        self._enabled = True
        self._bar: tqdm | None = None

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        tqdm.write(" ".join(map(str, args)))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._enabled or not trainer.is_global_zero:
            return
        steps = int(trainer.num_training_batches)
        total = trainer.max_epochs * steps if trainer.max_epochs and trainer.max_epochs > 0 else None
        self._bar = tqdm(
            total=total,
            initial=trainer.current_epoch * steps,
            disable=_columns() == 0,
            dynamic_ncols=True,
            bar_format="{desc} {elapsed}<{remaining} {percentage:3.0f}%|{bar}|",
        )
        self._describe(trainer, pl_module, 0)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is None:
            return
        self._bar.update(1)
        self._describe(trainer, pl_module, batch_idx + 1)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._bar is None or not self._bar.disable or not trainer.max_epochs:
            return
        done, every = trainer.current_epoch + 1, max(1, trainer.max_epochs // self.lines)
        if done % every == 0 or done == trainer.max_epochs:
            say(self._text(trainer, pl_module), error=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _describe(self, trainer: L.Trainer, pl_module: L.LightningModule, step: int) -> None:
        assert self._bar is not None
        if self._bar.disable:
            return
        text = self._text(trainer, pl_module)
        if _columns() < NARROW:
            text = text.removeprefix("iteration ")
        else:
            text += f", step {step}/{trainer.num_training_batches}"
        self._bar.set_description_str(text)

    def _text(self, trainer: L.Trainer, pl_module: L.LightningModule) -> str:
        assert isinstance(pl_module, VGRPOModule)
        text = f"iteration {min(trainer.current_epoch + 1, trainer.max_epochs or 0)}/{trainer.max_epochs}"
        record = pl_module.record
        if record is not None and pl_module.objective.needs_reward:
            text += f", reward {float(record.rewards.nanmean()):.3f}"
        elif record is not None and record.losses:
            text += f", loss {float(record.losses[-1]):.4f}"
        if "heldout/reward" in pl_module.heldout:
            text += f", held-out {pl_module.heldout['heldout/reward']:.3f}"
        return text


def _columns() -> int:
    """Return the width of stderr's terminal; 0 if there is none or its size is unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else 0
    except (OSError, ValueError):
        return 0
