"""A summary file of a run."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import lightning as L
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_vgrpo.callbacks.collapse import StopsRun, describe_best
from lit_vgrpo.callbacks.hack_alarm import RewardHackAlarm
from lit_vgrpo.errors import UserError, counted, one_line, say, score_text, wrapped
from lit_vgrpo.report.run_data import Point, RunData, read_scores
from lit_vgrpo.report.verdict import Verdict
from lit_vgrpo.system.memory import PeakMemory, device_name, peak_resident_bytes
from lit_vgrpo.system.paths import write_atomically
from lit_vgrpo.system.process import commit, versions
from lit_vgrpo.system.signals import is_stop_requested
from lit_vgrpo.training.checkpoint import TRAINED, RunCheckpoint
from lit_vgrpo.training.resume import HELDOUT_PROMPTS, SUMMARY_NAME, how_to_resume
from lit_vgrpo.training.saved_weights import evaluated_weights
from lit_vgrpo.training.trainer_internals import callbacks_of, run_folder

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule


class RunSummary(L.Callback):
    """Writes ``RUN/summary.json`` at the end of training, even if it was interrupted or failed.

    Attributes:
        unwritten: Reason that it could not be written; ``None`` if it was.
        reason: Reason that the run failed or counts as diverged; ``None`` otherwise.
    """

    def __init__(self) -> None:
        self.unwritten: str | None = None
        self.reason: str | None = None
        self._outcome = "finished"

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        if stage == "fit":  # not that of an earlier fit
            self.reason, self._outcome = None, "finished"

    def on_exception(self, trainer: L.Trainer, pl_module: VGRPOModule, exception: BaseException) -> None:
        kinds = KeyboardInterrupt | (SystemExit if is_stop_requested() else SIGTERMException)  # callbacks may exit too
        self._outcome = "interrupted" if isinstance(exception, kinds) else "failed"
        self.reason = f"{type(exception).__name__}: {one_line(exception)}" if self._outcome == "failed" else None
        if trainer.is_global_zero:
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        steps_done = 0 <= trainer.max_steps <= trainer.global_step
        epochs_done = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch
        if not steps_done and not epochs_done:
            if any(checkpoint.has_stopped for checkpoint in callbacks_of(trainer, RunCheckpoint)):
                self._outcome = "interrupted"
            elif trainer.current_epoch and trainer.max_epochs and trainer.max_epochs > 0:
                self._outcome = "stopped early"
        if self._outcome == "finished" and any(one.unsaved for one in callbacks_of(trainer, RunCheckpoint)):
            self._outcome = "unsaved"  # its weights are older than its last iteration
        pl_module.evaluator.evaluate_end(pl_module)
        start, spread = (_start(pl_module).get(name, math.nan) for name in ("reward", "reward_std"))
        end = pl_module.evaluator.latest.get(TRAINED, math.nan)
        if start - end > spread > 0 and not _stopped(trainer):
            self._outcome = "diverged"
            fall = f"{TRAINED} fell from {score_text(start)} to {score_text(end)}, {(start - end) / spread:.1f} times "
            fall += "the standard deviation of the first evaluation's rewards."
            self.reason = f"Diverged: {fall} Lower model.optimizer.lr. {describe_best(trainer)}"
        if trainer.is_global_zero:
            self._write(trainer, pl_module)

    def finish(self, trainer: L.Trainer, module: VGRPOModule, completed: bool) -> None:
        """Print the held-out reward before and after training; called on the first rank."""
        is_known = completed and TRAINED in module.evaluator.latest  # else another fit's
        if (is_known or self._outcome == "interrupted") and (course := module.evaluator.course):
            weights = evaluated_weights(trainer)
            failed = int(module.evaluator.history[-1].metrics.get("failed", 0))
            unscored = f"; {counted(failed, 'image')} could not be scored" if failed else ""
            seen, known = len(module.evaluator.numbers), module.evaluator.num_heldout
            share = f"; {seen} of {known} held-out images" if seen < known else ""  # trainer.limit_val_batches
            verdict = self._verdict(trainer, module)
            change = f": {verdict.change}" if verdict.change else ""
            say(wrapped(f"{course}{change} ({weights} weights{share}{unscored})."))
            say(wrapped(f"Did it cheat? {verdict.cheating.words}"))
        if lost := module.ledger.unscored:
            say(f"{counted(lost, 'training image')} of {module.ledger.images} could not be scored.")
        if completed and self.reason is not None:
            say(self.reason, error=True)
        if completed and any((timer.time_remaining() or 1) <= 0 for timer in callbacks_of(trainer, Timer)):
            done = f"trainer.max_time is used up after {counted(trainer.current_epoch, 'iteration')}."
            say(f"{done} {how_to_resume(run_folder(trainer))} trainer.max_time=null")

    def _verdict(self, trainer: L.Trainer, module: VGRPOModule) -> Verdict:
        """Return the report's verdict on the evaluations so far."""
        points = [Point({"iterations": one.iteration}, one.metrics) for one in module.evaluator.history]
        folder = run_folder(trainer)
        return Verdict(RunData(folder, {}, {}, [], points, read_scores(folder)))

    def _write(self, trainer: L.Trainer, module: VGRPOModule) -> None:
        end = {name.removeprefix("heldout/"): value for name, value in module.evaluator.latest.items()}
        ends = [(callback.outcome, callback.reason) for callback in _stopped(trainer)]
        outcome, reason = [*ends, (self._outcome, self.reason)][0]
        summary = {
            "outcome": outcome,
            **({"reason": reason} if reason is not None else {}),
            "did_it_cheat": asdict(self._verdict(trainer, module).cheating),
            "alarms": [line for alarm in callbacks_of(trainer, RewardHackAlarm) for line in alarm.warnings],
            "unscored_images": {"training": module.ledger.unscored, "heldout": int(end.get("failed", 0))},
            "heldout_reward_start": _plain(_start(module).get("reward")),
            "heldout_reward_end": _plain(end.get("reward")),
            "rewards": list(module.reward.part_names),
            "reward_parts_end": {name: _plain(end[name]) for name in module.reward.part_names if name in end},
            "heldout_metrics_start": {name: _plain(value) for name, value in _start(module).items() if name in end},
            "heldout_metrics_end": {name: _plain(value) for name, value in end.items()},
            **({HELDOUT_PROMPTS: prompts} if (prompts := module.evaluator.contents.get("prompts")) else {}),
            "weights": evaluated_weights(trainer),
            "iterations": module.iterations_done,
            "optimizer_steps": trainer.global_step,
            "images": module.ledger.images,
            "train_seconds": round(module.ledger.stopwatch.wall_s, 3),
            "cpu_seconds": round(module.ledger.stopwatch.cpu_s, 3),
            "network_passes": module.ledger.counts,
            "peak_memory_bytes": peak_memory_bytes(trainer.strategy.root_device, module.ledger.memory),
            "peak_memory_bytes_by_phase": module.ledger.memory.by_phase,
            "device": device_name(trainer.strategy.root_device),
            "evaluations": [{**asdict(one), "reward": _plain(one.reward)} for one in module.evaluator.history],
            "seed": module.seed,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "world_size": trainer.world_size,
            "versions": {"python": platform.python_version(), **versions()},
        }
        try:
            folder = run_folder(trainer)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / SUMMARY_NAME, json.dumps(summary, indent=2) + "\n")
            self.unwritten = None
        except (OSError, UserError) as error:
            self.unwritten = str(error)


def _start(module: VGRPOModule) -> dict[str, float]:
    """Return the metrics of the first evaluation that can be compared with the newest one, if there are any."""
    comparable = module.evaluator.comparable
    return comparable[0].metrics if comparable and (len(comparable) > 1 or not comparable[0].iteration) else {}


def _stopped(trainer: L.Trainer) -> list[StopsRun]:
    return [callback for callback in callbacks_of(trainer, StopsRun) if callback.outcome]


def peak_memory_bytes(device: torch.device, memory: PeakMemory) -> int:
    """Return this rank's peak memory, including earlier phases: reserved by torch on a GPU, else resident."""
    now = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident_bytes()
    return max(now, memory.most)


def _plain(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else round(value, 6)
