"""Ends a run early: the base class of callbacks that do, and the one for runs that have collapsed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import lightning as L
import torch

from lit_vgrpo.core.advantages import no_spread_share
from lit_vgrpo.core.ranges import PositiveInt, Range, checked
from lit_vgrpo.core.records import Evaluation
from lit_vgrpo.core.sharding import local
from lit_vgrpo.core.snapshots import all_finite, trainable_parameters
from lit_vgrpo.errors import say, shell_line
from lit_vgrpo.training.checkpoint import TRAINED, RunCheckpoint
from lit_vgrpo.training.folder import BEST, CHECKPOINTS, CONFIG_NAME
from lit_vgrpo.training.trainer_internals import run_folder

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule

COLLAPSED = "collapsed"
LOW_EVALUATIONS = 2
"""Evaluations in a row below the bound that end a run."""
STATE = ("flat_iterations", "low_evaluations", "unit")


class StopsRun(L.Callback):
    """Looks at each evaluation once, and ends a run with a one-line reason, which ``summary.json`` repeats.

    Attributes:
        outcome: Short description of how the run ended; ``None`` unless this callback ended it.
        reason: The reason.
    """

    outcome: str | None = None
    reason: str | None = None
    _seen: Evaluation | None = None

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        if stage == "fit":  # not those of an earlier fit
            self.outcome = self.reason = None

    def news(self, trainer: L.Trainer, module: VGRPOModule) -> list[Evaluation]:
        """Return the comparable evaluations after a new one of the current weights, otherwise []."""
        newest = module.evaluator.newer_than(self._seen, trainer.global_step)
        if newest is None:
            return []
        self._seen = newest
        return module.evaluator.comparable

    def end_run(self, trainer: L.Trainer, outcome: str, reason: str) -> None:
        """Stop after the current iteration; called on every rank."""
        self.outcome, self.reason = outcome, f"{reason} {describe_best(trainer)}"
        trainer.should_stop = True
        if trainer.is_global_zero:
            say(self.reason, error=True)


def describe_best(trainer: L.Trainer) -> str:
    """Describe a run's best checkpoint and how to continue from it."""
    folder = run_folder(trainer)
    file = folder / CHECKPOINTS / BEST
    best = next((one.kept_best(folder) for one in trainer.checkpoint_callbacks if isinstance(one, RunCheckpoint)), None)
    if best is None or best.name is None:
        return "No best checkpoint was saved: that needs RunCheckpoint's best, data.heldout and an evaluation."
    again = shell_line("lightning", "run", folder / CONFIG_NAME, f"ckpt_path={file}")
    return f"Best checkpoint: {file} ({best}). Continue from it in a new folder: {again}"


@checked
@dataclass(eq=False)
class CollapseStop(StopsRun):
    """Stops a run with non-finite weights, constant rewards within groups, or a collapsed held-out reward.

    Weights are checked after every update, before anything is saved: the run fails with the reason, and no checkpoint
    contains non-finite weights. In the other two cases the iteration ends and saves, as in an early stop.

    Args:
        patience: Consecutive iterations without reward spread in any group; null allows any number.
        drop: Maximum fall of the held-out reward below its best, in standard deviations of the first iteration's
            rewards (which follow the reward's scale), in two evaluations in a row; null allows any fall.

    Raises:
        ValueError: A number is too small.
    """

    patience: PositiveInt | None = 10
    drop: Annotated[float, Range(above=0)] | None = 1.0

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and trainer.global_step == 0:  # before a checkpoint is restored
            self.__post_init__()

    def __post_init__(self) -> None:
        self.flat_iterations = 0
        self.low_evaluations = 0
        self.unit: float | None = None

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: VGRPOModule, optimizer: torch.optim.Optimizer) -> None:
        is_bad = not all_finite(local(p) for p in trainable_parameters(pl_module.policy).values())
        if trainer.strategy.reduce_boolean_decision(is_bad, all=False):
            self.outcome = COLLAPSED
            assert pl_module.iteration is not None
            done, number = pl_module.iteration.updates_done, pl_module.iteration.record.iteration + 1
            self.reason = (
                f"Weights are not finite after update {done} of iteration {number}. "
                f"Nothing was saved after it. Lower model.optimizer.lr. {describe_best(trainer)}"
            )
            raise FloatingPointError(self.reason)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        reasons = [line for line in (self._flat(pl_module), self._fallen(trainer, pl_module)) if line]
        if reasons := trainer.strategy.broadcast(reasons):  # rank 0 decides for all
            self.end_run(trainer, COLLAPSED, f"Collapsed: {' '.join(reasons)}")

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state_dict[name])

    def _flat(self, module: VGRPOModule) -> str:
        """Return a warning of groups without reward spread for too many iterations, or nothing."""
        record = module.record
        if record is None or not module.objective.needs_reward:
            return ""
        rewards = record.rewards[record.rewards.isfinite()].double()
        if self.unit is None and len(rewards):
            self.unit = float(rewards.std(correction=0)) or None
        is_flat = no_spread_share(record.rewards, record.group_ids) == 1.0
        self.flat_iterations = self.flat_iterations + 1 if is_flat else 0
        if self.patience is None or self.flat_iterations < self.patience:
            return ""
        mean = f"The mean of the last rewards is {float(rewards.mean()):.4g}."
        return f"no group has had reward spread for {self.flat_iterations} iterations, so there is no gradient. {mean}"

    def _fallen(self, trainer: L.Trainer, module: VGRPOModule) -> str:
        """Return a warning of a held-out reward far below its best for too long, or nothing."""
        news = self.news(trainer, module)
        if news and module.evaluator.history[-2:][0].fingerprint != news[-1].fingerprint:
            self.low_evaluations = 0  # of other images or rewards
        if not news or self.drop is None or self.unit is None or not math.isfinite(now := news[-1].reward):
            return ""
        best = max((one for one in news if math.isfinite(one.reward)), key=lambda one: one.reward)
        units = (best.reward - now) / self.unit
        self.low_evaluations = self.low_evaluations + 1 if units > self.drop else 0
        if self.low_evaluations < LOW_EVALUATIONS:
            return ""
        return (
            f"{TRAINED} is {now:.4g}, {units:.1f} times the standard deviation of the first iteration's rewards below "
            f"the {best.reward:.4g} of iteration {best.iteration}, and has been low for {self.low_evaluations} "
            "evaluations in a row."
        )
