"""Checkpoints of a run, including the best, and its response to Ctrl-C, SIGTERM and a closed terminal."""

from __future__ import annotations

import math
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lit_vgrpo.core.gather import rank_and_world_size
from lit_vgrpo.core.ranges import NonNegativeInt, checked
from lit_vgrpo.core.records import FINGERPRINT
from lit_vgrpo.errors import RaisedOnAllRanks, counted, one_line, say, suggestion
from lit_vgrpo.system.paths import draft_of
from lit_vgrpo.system.signals import StopRequests
from lit_vgrpo.training.checkpoint_file import CheckpointDamage, put_in_place, read
from lit_vgrpo.training.folder import BEST, CHECKPOINTS, INTERRUPTED, LAST, PREVIOUS
from lit_vgrpo.training.resume import newest_checkpoint
from lit_vgrpo.training.trainer_internals import run_folder
from lit_vgrpo.training.watchdog import Watch

AUTO = "auto"
UNTRAINED, TRAINED = "heldout/untrained_reward", "heldout/reward"
DISTANCES = ("heldout/fid", "heldout/kid")
FIRST_CTRL_C = "Finishing this {}, then {}. Ctrl-C again {}."
SAVES_AND_STOPS = "saves and stops at once; a third time ends without saving"
STOPS = "stops at once, without saving"  # several processes
SAVING = "saving, evaluating and drawing samples"
CTRL_C_IN_A_WAIT = "Saving without waiting for {}. Ctrl-C again stops at once."


MOST_FAILED = 0.1
"""Share of held-out images that may have no value of the metric in the best evaluation: a mean of few says little."""


@dataclass(frozen=True)
class BestEvaluation:
    """The highest value of a held-out metric so far; NaN is never the best.

    Args:
        metric: Key of the metric; ``auto`` takes the untrained reward if there is one, else the trained one.
        name: The metric of ``value``; ``None`` before the first evaluation.
        iteration: Iterations done at that evaluation.
        fingerprint: That of the evaluation, if it was read from ``best.ckpt``; 0 if unknown.
    """

    metric: str = AUTO
    name: str | None = None
    value: float = -math.inf
    iteration: int = 0
    fingerprint: int = 0

    def __post_init__(self) -> None:
        if self.metric.startswith(DISTANCES):
            raise ValueError(f"best={self.metric} is better when lower. Use a reward such as {TRAINED}, or auto.")

    def name_in(self, heldout: Mapping[str, float]) -> str:
        """Return the key of the metric in those of an evaluation."""
        return (UNTRAINED if UNTRAINED in heldout else TRAINED) if self.metric == AUTO else self.metric

    def improved_by(self, heldout: Mapping[str, float], iteration: int) -> BestEvaluation | None:
        """Return an evaluation after ``iteration`` iterations if it is better than all before it, else ``None``."""
        name = self.name_in(heldout)
        known = self.value if name == self.name else -math.inf
        if not heldout.get(name, math.nan) > known:
            return None
        return replace(self, name=name, value=heldout[name], iteration=iteration)

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "iteration": self.iteration}

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g} after {counted(self.iteration, 'iteration')}"


@checked
class RunCheckpoint(Checkpoint):
    """Saves ``last.ckpt`` periodically and at the end, ``best.ckpt``, and ``interrupted.ckpt`` on Ctrl-C and SIGTERM.

    After the first Ctrl-C the run finishes its iteration, saves and stops. After SIGTERM or SIGHUP on any rank, or
    Ctrl-C under torchrun, it finishes only its micro-batch. A second signal stops at once and, on a single rank, saves
    mid-iteration; a third does not wait for that. On a single rank, an error such as one of the reward saves, unless
    it came while the weights were updated; on several ranks, only that of a reward that failed on all images does.
    Files are written atomically: a failed save leaves the earlier checkpoints unchanged, and training continues.
    ``best.ckpt`` holds the start until an evaluation is better.

    Args:
        every_n_iterations: Iterations between saves of ``last.ckpt``, of which the one before becomes
            ``previous.ckpt``; 0 saves none, not even at the end, and leaves them to another callback.
        best: Held-out metric, higher is better, by which ``best.ckpt`` is kept; ``auto`` is the untrained reward if
            the recipe has one, else the trained one, or none with ``every_n_iterations=0``. null keeps none. An
            evaluation in which more than a tenth of the images have no value of it, because a reward failed, is left
            out.

    Attributes:
        interrupted: Ctrl-C was pressed.
        terminated: SIGTERM, SIGHUP, torchrun's SIGINT or SLURM's signal to requeue was received.
        requeues: It was SLURM's signal to requeue, such as SIGUSR1.
        status: Exit status for the received signals, as in a shell; ``None`` without one.
        saved: Checkpoint of the current state; ``None`` once training has continued.
        unsaved: Reason that the latest save failed; ``None`` if it succeeded.

    Raises:
        ValueError: ``every_n_iterations`` is negative, or ``best`` is better when lower.
    """

    def __init__(self, every_n_iterations: NonNegativeInt = 10, best: str | None = AUTO) -> None:
        super().__init__()
        self.every_n_iterations = every_n_iterations
        self.best = None if best is None else BestEvaluation(best)
        self.interrupted = self.terminated = self.requeues = self.training = False
        self.saved: Path | None = None
        self.unsaved: str | None = None
        self.status: int | None = None
        self._requests: _Requests | None = None
        self._leaving = self._within_update = False
        self._is_through = False
        self._saved_step = -1
        self._seen: Any = None  # evaluation
        self._saved_evaluation: Any = None  # that of the weights in the checkpoint ``saved``, if it holds one
        self._aside: str | None = None  # name for a best checkpoint of other images or rewards

    # --- signals ---------------------------------------------------------------------------------------------------

    @contextmanager
    def listening(self, watch: Watch | None = None) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and SIGHUP inside the block; ``watch`` ends the process if the main thread cannot."""
        requests = _Requests(self, watch or Watch())
        with requests.listening():
            self._requests = requests
            try:
                yield
            finally:
                self._requests = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_requests": None}  # spawned ranks handle no signals

    # --- hooks, in the order they fire -----------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning's own handler, set just before, runs a collective, which may hang.
        if self._requests is not None and self._requests.on_signal in getattr(
            signal.getsignal(signal.SIGTERM), "signal_handlers", ()
        ):
            signal.signal(signal.SIGTERM, self._requests.on_signal)
        # That for SLURM saves at once, perhaps averaged weights that are swapped in.
        requeue: Any = getattr(trainer._accelerator_connector.cluster_environment, "requeue_signal", None)
        if None not in (self._requests, requeue) and hasattr(signal.getsignal(requeue), "signal_handlers"):
            signal.signal(requeue, self._on_requeue)
        self._saved_step = trainer.global_step
        self._keep_best(trainer, pl_module)  # the start, which no later evaluation may reach

    def _on_requeue(self, signum: int, frame: FrameType | None) -> None:
        self.requeues = True
        signal.raise_signal(signal.SIGTERM)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training = True
        if self._leaving:  # not where the checkpoint is written: later hooks must run first
            raise SIGTERMException

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.training = True  # a resumed epoch does not start
        self._within_update = False
        self.saved = None

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # Also within an update, which may take longer than the job has left.
        if self._within_update:
            self._leave_if_terminated(trainer)
        self._within_update = True

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._requests is not None:
            self._requests.hold()  # half an update must not be saved

    @override
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._within_update = False
        if self._requests is not None:
            self._requests.release()
        iteration: Any = pl_module.iteration
        if not iteration.is_over:
            self._leave_if_terminated(trainer)

    def _leave_if_terminated(self, trainer: Trainer) -> None:
        """Save the unfinished iteration with its images, and stop, if any rank was told to."""
        if _any_rank(trainer, self.terminated):
            self.terminated = self._leaving = True
            self._save(trainer, INTERRUPTED)
            raise SIGTERMException

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # The epoch ends first, perhaps with an evaluation, whose result must not be lost.
        if _any_rank(trainer, self.terminated):
            self.terminated = True
            self._save(trainer, INTERRUPTED)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not _any_rank(trainer, self.terminated):  # that leaves time for only one checkpoint
            self._keep_best(trainer, pl_module)
        self._is_through = is_final = self._is_final(trainer)
        is_asked = not is_final and self._is_asked_to_stop(trainer)
        if is_asked or self._is_due(trainer):
            self._save(trainer, INTERRUPTED if is_asked else LAST)
            if not is_final and self._is_asked_to_stop(trainer):  # perhaps while it was being written
                self._leaving = self.terminated
                trainer.should_stop = not self.terminated

    def _is_asked_to_stop(self, trainer: Trainer) -> bool:
        self.terminated = _any_rank(trainer, self.terminated)
        self.interrupted = _any_rank(trainer, self.interrupted)
        return self.terminated or self.interrupted

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep_best(trainer, pl_module)  # a final evaluation may have run
        evaluator: Any = pl_module.evaluator
        if self.saved is not None and evaluator.newer_than(self._saved_evaluation, trainer.global_step) is not None:
            saved, unsaved = self.saved, self.unsaved
            self._save(trainer, saved.name)  # a resumed run compares with that evaluation
            self.saved, self.unsaved = saved, unsaved
        self.training = False
        if self._is_through:
            self.terminated = self.interrupted = False  # the signal came while the run was ending by itself

    @property
    def has_stopped(self) -> bool:
        """True if the run ends because it was asked to."""
        return (self.terminated or self.interrupted) and not self._is_through

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._requests is not None:
            self._requests.release(heed=False)
            self._requests.hear_ctrl_c()
        is_asked = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        # Saving is collective, and the other ranks may be waiting elsewhere.
        is_together = trainer.world_size == 1 or isinstance(exception, RaisedOnAllRanks)
        if not (is_together and self.training and self.saved is None and not self._leaving):
            return
        if is_asked:
            self._save(trainer, INTERRUPTED)
        elif self._is_worth_saving(trainer, pl_module):
            try:
                self._save(trainer, INTERRUPTED)
            except Exception as error:  # such as after an error of the GPU: it must not hide the first one
                say(f"Cannot save: {one_line(error)}. Earlier checkpoints are kept.", error=True)

    def _is_worth_saving(self, trainer: Trainer, module: Any) -> bool:
        """Return True after an error that left the iteration as it was, if no checkpoint has this state yet."""
        epochs: Any = trainer.fit_loop.epoch_progress.current
        is_within = epochs.processed == epochs.completed  # not after an iteration that a StopIteration cut off
        is_new = module.iteration is not None or trainer.global_step != self._saved_step
        return bool(module.is_savable and is_within and is_new)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.best is None or self.best.name is None else {"best": self.best.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.best is not None and "best" in state_dict:
            self.best = replace(self.best, **state_dict["best"])

    # --- saving ----------------------------------------------------------------------------------------------------

    def kept_best(self, folder: Path) -> BestEvaluation | None:
        """Return the best evaluation so far: that of ``best.ckpt`` in a run folder; without it, none counts."""
        if self.best is None or self.best.name is None:
            return self.best
        try:
            saved = read(folder / CHECKPOINTS / BEST)
            mark = saved["lit_vgrpo"]["evaluator"]["history"][-1][FINGERPRINT]
            return replace(self.best, **saved["callbacks"][self.state_key]["best"], fingerprint=mark)
        except (CheckpointDamage, KeyError):  # in another folder, deleted or damaged
            return BestEvaluation(self.best.metric)

    def _keep_best(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save ``best.ckpt`` if there is a new evaluation of the current weights and it is the best so far."""
        evaluator: Any = pl_module.evaluator
        newest = evaluator.newer_than(self._seen, trainer.global_step)
        if self.best is None or newest is None or (self.best.metric == AUTO and self.every_n_iterations == 0):
            return
        self._seen = newest
        heldout = evaluator.latest
        metric = self.best.name_in(heldout)
        if (share := evaluator.failed_shares.get(metric, 0.0)) > MOST_FAILED:
            what = f"{share:.0%} of the held-out images have no {metric}, because a reward failed"
            rank_zero_warn(f"{what}, so this evaluation does not count for {BEST}.")
            return
        if metric not in heldout:
            rank_zero_warn(f"No evaluation measured best={metric}, so no {BEST} is kept. {suggestion(metric, heldout)}")
        kept: Any = self.kept_best(Path(trainer.default_root_dir))
        is_comparable = kept.fingerprint == self._seen.fingerprint
        known = kept if is_comparable else BestEvaluation(self.best.metric)
        better = trainer.strategy.broadcast(known.improved_by(heldout, self._seen.iteration))
        if better is None:
            return
        self._aside = f"best-{kept.iteration}.ckpt" if kept.name and not is_comparable else None
        before, unsaved = self.best, self.unsaved
        self.best = better
        if self._save(trainer, BEST) is not None:
            self.best = before
        self.unsaved = unsaved  # it is about last.ckpt

    def _is_final(self, trainer: Trainer) -> bool:
        epochs_done = trainer.max_epochs is not None and 0 < trainer.max_epochs <= trainer.current_epoch + 1
        return epochs_done or trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step

    def _is_due(self, trainer: Trainer) -> bool:
        if self.every_n_iterations == 0:
            return False
        return (trainer.current_epoch + 1) % self.every_n_iterations == 0 or self._is_final(trainer)

    def _save(self, trainer: Trainer, name: str) -> str | None:
        """Write a checkpoint; return an error message if that fails. All ranks must call it, with the same result."""
        path = run_folder(trainer) / CHECKPOINTS / name
        with self._requests.held() if self._requests is not None else nullcontext():
            # As Trainer.save_checkpoint (lightning 2.6.6), without its barrier, where the others would wait for a rank
            # that failed.
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            self.unsaved = trainer.strategy.broadcast(self._write(trainer, checkpoint, path))
            if name != BEST:
                self.saved = None if self.unsaved is not None else path
                evaluator: Any = trainer.lightning_module.evaluator
                self._saved_evaluation = evaluator.newer_than(None, trainer.global_step)
            if self.unsaved is None:
                self._saved_step = trainer.global_step
        if self.unsaved is not None and trainer.is_global_zero:
            again = "The next save" if newest_checkpoint(run_folder(trainer)) is None else "The next save or --resume"
            say(f"{self.unsaved} Free some disk space. {again} will try again.", error=True)
        return self.unsaved

    def _write(self, trainer: Trainer, checkpoint: dict[str, Any], path: Path) -> str | None:
        draft = draft_of(path)
        try:
            trainer.strategy.save_checkpoint(checkpoint, draft)
            if trainer.is_global_zero:
                aside = None if path == self.saved else {LAST: PREVIOUS, BEST: self._aside}.get(path.name)
                put_in_place(draft, path, None if aside is None else path.with_name(aside))
        except OSError as error:
            draft.unlink(missing_ok=True)
            folder = next(parent for parent in path.parents if parent.exists())
            room = f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB free"
            return f"Cannot save {path}: {error.strerror or one_line(error)} ({room}). Earlier checkpoints are kept."
        return None


def _any_rank(trainer: Trainer, flag: bool) -> bool:
    return trainer.strategy.reduce_boolean_decision(flag, all=False)


class _Requests(StopRequests):
    """Signals to a run: the first makes it save and stop, the second ends it."""

    def __init__(self, checkpoints: RunCheckpoint, watch: Watch) -> None:
        super().__init__()
        self._checkpoints, self._watch = checkpoints, watch
        self._has_raised = False
        self._has_30_s = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun then kills what it has forwarded a signal to

    @override
    def can_wait(self) -> bool:
        return self._checkpoints.training

    @override
    def answer(self, signum: int) -> None:
        if signum == signal.SIGINT:
            ends = ("micro-batch", "saving") if self._has_30_s else ("iteration", SAVING)
            again = SAVES_AND_STOPS if rank_and_world_size()[1] == 1 else STOPS
            waited = self.ended_wait
            say(CTRL_C_IN_A_WAIT.format(waited) if waited else FIRST_CTRL_C.format(*ends, again), error=True)

    @override
    def obey(self, signum: int) -> None:
        if signum == signal.SIGINT and not self._has_30_s:
            self._checkpoints.interrupted = True  # stops after its iteration
        else:
            self._checkpoints.terminated = True  # after its micro-batch
        self._checkpoints.status = 128 + self.signals[0]
        if self.is_urgent and not self._has_raised:
            self._has_raised = True
            raise KeyboardInterrupt if signum == signal.SIGINT else SIGTERMException

    @override
    def end(self, signum: int, reason: str) -> None:
        self._watch.end(128 + signum, reason)
