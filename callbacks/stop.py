"""Base class of callbacks that judge held-out evaluations and may end a run early."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L

from lit_vgrpo.errors import say
from lit_vgrpo.training.checkpoint import NewestEvaluation, RunCheckpoint
from lit_vgrpo.training.folder import BEST, CHECKPOINTS, CONFIG_NAME

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule


class StopsRun(L.Callback):
    """Looks at each evaluation once, and ends a run with a one-line reason, which ``summary.json`` repeats.

    Attributes:
        outcome: how the run ended, in a word or two; ``None`` unless this callback ended it.
        reason: the reason.
    """

    outcome: str | None = None
    reason: str | None = None

    def __init__(self) -> None:
        self._newest = NewestEvaluation()

    def is_new_evaluation(self, trainer: L.Trainer, module: VGRPOModule) -> bool:
        """Return ``True`` once for each evaluation of the current weights."""
        return self._newest.is_new(module.evaluator.step, trainer.global_step)

    def end_run(self, trainer: L.Trainer, outcome: str, reason: str) -> None:
        """Stop after the current iteration; called on every rank."""
        self.outcome, self.reason = outcome, f"{reason} {describe_best(trainer)}"
        trainer.should_stop = True
        if trainer.is_global_zero:
            say(self.reason, error=True)


def describe_best(trainer: L.Trainer) -> str:
    """Describe a run's best checkpoint and how to continue from it."""
    folder = Path(trainer.default_root_dir)
    file = folder / CHECKPOINTS / BEST
    best = next((one.best for one in trainer.checkpoint_callbacks if isinstance(one, RunCheckpoint)), None)
    if best is None or best.name is None:
        return "No best checkpoint was saved: that needs an evaluation on held-out prompts, and RunCheckpoint's best."
    again = f"lightning run {folder / CONFIG_NAME} ckpt_path={file}"
    return f"Best checkpoint: {file} ({best}). Continue from it in a new folder: {again}"
