"""The optimizer and its learning-rate schedule: AdamW from options, or any of torch's by class or function.

On resume, settings that changed replace the saved ones.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import deepcopy
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

STEPPED = ("lr", "betas", "momentum")
"""Settings that schedules change."""
TRIED = (64, 64)
"""Shape of the weight on which an optimizer is tried."""
SMALLEST_8BIT = 4096
"""Smallest number of elements for which 8-bit Adam stores a tensor's moments in 8 bits."""
ASKED = "asked"
"""In a parameter group and in a schedule: its values when it was built, which a checkpoint thus also has."""


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

    name = "AdamW"

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        settings: dict[str, Any] = {key: getattr(self, key) for key in ("lr", "betas", "weight_decay", "eps")}
        if self.kind == "adamw8bit":
            return _adamw8bit(list(parameters), settings)
        return torch.optim.AdamW(parameters, **settings)

    def state_names(self) -> AbstractSet[str]:
        """Return the names in the state of a weight."""
        return {"state1", "state2"} if self.kind == "adamw8bit" else {"exp_avg", "exp_avg_sq"}

    def state_bytes(self, weights: Iterable[torch.Tensor]) -> int:
        """Return the bytes of both moments of these weights."""
        narrow = self.kind == "adamw8bit"
        return sum(p.numel() * (2 if narrow and p.numel() >= SMALLEST_8BIT else 8) for p in weights)


def _adamw8bit(weights: list[nn.Parameter], settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with 8-bit moments (arXiv 2110.02861); raise ModuleNotFoundError without it."""
    try:
        from bitsandbytes.optim import AdamW8bit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'model.optimizer.kind=adamw8bit needs bitsandbytes. Run: pip install "lit-vgrpo[memory]"'
        ) from error

    return AdamW8bit(weights, **settings)


class CustomOptimizer:
    """Any optimizer, from a function of the trainable weights, such as a class with its options bound."""

    kind = "custom"
    warmup_steps = 0

    def __init__(self, make: OptimizerCallable) -> None:
        self.make = direct(make)
        self.made = getattr(self.make, "func", self.make)  # a class with its options bound
        self.name: str = getattr(self.made, "__name__", type(self.made).__name__)

    def check(self) -> list[str]:
        """Return why the optimizer cannot take a step, tried on one weight: at most one line."""
        return self._tried()[0]

    def _tried(self) -> tuple[list[str], dict[str, Any] | None]:
        """Return the errors of a step on one weight, and the state that it left, ``None`` if it was not tried."""
        weight = nn.Parameter(torch.zeros(TRIED))
        weight.grad = torch.ones_like(weight)
        try:
            optimizer = self.make([weight])
        except Exception:  # it may need other weights; build() reports the reason
            return [], None
        key, module = f"model.optimizer={type(optimizer).__name__}", type(optimizer).__module__
        if not isinstance(optimizer, torch.optim.Optimizer):
            return [f"{key} is not an optimizer. Name a class such as torch.optim.SGD."], None
        file, losses = getattr(sys.modules.get(module), "__file__", None) or "", [0.0]
        if optimizer.defaults.get("capturable") or ("site-packages" in file and not module.startswith("torch.")):
            return [], None  # a step may need a GPU
        try:
            optimizer.step(closure=losses.pop)
        except Exception as error:  # a step may raise anything
            why = "it needs the loss several times" if isinstance(error, IndexError) else one_line(error).rstrip(".")
            return [f"{key} cannot take a step: {why}. Use AdamW or another."], None
        return [], {name: value for name, value in optimizer.state[weight].items() if value is not None}

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer; raise ValueError if it fails."""
        try:
            return self.make(list(parameters))
        except Exception as error:  # the constructor may raise anything
            raise ValueError(f"model.optimizer cannot be built: {one_line(error)}") from error

    def state_names(self) -> AbstractSet[str]:
        """Return the names in the state of a weight; none if a step cannot be tried."""
        return (self._tried()[1] or {}).keys()

    def state_bytes(self, weights: Iterable[torch.Tensor]) -> int:
        """Return the bytes of the state of these weights; those of AdamW's moments if a step cannot be tried."""
        state, tried = self._tried()[1], math.prod(TRIED)
        taken = 8 * tried if state is None else sum(x.nbytes for x in state.values() if isinstance(x, torch.Tensor))
        return sum(p.numel() for p in weights) * taken // tried


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


def remember_settings(optimizer: torch.optim.Optimizer, keys: AbstractSet[str]) -> None:
    """Keep an optimizer's settings in its parameter groups, and use them when it loads a checkpoint.

    Args:
        keys: Names that it needs in the state of a weight. If one is missing, that of another optimizer is dropped.
    """
    for group in optimizer.param_groups:
        group[ASKED] = {name: deepcopy(value) for name, value in group.items() if name not in ("params", ASKED)}
    optimizer_of, cls = weakref.ref(optimizer), type(optimizer)  # weak: its state is freed with it, not by a collection

    def load_state_dict(state: dict[str, Any], *args: Any) -> None:
        itself = cast(torch.optim.Optimizer, optimizer_of())
        pairs = zip(itself.param_groups, state["param_groups"], strict=True)
        state = {**state, "param_groups": [resumed_group(current, saved) for current, saved in pairs]}
        kept = {name for values in state["state"].values() for name in leaf_names(values)}
        if kept and not keys <= kept:
            rank_zero_warn(
                f"The checkpoint has the state of another optimizer ({', '.join(sorted(kept))}), which "
                f"{cls.__name__} cannot use. Its own ({', '.join(sorted(keys))}) starts at zero."
            )
            state["state"] = {}
        cls.load_state_dict(itself, state, *args)

    # Not a hook, which bitsandbytes ignores.
    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]


def resumed_group(current: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's parameter group with the settings that changed since it was built.

    A group also holds what the optimizer counts, such as its steps, and what a schedule has made of a setting. A
    changed learning rate keeps its place in the schedule; without a schedule, and so without ``initial_lr``, it is the
    current one.

    >>> before, now = {"lr": 8.0, "initial_lr": 8.0, "k": 0}, {"lr": 1e-2, "initial_lr": 1e-2, "k": 0}
    >>> group = resumed_group({"asked": now, **now}, {"asked": before, **before, "lr": 4.0, "k": 7})
    >>> group["lr"], group["initial_lr"], group["k"]
    (0.005, 0.01, 7)
    >>> resumed_group({"lr": 1e-3, "asked": {"lr": 1e-3}}, {"lr": 4.0, "initial_lr": 8.0})["lr"]
    0.001
    """
    asked = current[ASKED]
    settings = changed(asked, saved.get(ASKED, {}))
    if "initial_lr" in saved and "initial_lr" not in asked:
        settings["lr"] = asked["lr"]
    elif "lr" in settings and "initial_lr" in asked:
        settings["lr"] = asked["initial_lr"] * (saved["lr"] / saved.get("initial_lr", saved["lr"]))
    return {**current, **saved, **settings, ASKED: asked}


def changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that were different or missing before."""
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


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
        self._state_names: AbstractSet[str] = frozenset()  # of an optimizer that it has built
        self._built: list[tuple[Any, dict[str, Any]]] = []  # settings of the groups, and a schedule's state
        self._watched: list[tuple[str | None, bool]] = []  # by schedule: a metric, and whether it must be known

    def schedule_error(self, steps: int) -> str | None:
        """Return why the schedule fails at its first or last step, tried on one weight, or ``None``."""
        make, step = self.make_schedule, 0
        if make is None:
            return None
        try:
            with warnings.catch_warnings(action="ignore"):  # the optimizer takes no steps
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
        optimizer, self._state_names = self.optimizer.build(parameters), self.optimizer.state_names()
        make = self.make_schedule
        if make is None:
            if not self.optimizer.warmup_steps:
                return optimizer
            make = partial(LambdaLR, lr_lambda=partial(_ramp, self.optimizer.warmup_steps))
        try:
            scheduler = make(optimizer)
        except Exception as error:  # the constructor may raise anything
            raise ValueError(f"model.lr_scheduler cannot be built: {one_line(error)}") from error
        self.refuse_unwatched([LRSchedulerConfig(scheduler)])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def keep(self, optimizers: Sequence[Any], schedules: Iterable[Mapping[str, Any]]) -> None:
        """Keep what a module's optimizer and schedules were built with; raise ValueError for several optimizers."""
        if (count := len(optimizers)) != 1:
            several = f"configure_optimizers returned {count} optimizers, but an update is a step of one"
            raise ValueError(f"{several}. Return one, with a parameter group for each learning rate.")
        schedules = list(schedules)
        for group in optimizers[0].param_groups if schedules else ():  # as most schedules do
            group.setdefault("initial_lr", group["lr"])
        remember_settings(optimizers[0], self._state_names)
        asked = [group[ASKED] for group in optimizers[0].param_groups]
        self._built = [(asked, deepcopy(one["scheduler"].state_dict())) for one in schedules]
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

    def start(self, schedules: Iterable[LRSchedulerConfig], is_resumed: bool) -> None:
        """Before the first step, let loaded schedules continue as if they had always had the recipe's settings."""
        found = [one.scheduler for one in schedules]
        if is_resumed and [getattr(one, ASKED, None) for one in found] != self._built:
            _repeat(found, self._built)
        for scheduler, built in zip(found, self._built, strict=True):
            setattr(scheduler, ASKED, built)


def _repeat(schedulers: Sequence[Any], as_built: Sequence[tuple[Any, dict[str, Any]]]) -> None:
    """Set loaded schedules to what they were when built and repeat their steps; one of a plateau keeps its counters."""
    if not isinstance(schedulers[0], ReduceLROnPlateau):
        for group in schedulers[0].optimizer.param_groups:
            group.update({name: deepcopy(group[ASKED][name]) for name in STEPPED if name in group[ASKED]})
    for scheduler, (_, built) in zip(schedulers, as_built, strict=True):
        if isinstance(scheduler, ReduceLROnPlateau):
            _, before = getattr(scheduler, ASKED, (None, built))
            vars(scheduler).update(deepcopy(changed(built, before)))
            continue
        steps = _steps(scheduler.state_dict()) - _steps(built)
        scheduler.load_state_dict(deepcopy(built))
        with warnings.catch_warnings(action="ignore"):  # the optimizer takes no steps
            for _ in range(steps):
                scheduler.step()


def _steps(state: Mapping[str, Any]) -> int:
    """Return the steps in a schedule's state; one of several schedules may count only in theirs."""
    steps: int = state["last_epoch"] if "last_epoch" in state else _steps(state["_schedulers"][0])
    return steps


def monitor_of(schedule: LRSchedulerConfig) -> str | None:
    """Return the metric that a schedule waits for: its configuration's, or that of Lightning's ReduceLROnPlateau."""
    metric: str | None = schedule.monitor or getattr(schedule.scheduler, "monitor", None)
    return metric


def _ramp(steps: int, step: int) -> float:
    return min(1.0, (step + 1) / steps)
