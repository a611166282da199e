"""The learning rate's schedule, any of torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lit_vgrpo.errors import one_line

T = TypeVar("T")
LRSchedulerCallable = Callable[[torch.optim.Optimizer], LRScheduler]


class Schedule:
    """A schedule that is stepped with every update; one that waits for a plateau, after every iteration.

    Args:
        make: builds it around an optimizer: a class with its options filled in.
    """

    def __init__(self, make: LRSchedulerCallable) -> None:
        self.make = direct(make)
        self._asked: dict[str, Any] = {}

    def check(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Why it cannot be built around such an optimizer: at most one line."""
        try:
            scheduler = self.make(optimizer)
        except Exception as error:  # whatever its constructor raises
            return [f"model.lr_scheduler cannot be built: {one_line(error)}"]
        if isinstance(scheduler, ReduceLROnPlateau) and not hasattr(scheduler, "monitor"):
            return [
                "model.lr_scheduler=ReduceLROnPlateau does not say which metric it waits for. Use "
                "lightning.pytorch.cli.ReduceLROnPlateau with monitor=heldout/reward and mode=max."
            ]
        return []

    def around(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what ``configure_optimizers`` returns."""
        scheduler = self.make(optimizer)
        options = inspect.signature(type(scheduler)).parameters
        self._asked = {name: copy(value) for name, value in vars(scheduler).items() if name in options}
        config: dict[str, Any] = {"scheduler": scheduler, "interval": "step"}
        if isinstance(scheduler, ReduceLROnPlateau):
            config |= {"interval": "epoch", "monitor": getattr(scheduler, "monitor", None)}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def resume(self, scheduler: Any) -> None:
        """After a checkpoint was read: let the rate count from the recipe's own, and say what else stays the old."""
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
        for name, asked in self._asked.items():
            now = getattr(scheduler, name)
            if name not in ("optimizer", "last_epoch") and now != asked:
                rank_zero_warn(f"model.lr_scheduler goes on as the checkpoint has it: {name}={now}, not {asked}.")


def direct(make: Callable[..., T]) -> Callable[..., T]:
    """Return the factory without the parser's wrappers around the class, which cannot be pickled.

    >>> direct(partial(lambda call, cls, *args, **options: call(cls, *args, **options), map, dict, a=1))
    functools.partial(<class 'dict'>, a=1)
    """
    if isinstance(make, partial) and not inspect.isclass(make.func) and make.args and inspect.isclass(make.args[-1]):
        cls: Any = make.args[-1]
        return partial(cls, **make.keywords)
    return make
