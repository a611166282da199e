"""Checks of a recipe's settings, callbacks and prompts before anything is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback

from lit_vgrpo.callbacks import FID
from lit_vgrpo.config.tree import leaves, logger_errors, typed_key
from lit_vgrpo.core.pictures import PICTURE, named_pictures, picture_files, picture_size
from lit_vgrpo.errors import counted, shortened, suggestion, unknown_option
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.prompt_encoder import size_error
from lit_vgrpo.training.settings import unfit_callbacks

OFTEN_WANTED = ("heldout/reward", "reward/mean", "policy/loss", "cost/train_s", "time/iteration_s")
LOGGED = (
    *("heldout/", "reward/", "source/", "policy/", "cost/", "time/", "memory/", "passes/", "surrogate/"),
    *("edit/", "train/", "lr-"),
)
"""Prefixes of all metrics that a run logs."""

KEYS = ("model", "data", "trainer", "seed_everything", "name", "run_dir", "ckpt_path", "allow_changes")
LINKED = {"model.seed": "seed_everything", "data.seed": "seed_everything"}
LARGEST_SEED = 2**32 - 1
LEAST_OF_TRAINER = {
    **{"accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "num_nodes": 1, "log_every_n_steps": 0},
    **{"max_epochs": -1, "max_steps": -1, "min_epochs": 0, "min_steps": 0},
    "reload_dataloaders_every_n_epochs": 0,
}
"""Smallest numbers that stop no run; Lightning accepts smaller ones silently."""
FIX = f"Give each row the field {PICTURE} with a file's path (pictures inside a table are not read)"


def setting_errors(recipe: Mapping[str, Any]) -> list[str]:
    """Return the errors of settings that the parser accepts, in a recipe as plain values."""
    places = [place for place, _ in leaves(recipe) if place[0] in KEYS]
    known = [*KEYS, *(typed_key(place[:size]) for place in places for size in range(2, len(place) + 1))]
    errors = [unknown_option(key, "a recipe", known) for key in recipe if key not in KEYS]
    errors += logger_errors((recipe.get("trainer") or {}).get("logger"))
    for target, source in LINKED.items():
        section, _, name = target.partition(".")
        if isinstance(recipe.get(section), dict) and name in recipe[section]:
            errors.append(f"{target} follows {source}. Set {source}={recipe[section][name]} instead.")
    seed, trainer = recipe.get("seed_everything", 0), recipe.get("trainer") or {}
    if isinstance(seed, int) and not 0 <= seed <= LARGEST_SEED:
        errors.append(f"seed_everything={seed} is invalid. Use 0 to {LARGEST_SEED}.")
    if trainer.get("default_root_dir") is not None:
        errors.append("trainer.default_root_dir is set by the command. Use run_dir=... instead.")
    for name, least in LEAST_OF_TRAINER.items():
        value = trainer.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue  # the parser refuses other types
        is_limit = least == -1
        if not math.isfinite(value) or value < least or (value == 0 and is_limit):
            use = "1 or more, or -1" if is_limit else f"{least} or more"
            errors.append(f"trainer.{name}={value} is invalid. Use {use}.")
    if trainer.get("barebones"):
        errors.append("trainer.barebones=true switches off checkpoints, metrics and evaluations. Leave it out.")
    return errors


def callback_errors(callbacks: Sequence[Callback]) -> list[str]:
    """Return all errors of the recipe's callbacks, given in its order."""
    errors = unfit_callbacks(callbacks)
    for number, callback in enumerate(callbacks):
        found = callback.check() if isinstance(callback, FID) else []
        errors += [f"trainer.callbacks[{number}].{error}" if "=" in error.split()[0] else error for error in found]
    return errors


def metric_errors(callbacks: Sequence[Callback], schedule: Any, has_heldout: bool) -> list[str]:
    """Return an error for each metric that is watched but never logged, which Lightning reports after an iteration.

    Args:
        schedule: The function that builds the schedule of the learning rate, or ``None``.
    """
    watched = {"model.lr_scheduler.monitor": getattr(schedule, "keywords", {}).get("monitor")}
    for number, callback in enumerate(callbacks):
        if type(callback).__module__.startswith("lightning."):
            watched[f"trainer.callbacks[{number}].monitor"] = getattr(callback, "monitor", None)
    what, logged = ("runs", LOGGED) if has_heldout else ("runs without held-out prompts", LOGGED[1:])
    wanted = [metric for metric in OFTEN_WANTED if metric.startswith(logged)]
    return [
        f"{name}={metric}: {what} log no metric with this name. {suggestion(metric, wanted)}"
        for name, metric in watched.items()
        if metric and not metric.startswith(logged)
    ]


def picture_errors(
    policy: Policy, rows: Iterable[Mapping[str, Any]], what: str = "prompts", fix: str = FIX
) -> list[str]:
    """Return why a policy cannot use the rows' pictures, at most one line: one is missing, or does not fit.

    Args:
        what: Kind of prompts, for the message.
        fix: Advice on missing pictures, for the message.
    """
    name = type(policy).__name__
    for number, row in enumerate(rows, start=1):
        where = f'row {number} of the {what}, "{shortened(row["prompt"])}"'
        files = named_pictures(row) if policy.edits else picture_files(row)
        if policy.edits and not files:
            return [f"{name} edits pictures, but {where}, has none. {fix}, or use a policy that draws from prompts."]
        if files and not policy.edits:
            advice = f"has the field {PICTURE}. Use KontextPolicy, or rename it."
            return [f"{name} cannot edit pictures, but {where}, {advice}"]
        if policy.edits and len(files) != policy.references:
            found = f"{name} edits {counted(policy.references, 'picture')} per prompt, but {where}, has {len(files)}"
            option = "model.policy.references of QwenImageEditPolicy or Flux2EditPolicy"
            return [f"{found}. Give every row the same number, and set {option} to it."]
        for file in files if policy.edits else ():
            if (error := size_error(policy, picture_size(file))) is not None:
                return [f"{file}, of {where}, {error}"]
    return []
