"""An optimizer's state from a checkpoint, with the settings of the resuming recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

KINDS = ("adamw", "adamw8bit")
FAMILY_KEYS = ("betas", "momentum", "alpha", "rho")
"""Settings that distinguish families of optimizers."""
SETTINGS = ("initial_lr", "betas", "momentum", "alpha", "rho", "weight_decay", "eps", "dampening", "nesterov", "fused")
CYCLED = ("betas", "momentum")
"""Settings that a schedule with ``max_momentum`` also changes."""


def resumed_group(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's parameter group with the settings of the group it is loaded into.

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
    """Return a checkpoint's state with the optimizer's own settings.

    Raises:
        ValueError: the state belongs to a different kind of optimizer.
    """
    own_kind, saved_kind = _kind_of(optimizer.param_groups[0]), _kind_of(state["param_groups"][0])
    if own_kind != saved_kind:
        way = f"Set model.optimizer.kind={saved_kind}." if saved_kind in KINDS else "Resume with its own recipe."
        raise ValueError(f"The checkpoint has the moments of a different optimizer. {way}")
    groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
    return {**state, "param_groups": [resumed_group(own, saved) for own, saved in groups]}


def without_kernel(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state that does not say which kernel stepped it, since its reader may not have that one."""
    return {**state, "param_groups": [{**group, "fused": None} for group in state["param_groups"]]}


def _kind_of(group: Mapping[str, Any]) -> str:
    """Return a label of the optimizer that a state belongs to."""
    if "t_alpha" in group:
        return "adamw8bit"
    family = [key for key in FAMILY_KEYS if key in group]
    return "adamw" if family == ["betas"] else " ".join(family)
