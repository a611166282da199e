"""The optimizer and its learning-rate schedule: AdamW from options, or any of torch's by class or function.

On resume the recipe's settings replace the saved ones.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from lit_vgrpo.core.ranges import HalfOpenUnitInterval, NonNegativeFloat, NonNegativeInt, Range, checked
from lit_vgrpo.errors import one_line, suggestion

OptimizerCallable = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LRSchedulerCallable = Callable[[torch.optim.Optimizer], LRScheduler]

SETTINGS = ("initial_lr", "betas", "momentum", "alpha", "rho", "weight_decay", "eps", "dampening", "nesterov")
CYCLED = ("betas", "momentum")
"""Settings that a schedule with ``max_momentum`` also changes."""


@checked
@dataclass
class OptimizerConfig:
    """AdamW over the trainable weights.

    Args:
        lr: Learning rate after the warm-up, constant from then on.
        betas: Decay of the first and second moment.
        weight_decay: Decoupled weight decay.
        eps: Term added to the denominator.
        warmup_steps: Optimizer steps over which the rate rises linearly.
        kind: Torch's AdamW, or bitsandbytes' with both moments in 8 bits: 2 bytes per trained weight instead of 8.
    """

    lr: Annotated[float, Range(above=0, most=1)] = 3e-4
    betas: tuple[HalfOpenUnitInterval, HalfOpenUnitInterval] = (0.9, 0.999)
    weight_decay: NonNegativeFloat = 1e-4
    eps: Annotated[float, Range(above=0)] = 1e-8
    warmup_steps: NonNegativeInt = 0
    kind: Literal["adamw", "adamw8bit"] = "adamw"

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer; a checkpoint restores its moments, not its settings."""
        settings: dict[str, Any] = {key: getattr(self, key) for key in ("lr", "betas", "weight_decay", "eps")}
        if self.kind == "adamw8bit":
            return _adamw8bit(list(parameters), settings)
        optimizer = torch.optim.AdamW(parameters, **settings)
        optimizer.register_load_state_dict_pre_hook(partial(with_current_settings, keys={"exp_avg", "exp_avg_sq"}))
        return optimizer


def _adamw8bit(weights: list[nn.Parameter], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with 8-bit moments (arXiv 2110.02861); raise ModuleNotFoundError without it."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'model.optimizer.kind=adamw8bit needs bitsandbytes. Run: pip install "lit-vgrpo[memory]"'
        ) from error

    class ResumableAdamW8bit(AdamW8bit):  # the library's class runs no load hooks
        def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
            state_dict = with_current_settings(self, state_dict, {"state1", "state2"})
            super().load_state_dict(state_dict, move_to_device)

    return ResumableAdamW8bit(weights, **settings)


class CustomOptimizer:
    """Any optimizer, from a function of the trainable weights, such as a class with its options bound."""

    kind = "custom"
    warmup_steps = 0

    def __init__(self, make: OptimizerCallable) -> None:
        self.make = direct(make)

    def check(self) -> list[str]:
        """Return why the optimizer cannot take a step, tried on one weight: at most one line."""
        return self._tried()[0]

    def _tried(self) -> tuple[list[str], set[str]]:
        """Return the errors of a step on one weight, and the names in the state that it left."""
        weight = nn.Parameter(torch.zeros(2, 2))
        weight.grad = torch.ones_like(weight)
        try:
            optimizer = self.make([weight])
        except Exception:  # it may need other weights; build() reports the reason
            return [], set()
        key, module = f"model.optimizer={type(optimizer).__name__}", type(optimizer).__module__
        if not isinstance(optimizer, torch.optim.Optimizer):
            return [f"{key} is not an optimizer. Name a class such as torch.optim.SGD."], set()
        file, losses = getattr(sys.modules.get(module), "__file__", None) or "", [0.0]
        if optimizer.defaults.get("capturable") or ("site-packages" in file and not module.startswith("torch.")):
            return [], set()  # a step may need a GPU
        try:
            optimizer.step(closure=losses.pop)
        except Exception as error:  # a step may raise anything
            why = "it needs the loss several times" if isinstance(error, IndexError) else one_line(error).rstrip(".")
            return [f"{key} cannot take a step: {why}. Use AdamW or another."], set()
        return [], {name for name, value in optimizer.state[weight].items() if value is not None}

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer; a checkpoint restores its state, not its settings. Raises ValueError if it fails."""
        try:
            optimizer = self.make(list(parameters))
        except Exception as error:  # the constructor may raise anything
            raise ValueError(f"model.optimizer cannot be built: {one_line(error)}") from error
        hook = partial(with_current_settings, keys=self._tried()[1])
        optimizer.register_load_state_dict_pre_hook(hook)
        return optimizer


def as_optimizer(optimizer: OptimizerConfig | OptimizerCallable | None) -> OptimizerConfig | CustomOptimizer:
    """Return the object that builds the optimizer; raise ValueError or TypeError for invalid settings of AdamW."""
    if optimizer is None or optimizer is OptimizerConfig:
        return OptimizerConfig()
    if isinstance(optimizer, OptimizerConfig):
        return optimizer
    make = direct(optimizer)
    if isinstance(make, partial) and make.func is torch.optim.Optimizer:
        # The parser passes invalid AdamW settings on as a plain mapping.
        return OptimizerConfig(**make.keywords)
    return CustomOptimizer(make)


def direct(make: Callable[..., Any], option: str = "optimizer") -> Callable[..., Any]:
    """Return a factory without the parser's wrappers, which cannot be pickled; raise TypeError if it is none.

    >>> direct(partial(lambda call, cls, *args, **options: call(cls, *args, **options), map, dict, a=1))
    functools.partial(<class 'dict'>, a=1)
    """
    name = type(make).__name__
    if isinstance(make, torch.optim.Optimizer | LRScheduler):
        raise TypeError(f"{name}(...) is already built. Pass a function that builds it, such as partial({name}, ...).")
    if not callable(make):
        example, how = "torch.optim.lr_scheduler.CosineAnnealingLR, T_max=100", "Pass"
        if option == "optimizer":
            example, lr = "torch.optim.SGD, lr=0.01", make if isinstance(make, float) else 1e-4
            how = f"Pass OptimizerConfig(lr={lr}), or"
        how += f" a class with its options, such as partial({example})."
        raise TypeError(f"{option}={one_line(repr(make)):.80} builds nothing. {how}")
    if isinstance(make, partial) and not isinstance(make.func, type) and make.args and isinstance(make.args[-1], type):
        return partial(make.args[-1], **make.keywords)
    return make


def resumed_group(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's parameter group with the settings of the group it is loaded into.

    The learning rate keeps its place in the schedule; without a schedule, and so without ``initial_lr``, it is the
    current one.

    >>> resumed_group({"lr": 1e-3, "initial_lr": 1e-2}, {"lr": 4.0, "initial_lr": 8.0, "params": [0]})
    {'lr': 0.005, 'initial_lr': 0.01, 'params': [0]}
    >>> resumed_group({"lr": 1e-3}, {"lr": 4.0, "initial_lr": 8.0, "params": [0]})["lr"]
    0.001
    """
    base, before = current.get("initial_lr"), saved.get("initial_lr", saved["lr"])
    lr = current["lr"] if base is None else saved["lr"] if base == before else base * (saved["lr"] / before)
    cycled = CYCLED if "max_momentum" in current else ()
    settings = {key: current[key] for key in SETTINGS if key in current and key not in cycled}
    return {**current, **saved, **settings, "lr": lr}


def with_current_settings(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], keys: AbstractSet[str] = frozenset()
) -> dict[str, Any]:
    """Return a checkpoint's state with the settings of the optimizer that loads it.

    Args:
        keys: Names that it needs in the state of a weight. If one is missing, that of another optimizer is dropped.
    """
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    groups = [resumed_group(current, saved) for current, saved in pairs]
    kept = {name for values in state["state"].values() for name in leaf_names(values)}
    if not kept or keys <= kept:
        return {**state, "param_groups": groups}
    rank_zero_warn(
        f"The checkpoint has the state of another optimizer ({', '.join(sorted(kept))}), which "
        f"{type(optimizer).__name__} cannot use. Its own ({', '.join(sorted(keys))}) starts at zero."
    )
    return {**state, "state": {}, "param_groups": groups}


def leaf_names(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in a weight's state, also those that bitsandbytes puts a level deeper."""
    for name, value in values.items():
        yield from leaf_names(value) if isinstance(value, Mapping) else [name]


class Optimization:
    """Builds the optimizer and the schedule of a run.

    The schedule is stepped with every update, or after every iteration if it waits for a plateau. Without one the rate
    is constant after the optimizer's warm-up.
    """

    def __init__(
        self, optimizer: OptimizerConfig | OptimizerCallable | None, lr_scheduler: LRSchedulerCallable | None
    ) -> None:
        self.optimizer: OptimizerConfig | CustomOptimizer = as_optimizer(optimizer)
        self.make_schedule: Callable[..., Any] | None = lr_scheduler and direct(lr_scheduler, "lr_scheduler")
        self._asked: dict[str, Any] = {}
        self._watched: list[tuple[str | None, bool]] = []  # by schedule: a metric, and whether it must be known

    def schedule_error(self, steps: int) -> str | None:
        """Return why the schedule fails at its first or last step, tried on one weight, or ``None``."""
        make, step = self.make_schedule, 0
        if make is None:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the optimizer takes no steps
                schedule = make(self.optimizer.build([nn.Parameter(torch.zeros(1, 1))]))
                for step in () if isinstance(schedule, ReduceLROnPlateau) else sorted({1, steps}):
                    schedule.last_epoch = step - 1
                    schedule.step()
        except Exception as error:  # at step 0, build() reports it
            return f"model.lr_scheduler fails at step {step} of {steps}: {one_line(error)}" if step else None
        return None

    def check(self, weights: Iterable[nn.Parameter] = ()) -> list[str]:
        """Return why ``weights``, on the meta device, cannot be trained with these settings: at most one line."""
        try:
            if weights:
                self.build(weights)
        except (ValueError, ModuleNotFoundError) as error:
            return [] if "meta" in str(error) else [str(error)]  # a constructor may read weights
        if isinstance(self.optimizer, CustomOptimizer):
            return self.optimizer.check()
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
        for group in optimizer.param_groups:  # as most schedules do
            group.setdefault("initial_lr", group["lr"])
        options = inspect.signature(type(scheduler)).parameters.keys() - {"optimizer", "last_epoch"}
        self._asked = {name: copy(value) for name, value in vars(scheduler).items() if name in options}
        self.refuse_unwatched([LRSchedulerConfig(scheduler)])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def keep(self, optimizers: Sequence[Any], schedules: Iterable[Mapping[str, Any]]) -> None:
        """Keep the metrics that a module's schedules wait for; raise ValueError for several optimizers."""
        if (count := len(optimizers)) != 1:
            several = f"configure_optimizers returned {count} optimizers, but an update is a step of one"
            raise ValueError(f"{several}. Return one, with a parameter group for each learning rate.")
        self._watched = [(one["monitor"], one.get("strict", True)) for one in schedules]

    def watch(self, schedules: Iterable[LRSchedulerConfig]) -> None:
        """Set these metrics, which Lightning drops; raise ValueError for a schedule that waits for none."""
        schedules = list(schedules)
        for one, watched in zip(schedules, self._watched, strict=False):
            one.monitor, one.strict = watched
        self.refuse_unwatched(schedules)

    @staticmethod
    def refuse_unwatched(schedules: Iterable[LRSchedulerConfig]) -> None:
        """Raise ValueError for a schedule that waits for a plateau of no metric."""
        if any(isinstance(one.scheduler, ReduceLROnPlateau) and monitor_of(one) is None for one in schedules):
            init = "{monitor: heldout/reward, mode: max, threshold_mode: abs}"
            named = f"class_path: lightning.pytorch.cli.ReduceLROnPlateau, init_args: {init}"
            raise ValueError(f"model.lr_scheduler=ReduceLROnPlateau watches no metric. Write {{{named}}}.")

    @staticmethod
    def step(schedules: Iterable[LRSchedulerConfig], updates: int) -> None:
        """Step the schedules of updates; those of epochs, and those that wait for a plateau, wait for the iteration.

        Args:
            updates: Updates done so far, of which a schedule counts every ``frequency``-th.
        """
        for one in schedules:
            is_due = one.interval == "step" and updates % one.frequency == 0
            if is_due and not isinstance(one.scheduler, ReduceLROnPlateau):
                one.scheduler.step()

    @classmethod
    def end_epoch(
        cls, schedules: Iterable[LRSchedulerConfig], iterations: int, metrics: Mapping[str, Any], is_evaluated: bool
    ) -> None:
        """Step the other schedules after an iteration; those that wait for a plateau, with the metric they monitor.

        Args:
            iterations: Iterations done so far, of which a schedule counts every ``frequency``-th.
            metrics: All known ones, also of an earlier evaluation.
            is_evaluated: The iteration ended with an evaluation; without one, a held-out metric takes no step.
        """
        for one in schedules:
            if iterations % one.frequency:
                continue
            if isinstance(one.scheduler, ReduceLROnPlateau):
                cls._end_epoch(one, metrics, is_evaluated)
            elif one.interval == "epoch":
                one.scheduler.step()

    @staticmethod
    def _end_epoch(one: LRSchedulerConfig, metrics: Mapping[str, Any], is_evaluated: bool) -> None:
        metric, scheduler = monitor_of(one), cast(ReduceLROnPlateau, one.scheduler)
        assert metric is not None
        knows_held_out = any(name.startswith("heldout/") for name in metrics)
        if metric.startswith("heldout/") and not is_evaluated and (metric in metrics or not knows_held_out):
            return
        if metric not in metrics:
            if not one.strict:
                return
            advice = suggestion(metric, metrics)
            raise RuntimeError(f"model.lr_scheduler.monitor={metric}: this metric has not been logged. {advice}")
        if metrics[metric] < 0 and scheduler.threshold_mode == "rel":  # its threshold is then below the best value
            rank_zero_warn(f"model.lr_scheduler takes a slightly worse {metric} for better. Set threshold_mode: abs.")
        scheduler.step(metrics[metric])

    def resume(self, schedules: Iterable[LRSchedulerConfig]) -> None:
        """Continue loaded schedules with the recipe's learning rate; warn of settings that keep the old values."""
        for scheduler in (one.scheduler for one in schedules):
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
            for name, asked in self._asked.items():
                if (now := getattr(scheduler, name)) != asked:
                    rank_zero_warn(f"model.lr_scheduler continues with the checkpoint's {name}={now}, not {asked}.")


def monitor_of(schedule: LRSchedulerConfig) -> str | None:
    """Return the metric that a schedule waits for: its configuration's, or that of Lightning's ReduceLROnPlateau."""
    metric: str | None = schedule.monitor or getattr(schedule.scheduler, "monitor", None)
    return metric


def _ramp(steps: int, step: int) -> float:
    return min(1.0, (step + 1) / steps)
