"""The learning-rate schedule, any of torch's."""

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
    """A schedule stepped with every update, or after every iteration if it waits for a plateau.

    Args:
        make: factory from an optimizer, such as a class with its options bound.
    """

    def __init__(self, make: LRSchedulerCallable) -> None:
        self.make = direct(make)
        self._asked: dict[str, Any] = {}

    def check(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return why it cannot be built for this optimizer: at most one line."""
        try:
            scheduler = self.make(optimizer)
        except Exception as error:  # the constructor may raise anything
            return [f"model.lr_scheduler cannot be built: {one_line(error)}"]
        if isinstance(scheduler, ReduceLROnPlateau) and not hasattr(scheduler, "monitor"):
            return [
                "model.lr_scheduler=ReduceLROnPlateau has no metric to monitor. Use "
                "lightning.pytorch.cli.ReduceLROnPlateau with monitor=heldout/reward and mode=max."
            ]
        return []

    def around(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the result of ``configure_optimizers``."""
        scheduler = self.make(optimizer)
        options = inspect.signature(type(scheduler)).parameters
        self._asked = {name: copy(value) for name, value in vars(scheduler).items() if name in options}
        config: dict[str, Any] = {"scheduler": scheduler, "interval": "step"}
        if isinstance(scheduler, ReduceLROnPlateau):
            config |= {"interval": "epoch", "monitor": getattr(scheduler, "monitor", None)}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def resume(self, scheduler: Any) -> None:
        """Use the recipe's base rate after loading a checkpoint, and warn of other settings that stay the old ones."""
        if hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
        for name, asked in self._asked.items():
            now = getattr(scheduler, name)
            if name not in ("optimizer", "last_epoch") and now != asked:
                rank_zero_warn(f"model.lr_scheduler continues with the checkpoint's {name}={now}, not {asked}.")


def direct(make: Callable[..., T]) -> Callable[..., T]:
    """Return the factory without the parser's wrappers, which cannot be pickled.

    >>> direct(partial(lambda call, cls, *args, **options: call(cls, *args, **options), map, dict, a=1))
    functools.partial(<class 'dict'>, a=1)
    """
    if isinstance(make, partial) and not inspect.isclass(make.func) and make.args and inspect.isclass(make.args[-1]):
        cls: Any = make.args[-1]
        return partial(cls, **make.keywords)
    return make
