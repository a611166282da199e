"""AdamW's settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import nn

from lit_vgrpo.ranges import HalfOpenUnitInterval, NonNegativeFloat, NonNegativeInt, Range, checked

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

KINDS = ("adamw", "adamw8bit")
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

    def build(self, parameters: Iterable[nn.Parameter]) -> Any:
        """What ``configure_optimizers`` returns: the optimizer, and the schedule where there is one.

        A checkpoint brings back the moments and how far the warm-up is, not these settings: they are those of the
        recipe that goes on.
        """
        optimizer = self._optimizer(list(parameters))
        if not self.warmup_steps:
            return optimizer
        warmup = _Warmup(optimizer, lambda step: min(1.0, (step + 1) / self.warmup_steps))
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


def resumed_group(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group of a checkpoint with the settings of the one that it is loaded into.

    The learning rate keeps its place in the warm-up.

    >>> resumed_group({"lr": 1e-3, "initial_lr": 1e-2}, {"lr": 4.0, "initial_lr": 8.0, "params": [0]})
    {'lr': 0.005, 'initial_lr': 0.01, 'params': [0]}
    """
    base, before = own.get("initial_lr", own["lr"]), saved.get("initial_lr", saved["lr"])
    lr = saved["lr"] if base == before else base * (saved["lr"] / before)
    settings = {key: own[key] for key in ("initial_lr", "betas", "weight_decay", "eps") if key in own}
    return {**saved, **settings, "lr": lr}


def with_own_settings(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's state as an optimizer loads it: with the optimizer's own settings.

    Raises:
        ValueError: it is the state of another kind of optimizer.
    """
    for values in state["state"].values():
        kind = "adamw" if "exp_avg" in values else "adamw8bit"
        if values and (kind == "adamw") != isinstance(optimizer, torch.optim.AdamW):
            raise ValueError(f"The checkpoint holds the moments of another optimizer. Set model.optimizer.kind={kind}.")
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    return {**state, "param_groups": [resumed_group(own, saved) for own, saved in groups]}


class _Warmup(torch.optim.lr_scheduler.LambdaLR):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = self.base_lrs
        super().load_state_dict(state_dict)
        self.base_lrs = own
