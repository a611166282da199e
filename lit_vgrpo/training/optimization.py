"""The optimizer with its learning-rate schedule, any of torch's, as Lightning takes the two."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from copy import copy
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from lit_vgrpo.errors import one_line
from lit_vgrpo.training.optimizer import CustomOptimizer, OptimizerCallable, OptimizerConfig, as_optimizer, direct

LRSchedulerCallable = Callable[[torch.optim.Optimizer], LRScheduler]


class Optimization:
    """Builds the optimizer and the schedule of a run.

    The schedule is stepped with every update, or after every iteration if it waits for a plateau.

    Args:
        optimizer: AdamW's settings, or a function of the weights; ``None`` takes AdamW's defaults.
        lr_scheduler: a function of the optimizer; ``None`` keeps the rate constant after the optimizer's warm-up.
    """

    def __init__(
        self, optimizer: OptimizerConfig | OptimizerCallable | None, lr_scheduler: LRSchedulerCallable | None
    ) -> None:
        self.optimizer: OptimizerConfig | CustomOptimizer = as_optimizer(optimizer)
        self.make_schedule: Callable[..., Any] | None = None if lr_scheduler is None else direct(lr_scheduler)
        self._asked: dict[str, Any] = {}

    def check(self) -> list[str]:
        """Return why the two do not fit each other: at most one line."""
        if self.make_schedule is None or not self.optimizer.warmup_steps:
            return []
        return [
            f"model.optimizer.warmup_steps={self.optimizer.warmup_steps} and model.lr_scheduler are both given. "
            "Leave one of them out; torch.optim.lr_scheduler.OneCycleLR warms up by itself."
        ]

    def build(self, parameters: Iterable[nn.Parameter]) -> Any:
        """Return the result of ``configure_optimizers``; raise ValueError if one of the two cannot be built."""
        optimizer = self.optimizer.build(parameters)
        make = self.make_schedule
        if make is None:
            if not self.optimizer.warmup_steps:
                return optimizer
            make = partial(LambdaLR, lr_lambda=partial(_ramp, self.optimizer.warmup_steps))
        try:
            scheduler = make(optimizer)
        except Exception as error:  # the constructor may raise anything
            raise ValueError(f"model.lr_scheduler cannot be built: {one_line(error)}") from error
        options = inspect.signature(type(scheduler)).parameters.keys() - {"optimizer", "last_epoch"}
        self._asked = {name: copy(value) for name, value in vars(scheduler).items() if name in options}
        config: dict[str, Any] = {"scheduler": scheduler, "interval": "step"}
        if isinstance(scheduler, ReduceLROnPlateau):
            config |= {"interval": "epoch", "monitor": getattr(scheduler, "monitor", None)}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def resume(self, scheduler: Any) -> None:
        """Continue a schedule from a checkpoint with the recipe's learning rate; warn of settings that stay the old.

        Args:
            scheduler: the schedule in use, with its state loaded; ``None`` if there is none.
        """
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
        for name, asked in self._asked.items():
            if (now := getattr(scheduler, name)) != asked:
                rank_zero_warn(f"model.lr_scheduler continues with the checkpoint's {name}={now}, not {asked}.")


def _ramp(steps: int, step: int) -> float:
    """Return a factor that rises linearly to 1 over a number of steps."""
    return min(1.0, (step + 1) / steps)
