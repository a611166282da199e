"""Checkpoints of a run, and what Ctrl-C does to it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

FIRST_CTRL_C = b"\nFinishing this iteration, then saving. Ctrl-C again stops at once.\n"


class RunCheckpoint(Checkpoint):
    """Saves ``last.ckpt`` every so many iterations and at the end, ``interrupted.ckpt`` on Ctrl-C.

    The first Ctrl-C lets the iteration finish, because only there a checkpoint continues bit for bit; the second one
    stops at once and saves in the middle. Files are written aside and renamed, so none is ever half a checkpoint.

    Args:
        every_n_iterations: iterations between two saves of ``last.ckpt``; 0 leaves that to another callback.

    Raises:
        ValueError: ``every_n_iterations`` is negative.
    """

    def __init__(self, every_n_iterations: int = 10) -> None:
        super().__init__()
        if every_n_iterations < 0:
            raise ValueError(f"every_n_iterations={every_n_iterations} is negative. Use 0 or more.")
        self.every_n_iterations = every_n_iterations
        self.interrupted = False
        self.saved: Path | None = None
        self.training = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT inside the block; Lightning leaves it ignored after an interrupt, so it is put back."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._on_sigint)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        if self.interrupted or not self.training:
            self.interrupted = True
            raise KeyboardInterrupt
        self.interrupted = True
        os.write(2, FIRST_CTRL_C)  # print() is not safe here: the bar may be in the middle of a write

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training = True

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stop = trainer.strategy.reduce_boolean_decision(self.interrupted, all=False)
        if stop:
            self.interrupted = True
            self.saved = self._save(trainer, "interrupted.ckpt")
            trainer.should_stop = True
        elif self._is_due(trainer):
            self._save(trainer, "last.ckpt")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training = False

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt) and self.training and self.saved is None:
            self.saved = self._save(trainer, "interrupted.ckpt")

    def _is_due(self, trainer: Trainer) -> bool:
        if self.every_n_iterations == 0:
            return False
        done = trainer.current_epoch + 1
        steps_done = 0 <= trainer.max_steps <= trainer.global_step
        return done % self.every_n_iterations == 0 or done == trainer.max_epochs or trainer.should_stop or steps_done

    def _save(self, trainer: Trainer, name: str) -> Path:
        folder = Path(trainer.default_root_dir) / "checkpoints"
        path, aside, old = folder / name, folder / f"writing-{name}", folder / f"old-{name}"
        with _sigint_ignored():
            trainer.save_checkpoint(aside)
            if trainer.is_global_zero:
                if path.is_dir():  # DeepSpeed writes folders, which cannot replace one another
                    path.rename(old)
                os.replace(aside, path)
                shutil.rmtree(old, ignore_errors=True)
            trainer.strategy.barrier("run_checkpoint")
        return path

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}


@contextmanager
def _sigint_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
