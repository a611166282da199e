"""In which precision a policy's parts compute, whatever the trainer's own is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_own_precision(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let a policy's method compute in the types of its weights: an autocast around the call does not reach inside."""

    @wraps(method)
    def call(policy: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        kind = policy.device.type
        known = torch.amp.is_autocast_available(kind)  # not that of the meta device
        with torch.autocast(kind, enabled=False) if known else nullcontext():
            return method(policy, *args, **kwargs)

    return call
