"""In which precision a policy's parts compute, whatever the trainer's own is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from lit_vgrpo.policies.base import Policy

P = ParamSpec("P")
R = TypeVar("R")


def in_own_precision(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let a method compute in the types of what it is given: an autocast around the call does not reach inside.

    For methods of a policy or of a module, which say on which ``device`` they are.
    """

    @wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        kind = self.device.type
        known = torch.amp.is_autocast_available(kind)  # not that of the meta device
        with torch.autocast(kind, enabled=False) if known else nullcontext():
            return method(self, *args, **kwargs)

    return call


def scaling_fault(policy: Policy, strategy: Any) -> str | None:
    """Why a policy cannot be trained in float16, in a line, or ``None``.

    A loss is a mean over some 10^5 latents, so that most gradients lie below float16's smallest number (6e-8) unless
    the loss is scaled up before its backward pass.
    """
    if policy.dtype != torch.float16 or getattr(strategy.precision_plugin, "scaler", None) is not None:
        return None
    return (
        "model.policy.dtype=float16 has gradients too small for its range, and nothing here scales them. Use "
        "model.policy.dtype=bfloat16, or on a GPU without it trainer.precision=16-mixed, which does."
    )
