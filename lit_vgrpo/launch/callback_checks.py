"""Checks of a recipe's callbacks before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback

from lit_vgrpo.callbacks import FID, RewardHackAlarm
from lit_vgrpo.config.schema import options_of_class
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.errors import UserError, suggestion, with_full_keys
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.training.settings import unfit_callbacks

OFTEN_WANTED = ("heldout/reward", "reward/mean", "policy/loss", "cost/train_s", "time/iteration_s")
SECTIONS = ("heldout/", "reward/", "policy/", "cost/", "time/", "passes/", "scouts/", "surrogate/", "train/", "lr-")
"""Prefixes of all metrics that a run logs."""


def callback_errors(
    callbacks: Sequence[Callback], model: VGRPOModule, data: PromptDataModule, world_size: int
) -> list[str]:
    """Return all errors of the recipe's own callbacks, given in its order."""
    errors = unfit_callbacks(callbacks)
    for number, callback in enumerate(callbacks):
        found = callback.check() if isinstance(callback, FID) else []
        if isinstance(callback, RewardHackAlarm):
            found = callback.check(model, data)
        key, options = f"trainer.callbacks[{number}]", options_of_class(type(callback))
        errors += [with_full_keys(key, options, error) for error in found]
    return [*errors, *unknown_monitors(callbacks)]


def refuse_twins(callbacks: Sequence[Callback]) -> None:
    """Check that no two callbacks have the same state key, which a checkpoint could not tell apart.

    Raises:
        UserError: Two have.
    """
    keys = [callback.state_key for callback in callbacks]
    for number, callback in enumerate(callbacks):
        first = keys.index(callback.state_key)
        if first < number and type(callback).state_dict is not Callback.state_dict:
            name = type(callback).__name__
            raise UserError(
                f"trainer.callbacks contains {name} twice, as [{first}] and [{number}]. Leave one of them out."
            )


def unknown_monitors(callbacks: Sequence[Callback]) -> list[str]:
    """Return an error for each monitored metric that nothing logs; none with a callback of the user's, which may."""
    if not all(type(callback).__module__.startswith(("lit_vgrpo.", "lightning.")) for callback in callbacks):
        return []
    asked = [(type(callback).__name__, getattr(callback, "monitor", None)) for callback in callbacks]
    return [
        f"{name} monitor={metric}: no metric of a run has that name. {suggestion(metric, OFTEN_WANTED)}"
        for name, metric in asked
        if metric is not None and not metric.startswith(SECTIONS)
    ]
