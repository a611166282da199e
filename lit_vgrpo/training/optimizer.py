"""The optimizer: AdamW from options, or any other by class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
from torch import nn

from lit_vgrpo.core.ranges import HalfOpenUnitInterval, NonNegativeFloat, NonNegativeInt, Range, checked
from lit_vgrpo.errors import one_line
from lit_vgrpo.training.optimizer_state import with_own_settings, without_kernel
from lit_vgrpo.training.schedule import direct

OptimizerCallable = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

FUSED_ON = ("cpu", "cuda")
"""Devices with torch's fused AdamW, one kernel for all weights."""

MISSING = 'model.optimizer.kind=adamw8bit needs bitsandbytes. Run: pip install "lit-vgrpo[memory]"'


@checked
@dataclass
class OptimizerConfig:
    """AdamW over the trainable weights.

    Args:
        lr: learning rate after warm-up, constant from then on.
        betas: decay of the first and second moment.
        weight_decay: decoupled weight decay.
        eps: term added to the denominator.
        warmup_steps: optimizer steps over which the rate rises linearly.
        kind: torch's AdamW, or bitsandbytes' with both moments in 8 bits: 2 bytes per trained weight instead of 8.
    """

    lr: Annotated[float, Range(above=0, most=1, example=3e-4)] = 3e-4
    betas: tuple[HalfOpenUnitInterval, HalfOpenUnitInterval] = (0.9, 0.999)
    weight_decay: NonNegativeFloat = 1e-4
    eps: Annotated[float, Range(above=0, example=1e-8)] = 1e-8
    warmup_steps: NonNegativeInt = 0
    kind: Literal["adamw", "adamw8bit"] = "adamw"

    def check(self) -> list[str]:
        """Return why the optimizer cannot be built, one line each."""
        return [MISSING] if self.kind == "adamw8bit" and find_spec("bitsandbytes") is None else []

    def trial(self) -> torch.optim.Optimizer:
        """Return a small optimizer of this kind, to try a schedule on."""
        return torch.optim.AdamW([nn.Parameter(torch.zeros(2, 2))], lr=self.lr, betas=self.betas)

    def build(self, parameters: Iterable[nn.Parameter], fused: bool = False) -> Any:
        """Return the result of ``configure_optimizers``: the optimizer, and the schedule if there is one.

        A checkpoint restores the moments and the position in the warm-up, not these settings, which come from the
        recipe.

        Args:
            fused: use torch's fused AdamW where the weights' device has it.
        """
        weights = list(parameters)
        optimizer = self._optimizer(weights, fused and all(weight.device.type in FUSED_ON for weight in weights))
        if not self.warmup_steps:
            return optimizer
        warmup = _Warmup(optimizer, _Ramp(self.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def _optimizer(self, parameters: list[nn.Parameter], fused: bool) -> torch.optim.Optimizer:
        settings: dict[str, Any] = {
            "lr": self.lr,
            "betas": self.betas,
            "weight_decay": self.weight_decay,
            "eps": self.eps,
        }
        if self.kind == "adamw8bit":
            try:
                from lit_vgrpo.training.adamw8bit import ResumableAdamW8bit
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(MISSING) from error
            return ResumableAdamW8bit(parameters, **settings)
        optimizer = torch.optim.AdamW(parameters, **settings, fused=fused or None)
        optimizer.register_load_state_dict_pre_hook(with_own_settings)
        optimizer.register_state_dict_post_hook(without_kernel)
        return optimizer


class CustomOptimizer:
    """Any optimizer, from a ``class_path`` or a function of the trainable weights.

    Args:
        make: factory, such as a class with its options bound.
    """

    kind = "custom"
    warmup_steps = 0

    def __init__(self, make: OptimizerCallable) -> None:
        self.make = direct(make)

    def check(self) -> list[str]:
        """Return why the optimizer cannot be built or used: at most one line."""
        try:
            optimizer = self.trial()
        except Exception as error:  # the constructor may raise anything
            return [f"model.optimizer cannot be built: {one_line(error)}"]
        if isinstance(optimizer, torch.optim.LBFGS):
            return ["model.optimizer=LBFGS needs the loss several times per step. Use AdamW or another."]
        return []

    def trial(self) -> torch.optim.Optimizer:
        """Return a small optimizer of this kind."""
        return self.make([nn.Parameter(torch.zeros(2, 2))])

    def build(self, parameters: Iterable[nn.Parameter], fused: bool = False) -> torch.optim.Optimizer:
        """Return the optimizer of these weights; a checkpoint restores its state, not its settings.

        Args:
            fused: has no effect; the factory says.
        """
        optimizer = self.make(list(parameters))
        optimizer.register_load_state_dict_pre_hook(with_own_settings)
        return optimizer


def as_optimizer(optimizer: OptimizerConfig | OptimizerCallable | None) -> OptimizerConfig | CustomOptimizer:
    """Return the object that builds the optimizer.

    Raises:
        ValueError: AdamW's settings are invalid.
        TypeError: AdamW's settings have the wrong type.
    """
    if optimizer is None or isinstance(optimizer, OptimizerConfig):
        return optimizer or OptimizerConfig()
    make = direct(optimizer)
    if isinstance(make, partial) and make.func is torch.optim.Optimizer:
        # The parser passes invalid AdamW settings on as a plain mapping.
        return OptimizerConfig(**make.keywords)
    return CustomOptimizer(make)


class _Ramp:
    """A factor that rises linearly to 1 over a number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


class _Warmup(torch.optim.lr_scheduler.LambdaLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = self.base_lrs
        super().load_state_dict(state_dict)
        self.base_lrs = own
