"""Network passes and storage that a method needs, found by running it on a dummy network."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_vgrpo.core.sizes import Plan
from lit_vgrpo.core.types import Conditioning, Experience, Rollout
from lit_vgrpo.objectives.base import Objective, PrepareContext
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.training.dummy_rollout import dummy_rollout
from lit_vgrpo.training.live_memory import LiveMemory

LATENT = (5, 7, 11)
"""Latent shape that no other tensor of a method has by chance."""
LATENT_BYTES = 4 * 5 * 7 * 11


@dataclass(frozen=True)
class Pass:
    """A call of the policy; ``rows`` is the batch before guidance doubles it."""

    rows: int
    guidance: float
    with_grad: bool


@dataclass(frozen=True)
class Demand:
    """Needs of an iteration on one rank.

    Attributes:
        stored: Largest pass without gradient besides the rollout's; ``None`` if there is none.
        trained: The pass of a micro-batch.
        kept: Storage kept for the updates, in latents.
        loss: Peak memory of the loss without the network, in latents.
        copies: Names of the copies of the trained weights kept on the device.
        samples_with_copy: Whether one of them is swapped in for the rollout.
    """

    stored: Pass | None
    trained: Pass
    kept: float
    loss: float
    copies: tuple[str, ...]
    samples_with_copy: bool


class _StandIn(nn.Module):
    """Dummy network that returns its input and records its calls."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.path = policy.path
        self.embeds_guidance = policy.embeds_guidance
        self.device = torch.device("cpu")
        self.weight = nn.Parameter(torch.ones(1))
        self.passes: list[Pass] = []

    def forward(self, z: Tensor, t: Tensor, cond: Conditioning, guidance: float = 1.0) -> Tensor:
        self.passes.append(Pass(len(z), guidance, torch.is_grad_enabled()))
        return z * self.weight


def demand(objective: Objective, policy: Policy, plan: Plan) -> Demand:
    """Return what a method needs, by preparing an iteration and one micro-batch with a copy of it.

    Args:
        policy: Loaded, on any device; only its path is used.
    """
    method, network = copy.copy(objective), _StandIn(policy)
    method.copies = {}
    method.connect(lambda values: values, rollout_device=None)
    stand_in: Any = network
    method.setup(stand_in)
    whole = _prepared(method, stand_in, plan.images_per_rank, plan, _later_images(plan))
    _, micro = _prepared(method, stand_in, plan.micro_batch_size, plan)
    method.before_update(stand_in, [micro])
    with LiveMemory() as live:
        loss, _ = method.loss(stand_in, micro)
        loss.backward()
    stored = [one for one in network.passes if not one.with_grad]
    (trained,) = (one for one in network.passes if one.with_grad)
    return Demand(
        stored=max(stored, key=lambda one: one.rows * policy.guidance_factor(one.guidance), default=None),
        trained=trained,
        kept=_bytes_of_latents(whole) / LATENT_BYTES,
        loss=live.peak / LATENT_BYTES,
        copies=tuple(sorted(method.copies)),
        samples_with_copy=not isinstance(method.acting(stand_in), nullcontext),
    )


def _later_images(plan: Plan) -> Tensor | None:
    """Return a rank's images that the first update does not train on; ``None`` where it trains on all of them."""
    first = plan.micro_batches_per_update * plan.micro_batch_size
    return torch.arange(first, plan.images_per_rank) if first < plan.images_per_rank else None


def _prepared(
    method: Objective, policy: Any, images: int, plan: Plan, later: Tensor | None = None
) -> tuple[Rollout, Experience]:
    cond = Conditioning({"rows": torch.zeros(1, 1)})
    rollout = dummy_rollout(method, policy.path, cond, LATENT, images, plan.group_size)
    advantages = torch.linspace(-1, 1, images)
    size, updates = plan.micro_batch_size, plan.updates_per_iteration
    return rollout, method.prepare(PrepareContext(policy, rollout, advantages, size, updates, later=later))


def _bytes_of_latents(value: Any) -> int:
    """Return the bytes of the latent-shaped tensors in a tree of dataclasses, counting each storage once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(value)}
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if tuple(value.shape[-3:]) == LATENT:
            yield value
    elif isinstance(value, dict | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
