"""Options of Lightning's Trainer that it accepts silently although they stop a run from working."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LEAST = {
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "gradient_clip_val": 0,
    "log_every_n_steps": 0,
    "max_epochs": -1,
    "max_steps": -1,
    "min_epochs": 0,
    "min_steps": 0,
    "num_nodes": 1,
    "reload_dataloaders_every_n_epochs": 0,
}
"""Smallest valid numbers."""
NOT_ZERO = ("max_epochs", "max_steps")


def trainer_errors(options: Mapping[str, Any]) -> list[str]:
    """Return an error for each option that the Trainer would silently accept.

    Args:
        options: The recipe's ``trainer`` as plain values.
    """
    errors = []
    for name, least in LEAST.items():
        value = options.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue  # the parser refuses other types
        if not math.isfinite(value) or value < least or (value == 0 and name in NOT_ZERO):
            use = "1 or more, or -1" if name in NOT_ZERO else f"{least} or more"
            errors.append(f"trainer.{name}={value} is invalid. Use {use}.")
    if options.get("barebones"):
        errors.append("trainer.barebones=true switches off checkpoints, metrics and evaluations. Leave it out.")
    return errors
