"""What of a recipe's callbacks cannot work, found before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import Callback

from lit_vgrpo.callbacks import FID, RewardHackAlarm
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.errors import suggestion
from lit_vgrpo.module import VGRPOModule

OFTEN_WANTED = ("heldout/reward", "reward/mean", "policy/loss", "cost/train_s", "time/iteration_s")
SECTIONS = ("heldout/", "reward/", "policy/", "cost/", "time/", "passes/", "surrogate/", "train/", "lr-")
"""How the names of all metrics begin that a run logs."""


def callback_faults(
    callbacks: Sequence[Callback], model: VGRPOModule, data: PromptDataModule, world_size: int
) -> list[str]:
    """Return a line for each callback that cannot work."""
    faults = [fault for callback in callbacks if isinstance(callback, FID) for fault in callback.check(world_size)]
    alarms = [callback for callback in callbacks if isinstance(callback, RewardHackAlarm)]
    return [*faults, *(fault for alarm in alarms for fault in alarm.check(model, data)), *unknown_monitors(callbacks)]


def unknown_monitors(callbacks: Sequence[Callback]) -> list[str]:
    """Return a line for each metric that a callback waits for and nobody logs.

    None where there is a callback of the user's own, which may log it.
    """
    if not all(type(callback).__module__.startswith(("lit_vgrpo.", "lightning.")) for callback in callbacks):
        return []
    asked = {type(callback).__name__: getattr(callback, "monitor", None) for callback in callbacks}
    return [
        f"{name} monitor={metric}: no metric of a run has that name. {suggestion(metric, OFTEN_WANTED)}"
        for name, metric in asked.items()
        if metric is not None and not metric.startswith(SECTIONS)
    ]
