"""The optimizer with its learning-rate schedule, as Lightning takes the two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lit_vgrpo.training.optimizer import CustomOptimizer, OptimizerCallable, OptimizerConfig, as_optimizer
from lit_vgrpo.training.schedule import LRSchedulerCallable, Schedule


class Optimization:
    """Builds the optimizer and the schedule of a run.

    Args:
        optimizer: AdamW's settings, or a function of the weights; ``None`` takes AdamW's defaults.
        lr_scheduler: a function of the optimizer; ``None`` keeps the rate constant after the optimizer's warm-up.
    """

    def __init__(
        self, optimizer: OptimizerConfig | OptimizerCallable | None, lr_scheduler: LRSchedulerCallable | None
    ) -> None:
        self.optimizer: OptimizerConfig | CustomOptimizer = as_optimizer(optimizer)
        self.schedule = None if lr_scheduler is None else Schedule(lr_scheduler)

    def check(self) -> list[str]:
        """List what keeps the two from being built, a line each."""
        errors = self.optimizer.check()
        if self.schedule is None:
            return errors
        if not errors:
            errors = self.schedule.check(self.optimizer.trial())
        if self.optimizer.warmup_steps:
            errors.append(
                f"model.optimizer.warmup_steps={self.optimizer.warmup_steps} and model.lr_scheduler are both "
                "given. Leave one of them out; torch.optim.lr_scheduler.OneCycleLR warms up by itself."
            )
        return errors

    def build(self, parameters: Iterable[nn.Parameter], fused: bool = False) -> Any:
        """Return what ``configure_optimizers`` returns.

        Args:
            fused: use torch's fused AdamW where the weights' device has it.
        """
        optimizer = self.optimizer.build(parameters, fused)
        return optimizer if self.schedule is None else self.schedule.around(optimizer)

    def resume(self, scheduler: Any) -> None:
        """After a checkpoint was read, let the schedule in use continue with the recipe's learning rate."""
        if self.schedule is not None:
            self.schedule.resume(scheduler)
