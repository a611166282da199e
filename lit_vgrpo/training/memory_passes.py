"""Network passes and storage that a method needs, measured on a dummy rollout."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_vgrpo.core.probability_paths import ProbabilityPath
from lit_vgrpo.core.sizes import Plan, group_layout
from lit_vgrpo.core.types import Conditioning, Experience, Rollout, Trajectory
from lit_vgrpo.objectives.base import Objective, PrepareContext
from lit_vgrpo.policies.base import Policy

LATENT = (5, 7, 11)
"""Latent shape that no other tensor of a method is likely to have."""
LATENT_BYTES = 4 * math.prod(LATENT)


class LiveMemory(TorchDispatchMode):
    """Mode that counts the bytes of live storages on any device, including the meta device and backward passes.

    ``peak`` is the largest number alive at once. An operation's temporary workspace is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._shapes: dict[Any, list[tuple[Any, ...]]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {_place(value) for value in _held((args, kwargs))}
        result = self._result(func, known, args, kwargs or {})
        for value in _held(result):
            # A view of an outer tensor, or one changed in place, allocates nothing.
            if _place(value) not in known:
                self._add(value.untyped_storage())
        return result

    def _result(self, func: Any, known: set[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operation, or allocate what it returned for such meta tensors before: torch can take 2 ms for it."""
        try:
            key = func, _described(args), _described(kwargs)
            shapes = self._shapes.get(key)
        except TypeError:  # tensors with values, or an argument that is not hashable
            return func(*args, **kwargs)
        if shapes:
            made = tuple(torch.empty_strided(*one, dtype=dtype, device="meta") for *one, dtype in shapes)
            return made if len(made) > 1 else made[0]
        result = func(*args, **kwargs)
        if shapes is None:
            made = result if isinstance(result, tuple) else (result,)
            is_new = all(isinstance(one, Tensor) and one.is_meta for one in made)
            is_new = is_new and len({_place(one) for one in made} - known) == len(made)  # no view, nothing in place
            self._shapes[key] = [(one.shape, one.stride(), one.dtype) for one in made] if is_new else []
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self._storages:
            return
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed(_: object) -> None:
            self.live -= size
            self._storages.pop(place, None)

        self._storages[place] = weakref.ref(storage, freed)


def _held(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts; for a sharded tensor, the rank's shard.

    A ``DTensor`` reports the size of the whole. ``tree_leaves`` would add a fifth to the time of a pass.
    """
    if isinstance(values, Tensor):
        yield values._local_tensor if isinstance(values, DTensor) else values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _held(value)


def _described(value: Any) -> Any:
    """Return what the shape of an operation's result follows from; TypeError for a tensor with values."""
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter) or not value.is_meta:
            raise TypeError
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(option)) for name, option in value.items())
    return type(value), value


def _place(value: Tensor) -> int:
    return value.untyped_storage()._cdata


def prepared(
    objective: Objective,
    policy: Policy,
    conditioning: Conditioning,
    latent_shape: tuple[int, ...],
    images: int,
    plan: Plan,
    micro_batch_size: int,
    off_policy: Tensor | None = None,
) -> tuple[Rollout, Experience]:
    """Return a dummy rollout with random latents, not from global generators, and what the method prepares from it.

    Args:
        conditioning: A single row, on the device of the rollout.
        latent_shape: ``(C, H, W)`` of an image's latent.
        images: Images of the rollout; with replay, the experience has twice as many.
        off_policy: Indices of the images that the first update does not train on.
    """
    rollout = _dummy_rollout(objective, policy.path, conditioning, latent_shape, images, plan.group_size)
    advantages = torch.linspace(-1, 1, images, device=rollout.latents.device)
    updates, whole = plan.updates_per_iteration, rollout
    if objective.replay:
        groups = rollout.group_ids + images // rollout.group_size
        whole = rollout.followed_by(replace(rollout, group_ids=groups, image_ids=rollout.image_ids + images))
        advantages = advantages.repeat(2)
        off_policy = None if off_policy is None else torch.cat([off_policy, off_policy + images])
    sizes = micro_batch_size, updates
    context = PrepareContext(policy, whole, advantages, *sizes, off_policy=off_policy, is_trial=True)
    return rollout, objective.prepare(context)


def _dummy_rollout(
    objective: Objective,
    path: ProbabilityPath,
    conditioning: Conditioning,
    latent_shape: tuple[int, ...],
    images: int,
    group_size: int,
) -> Rollout:
    spec, size = objective.rollout_spec(0), math.gcd(images, group_size)
    rows, image_ids = group_layout(range(images // size), size)
    device = next(iter(conditioning.tensors.values())).device
    generator = torch.Generator().manual_seed(0)
    times = torch.cat([path.snap(1 - torch.arange(spec.steps) / spec.steps), torch.zeros(1)]).to(device)
    trajectory, recorded = None, objective.recorded_steps(0)
    if recorded:
        states = torch.randn(images, len(recorded), *latent_shape, generator=generator).to(device)
        trajectory = Trajectory(states, torch.zeros(images, 0, device=device), None, times[list(recorded)], 0.0)
    if spec.is_sde:
        steps = spec.sde_steps
        states = torch.randn(images, len(steps) + 1, *latent_shape, generator=generator).to(device)
        trajectory = Trajectory(
            states=states,
            log_probs=torch.zeros(images, len(steps), device=device),
            means=states[:, 1:].clone() if objective.records_means else None,
            times=times[steps.start : steps.stop + 1],
            second_time=float(times[1]),
        )
    return Rollout(
        latents=torch.randn(images, *latent_shape, generator=generator).to(device),
        group_ids=rows,
        image_ids=image_ids,
        conditioning=conditioning,
        rows=rows.to(device) % len(conditioning),
        schedule=times[:-1],
        iteration=0,
        seed=0,
        group_size=size,
        spec=spec,
        trajectory=trajectory,
    )


@dataclass(frozen=True)
class Pass:
    """Calls of the policy whose graphs are alive at once; ``rows`` is the batch before guidance doubles it."""

    rows: int
    guidance: float
    with_grad: bool
    times: int = 1


@dataclass(frozen=True)
class Demand:
    """Needs of an iteration on one rank."""

    stored: Pass | None  # largest pass without gradient, excluding the rollout's
    trained: Pass  # the passes of a micro-batch
    kept: float  # storage kept for the updates, in latents
    loss: float  # peak memory of the loss without the network, in latents
    copies: tuple[str, ...]  # names of the copies of the trained weights kept on the device
    samples_with_copy: bool  # a copy is swapped in for the rollout


class _StandIn(nn.Module):
    """Dummy network that returns its input and records its calls."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.path = policy.path
        self.embeds_guidance = policy.embeds_guidance
        self.device = torch.device("cpu")
        self.weight = nn.Parameter(torch.ones(1))
        self.passes: list[Pass] = []

    def forward(
        self, z: Tensor, t: Tensor, cond: Conditioning, guidance: float = 1.0, detach_negative: bool = False
    ) -> Tensor:
        self.passes.append(Pass(len(z), 1.0 if detach_negative else guidance, torch.is_grad_enabled()))
        return z * self.weight


def demand(objective: Objective, policy: Policy, plan: Plan) -> Demand:
    """Return a method's needs, by preparing an iteration and one micro-batch with a copy of it and a dummy network."""
    method, network = copy.copy(objective), _StandIn(policy)
    method.copies, method.all_ranks = {}, lambda values: values
    method.connect(rollout_device=None)
    stand_in = cast(Policy, network)
    method.setup(stand_in)
    first = plan.micro_batches_per_update * plan.micro_batch_size
    off_policy = torch.arange(first, plan.images_per_rank) if first < plan.images_per_rank else None
    cond, size = Conditioning({"rows": torch.zeros(1, 1)}), plan.micro_batch_size
    whole = prepared(method, stand_in, cond, LATENT, plan.images_per_rank, plan, size, off_policy)
    _, micro = prepared(method, stand_in, cond, LATENT, size, plan, size)
    method.before_update(stand_in, [micro])
    with LiveMemory() as live:
        loss, _ = method.loss(stand_in, micro)
        loss.backward()
    storages = {_place(tensor): tensor.untyped_storage().nbytes() for tensor in _latents(whole)}
    stored = [one for one in network.passes if not one.with_grad]
    trained = [one for one in network.passes if one.with_grad]
    return Demand(
        stored=max(stored, key=lambda one: one.rows * policy.guidance_factor(one.guidance), default=None),
        trained=replace(trained[0], times=len(trained)),
        kept=sum(storages.values()) / LATENT_BYTES,
        loss=live.peak / LATENT_BYTES,
        copies=tuple(sorted(method.copies)),
        samples_with_copy=not isinstance(method.acting(stand_in), nullcontext),
    )


def _latents(value: Any) -> Iterator[Tensor]:
    """Yield the latent-shaped tensors in a tree of dataclasses."""
    if isinstance(value, Tensor):
        if tuple(value.shape[-3:]) == LATENT:
            yield value
    elif isinstance(value, dict | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _latents(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _latents(getattr(value, field.name))
