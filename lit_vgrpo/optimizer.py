"""The optimizer: AdamW by its settings, or any other by its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import nn

from lit_vgrpo.errors import one_line
from lit_vgrpo.factory import direct
from lit_vgrpo.ranges import HalfOpenUnitInterval, NonNegativeFloat, NonNegativeInt, Range, checked

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

OptimizerCallable = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

KINDS = ("adamw", "adamw8bit")
ELEMENTWISE = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta")
"""torch's optimizers that keep for each weight what has its shape, or one number."""
FAMILY_KEYS = ("betas", "momentum", "alpha", "rho")
"""Settings by which one family of optimizers is told from another."""
SETTINGS = ("initial_lr", "betas", "momentum", "alpha", "rho", "weight_decay", "eps", "dampening", "nesterov")
CYCLED = ("betas", "momentum")
"""Settings that a schedule moves too, where it says so by a ``max_momentum``."""
MISSING = 'model.optimizer.kind=adamw8bit needs bitsandbytes. Run: pip install "lit-vgrpo[memory]"'


@checked
@dataclass
class OptimizerConfig:
    """AdamW over the trainable weights.

    Args:
        lr: learning rate after warm-up; constant from there on.
        betas: decay of the first and second moment.
        weight_decay: decoupled weight decay.
        eps: term added to the denominator.
        warmup_steps: optimizer steps over which the rate rises linearly.
        kind: torch's AdamW, or bitsandbytes' with both moments in 8 bits: 2 bytes a trained weight instead of 8.
    """

    lr: Annotated[float, Range(above=0, most=1, example=3e-4)] = 3e-4
    betas: tuple[HalfOpenUnitInterval, HalfOpenUnitInterval] = (0.9, 0.999)
    weight_decay: NonNegativeFloat = 1e-4
    eps: Annotated[float, Range(above=0, example=1e-8)] = 1e-8
    warmup_steps: NonNegativeInt = 0
    kind: Literal["adamw", "adamw8bit"] = "adamw"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"model.optimizer.kind={self.kind!r} is not known. Use {' or '.join(KINDS)}.")

    def check(self) -> list[str]:
        """What keeps the optimizer from being built, a line each."""
        return [MISSING] if self.kind == "adamw8bit" and find_spec("bitsandbytes") is None else []

    def sharding_fault(self, strategy: Strategy) -> str | None:
        """Why the optimizer cannot work under a strategy, in a line; ``None`` where it can."""
        from lit_vgrpo.portable import PortableCheckpoints

        if self.kind == "adamw" or not isinstance(strategy, PortableCheckpoints):
            return None
        return (
            f"model.optimizer.kind={self.kind} works on whole weights, and {type(strategy).__name__} shards them or "
            "their moments. Leave it out, or use trainer.strategy=ddp."
        )

    def trial(self) -> torch.optim.Optimizer:
        """A small one of its kind, to try a schedule on."""
        return torch.optim.AdamW([nn.Parameter(torch.zeros(2, 2))], lr=self.lr, betas=self.betas)

    def build(self, parameters: Iterable[nn.Parameter]) -> Any:
        """What ``configure_optimizers`` returns: the optimizer, and the schedule where there is one.

        A checkpoint brings back the moments and how far the warm-up is, not these settings: they are those of the
        recipe that goes on.
        """
        optimizer = self._optimizer(list(parameters))
        if not self.warmup_steps:
            return optimizer
        warmup = _Warmup(optimizer, _Ramp(self.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        settings: dict[str, Any] = {
            "lr": self.lr,
            "betas": self.betas,
            "weight_decay": self.weight_decay,
            "eps": self.eps,
        }
        if self.kind == "adamw8bit":
            try:
                from lit_vgrpo.adamw8bit import ResumableAdamW8bit
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(MISSING) from error
            return ResumableAdamW8bit(parameters, **settings)
        optimizer = torch.optim.AdamW(parameters, **settings)
        optimizer.register_load_state_dict_pre_hook(with_own_settings)
        return optimizer


class CustomOptimizer:
    """Any optimizer: what a ``class_path``, or a function of the trainable weights, in a recipe's place becomes.

    Args:
        make: builds it: a class with its options filled in.
    """

    kind = "custom"
    warmup_steps = 0

    def __init__(self, make: OptimizerCallable) -> None:
        self.make = direct(make)

    def check(self) -> list[str]:
        """What keeps the optimizer from being built or used: at most one line."""
        try:
            optimizer = self.trial()
        except Exception as error:  # whatever its constructor raises
            return [f"model.optimizer cannot be built: {one_line(error)}"]
        if isinstance(optimizer, torch.optim.LBFGS):
            return ["model.optimizer=LBFGS asks for the loss several times in a step. Use AdamW or another."]
        return []

    def trial(self) -> torch.optim.Optimizer:
        """A small one of its kind."""
        return self.make([nn.Parameter(torch.zeros(2, 2))])

    def sharding_fault(self, strategy: Strategy) -> str | None:
        """Why the optimizer cannot work under a strategy, in a line; ``None`` where it can."""
        from lit_vgrpo.fsdp import FSDP2
        from lit_vgrpo.portable import PortableCheckpoints

        if not isinstance(strategy, PortableCheckpoints) or self.check():
            return None
        cls = type(self.trial())
        fits = ELEMENTWISE if isinstance(strategy, FSDP2) else ("AdamW",)
        if cls.__name__ in fits and cls.__module__.startswith("torch.optim"):
            return None
        return (
            f"model.optimizer={cls.__name__} has a state that {type(strategy).__name__} cannot put into a checkpoint. "
            f"Use torch's {', '.join(fits)}, or trainer.strategy=ddp."
        )

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these weights; a checkpoint brings back its state, not its settings."""
        optimizer = self.make(list(parameters))
        optimizer.register_load_state_dict_pre_hook(with_own_settings)
        return optimizer


def as_optimizer(optimizer: OptimizerConfig | OptimizerCallable | None) -> OptimizerConfig | CustomOptimizer:
    """What builds the optimizer.

    Raises:
        ValueError: settings of AdamW are wrong.
        TypeError: the same.
    """
    if optimizer is None or isinstance(optimizer, OptimizerConfig):
        return optimizer or OptimizerConfig()
    make = direct(optimizer)
    if isinstance(make, partial) and make.func is torch.optim.Optimizer:
        # The parser takes settings that are wrong for AdamW for those of no particular optimizer.
        return OptimizerConfig(**make.keywords)
    return CustomOptimizer(make)


def resumed_group(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group of a checkpoint with the settings of the one that it is loaded into.

    The learning rate keeps its place in the warm-up.

    >>> resumed_group({"lr": 1e-3, "initial_lr": 1e-2}, {"lr": 4.0, "initial_lr": 8.0, "params": [0]})
    {'lr': 0.005, 'initial_lr': 0.01, 'params': [0]}
    """
    base, before = own.get("initial_lr", own["lr"]), saved.get("initial_lr", saved["lr"])
    lr = saved["lr"] if base == before else base * (saved["lr"] / before)
    cycled = CYCLED if "max_momentum" in own else ()
    settings = {key: own[key] for key in SETTINGS if key in own and key not in cycled}
    return {**saved, **settings, "lr": lr}


def with_own_settings(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's state as an optimizer loads it: with the optimizer's own settings.

    Raises:
        ValueError: it is the state of another kind of optimizer.
    """
    own_kind, saved_kind = _kind_of(optimizer.param_groups[0]), _kind_of(state["param_groups"][0])
    if own_kind != saved_kind:
        way = f"Set model.optimizer.kind={saved_kind}." if saved_kind in KINDS else "Resume with its own recipe."
        raise ValueError(f"The checkpoint holds the moments of another optimizer. {way}")
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    return {**state, "param_groups": [resumed_group(own, saved) for own, saved in groups]}


def _kind_of(group: Mapping[str, Any]) -> str:
    """By which a state is told from that of another optimizer."""
    if "t_alpha" in group:
        return "adamw8bit"
    family = [key for key in FAMILY_KEYS if key in group]
    return "adamw" if family == ["betas"] else " ".join(family)


class _Ramp:
    """Rises linearly to 1 over so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


class _Warmup(torch.optim.lr_scheduler.LambdaLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = self.base_lrs
        super().load_state_dict(state_dict)
        self.base_lrs = own
