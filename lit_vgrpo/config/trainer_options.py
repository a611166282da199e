"""Checks of Lightning's own options; its Trainer accepts several numbers unchecked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lit_vgrpo.core.ranges import (
    RANGES_OF_OTHERS,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    range_errors,
)
from lit_vgrpo.errors import suggestion

Batches = Annotated[int, Range(least=0)] | Annotated[float, Range(0, 1)]
Devices = Annotated[int, Range(1, 65_536)]

TRAINER_NUMBERS: dict[str, Any] = {
    "accumulate_grad_batches": PositiveInt,
    "check_val_every_n_epoch": PositiveInt | None,
    "devices": Devices | Literal[-1] | list[NonNegativeInt] | str,
    "fast_dev_run": NonNegativeInt | bool,
    "gradient_clip_val": NonNegativeFloat | None,
    "limit_predict_batches": Batches | None,
    "limit_test_batches": Batches | None,
    "limit_train_batches": Batches | None,
    "limit_val_batches": Batches | None,
    "log_every_n_steps": NonNegativeInt | None,
    "max_epochs": PositiveInt | Literal[-1] | None,
    "max_steps": PositiveInt | Literal[-1],
    "min_epochs": NonNegativeInt | None,
    "min_steps": NonNegativeInt | None,
    "num_nodes": Devices,
    "num_sanity_val_steps": Annotated[int, Range(least=-1)] | None,
    "overfit_batches": Batches,
    "reload_dataloaders_every_n_epochs": NonNegativeInt,
    "val_check_interval": PositiveInt | PositiveFloat | str | dict[str, int] | None,
}

RANGES_OF_OTHERS[Trainer] = TRAINER_NUMBERS

GPUS = ("cuda", "mps")


def trainer_errors(options: Mapping[str, Any]) -> list[str]:
    """Return an error for each option that the Trainer would silently accept or refuse less clearly.

    Args:
        options: The recipe's ``trainer`` as plain values.
    """
    known = {name: hint for name, hint in TRAINER_NUMBERS.items() if name in options}
    errors = [error for name, hint in known.items() for error in range_errors(f"trainer.{name}", options[name], hint)]
    bare = "trainer.barebones=true switches off checkpoints, metrics and evaluations. Leave it out."
    others = (
        bare if options.get("barebones") else None,
        _accelerator_error(options.get("accelerator")),
        _strategy_error(options.get("strategy")),
    )
    return [*map(str, errors), *(message for message in others if message is not None)]


def _accelerator_error(name: object) -> str | None:
    known = AcceleratorRegistry.available_accelerators()
    if not isinstance(name, str) or name == "auto":
        return None
    if name not in (*known, "gpu"):
        return f"trainer.accelerator={name} is not a choice. {suggestion(name, ('auto', 'cpu', 'gpu', *known))}"
    meant = GPUS if name == "gpu" else (name,)
    if any(AcceleratorRegistry[one]["accelerator"].is_available() for one in meant if one in known):
        return None
    what = "GPU" if name in ("gpu", *GPUS) else name
    return f"trainer.accelerator={name}: torch finds no {what} on this machine. Use trainer.accelerator=auto or cpu."


def _strategy_error(name: object) -> str | None:
    known = ("auto", *StrategyRegistry.available_strategies())
    if not isinstance(name, str) or name in known or "." in name:
        return None
    return f"trainer.strategy={name} is not a choice. {suggestion(name, known)}"
