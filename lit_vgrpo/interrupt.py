"""Checkpoints of a run, and what Ctrl-C and SIGTERM do to it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lit_vgrpo.best import AUTO, BestEvaluation, NewestEvaluation
from lit_vgrpo.checkpoint_file import DRAFT_PREFIX, put_in_place
from lit_vgrpo.errors import one_line, say, suggestion
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.run_folder import BEST, CHECKPOINTS

LAST, PREVIOUS, INTERRUPTED = "last.ckpt", "previous.ckpt", "interrupted.ckpt"
FIRST_CTRL_C = b"\nFinishing this iteration, then saving. Ctrl-C again stops at once.\n"


class RunCheckpoint(Checkpoint):
    """Saves ``last.ckpt`` every so often and at the end, ``best.ckpt``, and ``interrupted.ckpt`` on Ctrl-C and SIGTERM.

    The first Ctrl-C lets the iteration finish; the second one stops at once and, on one rank, saves in the middle.
    SIGTERM, to any rank, saves after the micro-batch under way and stops. Files are written aside and renamed, so none
    is ever half a checkpoint; one that cannot be written leaves those before it, and training goes on.

    Args:
        every_n_iterations: iterations between two saves of ``last.ckpt``; 0 leaves that to another callback.
        keep_previous: keep the last but one as ``previous.ckpt``, for the case that ``last.ckpt`` gets damaged.
        best: the held-out metric, higher is better, by which ``best.ckpt`` is kept, of the evaluations while training;
            ``auto`` takes the reward that is not trained on where the recipe names one, else the one that is. null
            keeps none; so does ``auto`` where another callback saves.

    Attributes:
        interrupted: Ctrl-C was pressed.
        terminated: SIGTERM came.
        saved: the ``interrupted.ckpt`` that was written.
        unsaved: why the newest save failed; ``None`` when it did not.

    Raises:
        ValueError: ``every_n_iterations`` is negative, or ``best`` is better when lower.
    """

    def __init__(self, every_n_iterations: int = 10, keep_previous: bool = True, best: str | None = AUTO) -> None:
        super().__init__()
        if every_n_iterations < 0:
            raise ValueError(f"every_n_iterations={every_n_iterations} is negative. Use 0 or more.")
        self.every_n_iterations = every_n_iterations
        self.keep_previous = keep_previous
        self.best = None if best is None else BestEvaluation(best)
        self.interrupted = False
        self.terminated = False
        self.training = False
        self.saved: Path | None = None
        self.unsaved: str | None = None
        self._leaving = False
        self._is_through = False
        self._newest = NewestEvaluation()

    # --- signals ---------------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM inside the block; Lightning changes both, so they are put back."""
        with ExitStack() as stack:
            stack.enter_context(_handled(signal.SIGINT, self._on_sigint))
            stack.enter_context(_handled(signal.SIGTERM, self._on_sigterm))
            yield

    def _on_sigint(self, signum: int, frame: FrameType | None) -> None:
        if self.interrupted or not self.training:
            self.interrupted = True
            raise KeyboardInterrupt
        self.interrupted = True
        os.write(2, FIRST_CTRL_C)  # print() is not safe here: the bar may be in the middle of a write

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self.terminated = True
        if not self.training:
            raise SIGTERMException

    # --- hooks, in the order they fire -----------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's own handler, set just before, talks to the other ranks from within: that may hang.
        if self._on_sigterm in getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", ()):
            signal.signal(signal.SIGTERM, self._on_sigterm)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training = True
        self._leave()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.training = True
        self._leave()

    def _leave(self) -> None:
        # Here and not where the checkpoint is written, so that the loggers have had their row.
        if self._leaving:
            raise SIGTERMException

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # After any micro-batch: an update may take longer than a job is given, and its images are in the checkpoint.
        if self._any_rank(trainer, self.terminated):
            self.terminated = True
            self.saved = self._save(trainer, INTERRUPTED)
            # After the last step comes the iteration's end, and perhaps an evaluation, whose result must not be lost.
            self._leaving = not trainer.is_last_batch

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        terminated = self._any_rank(trainer, self.terminated)
        interrupted = self._any_rank(trainer, self.interrupted)
        if not terminated:  # then there is time for one checkpoint
            self._keep_best(trainer, pl_module)
        if (terminated or interrupted) and not self._is_final(trainer):
            self.terminated, self.interrupted = terminated, interrupted
            self.saved = self._save(trainer, INTERRUPTED)
            self._leaving = terminated
            trainer.should_stop = not terminated
        else:
            self._is_through = self._is_final(trainer)
            if self._is_due(trainer):
                self._save(trainer, LAST)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep_best(trainer, pl_module)  # the end has an evaluation of its own where the last one was earlier
        self.training = False
        if self._is_through:
            self.terminated = self.interrupted = False  # a signal came while the run was ending by itself

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Saving takes all ranks, and the others may be waiting for this one elsewhere.
        alone = trainer.world_size == 1
        if isinstance(exception, KeyboardInterrupt) and self.training and self.saved is None and alone:
            self.saved = self._save(trainer, INTERRUPTED)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.best is None or self.best.name is None else {"best": self.best.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.best is not None and "best" in state_dict:
            self.best.load_state_dict(state_dict["best"])

    # --- saving ----------------------------------------------------------------------------------------------------

    def _keep_best(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the best checkpoint where the newest evaluation is of these weights and the best so far."""
        assert isinstance(pl_module, VGRPOModule)
        if self.best is None or not self._newest.is_new(pl_module.heldout_step, trainer.global_step):
            return
        if self.best.metric == AUTO and self.every_n_iterations == 0:
            return
        if not self.best.is_in(pl_module.heldout):
            metric, known = self.best.metric, suggestion(self.best.metric, pl_module.heldout)
            rank_zero_warn(f"No evaluation measured best={metric}, so that no {BEST} is kept. {known}")
        if not trainer.strategy.broadcast(self.best.improved_by(pl_module.heldout)):
            return
        before, unsaved = self.best.state_dict(), self.unsaved
        self.best.take(pl_module.heldout, pl_module.evaluations[-1].iteration)
        if self._save(trainer, BEST) is None:
            self.best.load_state_dict(before)
        self.unsaved = unsaved  # which says whether the run's end is lost

    def _is_final(self, trainer: Trainer) -> bool:
        epochs_done = trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch + 1
        steps_done = 0 <= trainer.max_steps <= trainer.global_step
        return epochs_done or trainer.should_stop or steps_done

    def _is_due(self, trainer: Trainer) -> bool:
        if self.every_n_iterations == 0:
            return False
        return (trainer.current_epoch + 1) % self.every_n_iterations == 0 or self._is_final(trainer)

    def _save(self, trainer: Trainer, name: str) -> Path | None:
        """Write a checkpoint; called on every rank, and each learns how it went.

        Returns:
            The file; ``None`` when it could not be written.
        """
        path = Path(trainer.default_root_dir) / CHECKPOINTS / name
        with _handled(signal.SIGINT, signal.SIG_IGN):
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            # Without the barrier of Trainer.save_checkpoint, in which the others would wait for a rank that failed.
            self.unsaved = trainer.strategy.broadcast(self._write(trainer, checkpoint, path))
        if self.unsaved is None:
            return path
        if trainer.is_global_zero:
            is_last_try = name == INTERRUPTED or self._is_final(trainer)
            then = "Make room and take up the run again with --resume" if is_last_try else "The next save tries again"
            if name == BEST:
                then = "The next evaluation that is better tries again"
            say(f"{self.unsaved} {then}.", error=True)
        return None

    def _write(self, trainer: Trainer, checkpoint: dict[str, Any], path: Path) -> str | None:
        """Write and name the file; returns what to say where that fails."""
        draft = path.with_name(DRAFT_PREFIX + path.name)
        try:
            trainer.strategy.save_checkpoint(checkpoint, draft)
            if trainer.is_global_zero:
                keep = self.keep_previous and path.name == LAST
                put_in_place(draft, path, path.with_name(PREVIOUS) if keep else None)
        except (OSError, RuntimeError) as error:
            if not isinstance(error, OSError) and "PytorchStreamWriter" not in str(error):
                raise
            draft.unlink(missing_ok=True)
            return _what_failed(path, error)
        return None

    @staticmethod
    def _any_rank(trainer: Trainer, flag: bool) -> bool:
        return trainer.strategy.reduce_boolean_decision(flag, all=False)


def _what_failed(path: Path, error: Exception) -> str:
    folder = next(parent for parent in path.parents if parent.exists())
    reason = getattr(error, "strerror", None) or one_line(error)
    room = f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free"
    kept = [name for name in (LAST, PREVIOUS, BEST, INTERRUPTED) if path.with_name(name).exists()]
    stays = f"What was saved before stays: {', '.join(kept)}." if kept else "Nothing was saved before."
    return f"Cannot save {path}: {reason} ({room}). {stays}"


@contextmanager
def _handled(signum: signal.Signals, handler: Any) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, before)
