"""A rollout's settings, request and result, and the experience that updates use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_vgrpo.core.ranges import GuidanceScale, NonNegativeInt, OnlyWith, Range, checked
from lit_vgrpo.core.sizes import group_layout
from lit_vgrpo.core.solvers import ODE_OF, SOLVERS, tail_steps
from lit_vgrpo.core.surrogate import Pairs
from lit_vgrpo.errors import suggestion

MASK = "mask"
"""The conditioning's tensor ``(B, L)`` that is 1 at a prompt's tokens and 0 at padding."""

REFERENCE = "reference"
"""Prefix of the names of the conditioning's tensors of pictures. They have one row per prompt, and no tokens."""

SIZE_OF = "size_of_"
"""Prefix of the names of the conditioning's tensors ``(B, n)`` with the sizes of another's rows before padding."""


def padded(values: Sequence[Tensor]) -> list[Tensor]:
    """Append zeros to tensors of one number of dimensions, so that all have the largest sides."""
    sides = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]

    def grown(value: Tensor) -> Tensor:
        missing = [side - size for side, size in zip(sides, value.shape, strict=True)]
        return F.pad(value, [number for side in reversed(missing) for number in (0, side)]) if any(missing) else value

    return [grown(value) for value in values]


def lengthened(value: Tensor, length: int, dim: int = 1) -> Tensor:
    """Append zeros along the dimension of a prompt's tokens.

    >>> lengthened(torch.ones(1, 2), 3)
    tensor([[1., 1., 0.]])
    """
    return F.pad(value, (0, 0) * (value.ndim - 1 - dim) + (0, length - value.shape[dim]))


@dataclass
class Conditioning:
    """Prompt embeddings; every tensor has one row per prompt.

    If there is a tensor :data:`MASK`, the second dimension of every tensor is the prompt's tokens, except of those
    whose name starts with :data:`REFERENCE`: they come from the picture that the prompt edits.
    """

    tensors: dict[str, Tensor]

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def select(self, rows: Tensor) -> Conditioning:
        """Return one row for each entry of ``rows (B,)``."""
        return Conditioning({name: value[rows] for name, value in self.tensors.items()})

    def expand(self, size: int) -> Conditioning:
        """Return a single row, repeated as a view."""
        return Conditioning({name: value.expand(size, *value.shape[1:]) for name, value in self.tensors.items()})

    def to(self, device: torch.device | str) -> Conditioning:
        return Conditioning({name: value.to(device) for name, value in self.tensors.items()})

    def joined_with(self, other: Conditioning) -> Conditioning:
        """Return the rows of both; the shorter prompts are padded, for which they need a mask."""
        columns = {name: [value, other.tensors[name]] for name, value in self.tensors.items()}
        different = [name for name, (one, two) in columns.items() if one.shape[1:] != two.shape[1:]]
        if different and all(SIZE_OF + name in columns for name in different):
            for name in different:
                columns[name] = [torch.stack(padded([row for value in columns[name] for row in value]))]
        elif different:
            if MASK not in columns:
                raise ValueError(f"Prompts of different lengths need a tensor {MASK!r}. Pad all prompts to one length.")
            length = max(mask.shape[1] for mask in columns[MASK])
            for name in filter(is_of_prompt, columns):
                columns[name] = [lengthened(value, length) for value in columns[name]]
        return Conditioning({name: torch.cat(both) for name, both in columns.items()})


def is_of_prompt(name: str) -> bool:
    """Return whether the conditioning's tensor of this name comes only from the prompt."""
    return not name.startswith(REFERENCE)


@checked
@dataclass
class RolloutSpec:
    """Sampling settings.

    Args:
        solver: An ODE solver (a diffusers scheduler: euler, dpm++ or unipc on a rectified flow; ddim or dpm++ on a VP
            path) or an SDE whose steps have a likelihood (flow_sde, cps or dance_sde; ddim_sde on a VP path). Null is
            the first ODE solver of the policy's class, which is its pipeline's.
        steps: Number of sampling steps, one network pass each (two with guidance).
        guidance: Classifier-free guidance scale; 1.0 switches it off.
        noise_level: Strength of the SDE's noise; null uses the solver's published value.
        shared_noise: Start all images of a group from the same noise; requires an SDE to make them differ.
        window: Steps ``[first, stop)`` with SDE noise, the others follow the ODE; null is all except the last.
        tail: Re-grid the steps after the window to this share of them, with DPM-Solver++; null for no re-gridding.
    """

    solver: str | None = None
    steps: Annotated[int, Range(1, 1000)] = 10
    guidance: GuidanceScale = 1.0
    noise_level: Annotated[float, Range(0, 100), OnlyWith("solver", *ODE_OF)] | None = None
    shared_noise: bool = False
    window: Annotated[tuple[NonNegativeInt, NonNegativeInt], OnlyWith("solver", *ODE_OF)] | None = None
    tail: Annotated[float, Range(above=0, most=1), OnlyWith("solver", *ODE_OF)] | None = None

    def __post_init__(self) -> None:
        if self.solver is not None and self.solver not in SOLVERS:
            raise ValueError(f"solver={self.solver} does not exist. {suggestion(self.solver, SOLVERS)}")
        if self.window is not None and not 0 <= self.window[0] < self.window[1] <= self.steps:
            raise ValueError(
                f"window={list(self.window)} contains no step of {self.steps}. Use [first, stop) within 0 and "
                f"{self.steps}, or null."
            )

    @property
    def is_sde(self) -> bool:
        """True if steps are sampled from a distribution with a likelihood."""
        return self.solver in ODE_OF

    def ode_solver(self, solvers: Sequence[str]) -> str:
        """Return the ODE solver, an SDE's without its noise; the first of ``solvers``, a policy's, by default."""
        return solvers[0] if self.solver is None else ODE_OF.get(self.solver, self.solver)

    @property
    def sde_steps(self) -> range:
        """The steps with SDE noise; empty for an ODE."""
        if not self.is_sde:
            return range(0)
        return range(*(self.window or (0, self.steps - 1)))

    @property
    def network_calls(self) -> int:
        """Number of sampling steps after re-gridding the tail."""
        if not self.is_sde or self.tail is None:
            return self.steps
        stop = self.sde_steps.stop
        return stop + tail_steps(self.steps - stop, self.tail)

    def as_ode(self) -> RolloutSpec:
        """Return the ODE with the same number of steps, for held-out images."""
        if not self.is_sde:
            return self
        return RolloutSpec(self.ode_solver(()), self.steps, self.guidance)

    def errors(self) -> list[str]:
        """Return incompatible settings, one line each."""
        if not self.shared_noise or (self.is_sde and self.noise_level != 0):
            return []
        cause = f"noise_level={self.noise_level}" if self.is_sde else f"the ODE solver {self.solver or ''}".rstrip()
        same = f"model.objective.rollout.shared_noise=true with {cause} makes all images of a group identical."
        return [f"{same} Set shared_noise=false."]


@dataclass
class Trajectory:
    """The SDE steps of a rollout, to be trained on; of an ODE, the latents before recorded steps, ``(B, n, C, h, w)``.

    Attributes:
        states: ``(B, n + 1, C, h, w)``, float32: where step k started and, at k + 1, where it ended.
        log_probs: ``(B, n)``, float32: the log-probability of each step under the weights that rolled out.
        means: ``(B, n, C, h, w)``, the mean of each step's distribution, or ``None`` if not requested.
        times: ``(n + 1,)``, float32, the steps' times and the one after the last.
        second_time: The second time of the whole schedule, used if a formula diverges at ``t = 1``.
        predictions: ``(B, n, C, h, w)``, the network's at each step, with their graph, or ``None`` if not requested.
    """

    states: Tensor
    log_probs: Tensor
    means: Tensor | None
    times: Tensor
    second_time: float
    predictions: Tensor | None = None

    @classmethod
    def joined(cls, batches: Sequence[Trajectory]) -> Trajectory:
        """Return the steps of several batches of one request."""
        names = [n for n in ("states", "log_probs", "means", "predictions") if getattr(batches[0], n) is not None]
        columns: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
        return replace(batches[0], **columns)


@dataclass(frozen=True)
class RolloutRequest:
    """The images that a rank samples in an iteration.

    Attributes:
        prompts: One per group.
        rows: The prompts' data rows, one per group.
        slots: Global number of each group in the iteration; with ``seed`` and ``iteration`` it fixes the noise.
        group_size: Images per group, over all ranks.
        iteration: Number of the iteration, from 0.
        seed: The run's seed.
        members: Images of each group to sample, if other ranks sample the rest; ``None`` for all.
        batch_size: Images per forward pass; ``None`` uses one batch.
    """

    prompts: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    slots: Sequence[int]
    group_size: int
    iteration: int = 0
    seed: int = 0
    members: Sequence[int] | None = None
    batch_size: int | None = None

    def layout(self) -> tuple[Tensor, Tensor]:
        """Return each image's row among the groups and its global index, both ``(B,)``, group by group."""
        return group_layout(self.slots, self.group_size, self.members)


@dataclass
class Rollout:
    """The images of one iteration on this rank, as final latents.

    Attributes:
        latents: Shape ``(B, C, h, w)``, float32, detached.
        group_ids: Shape ``(B,)``, int64: the prompt's global slot in the iteration.
        image_ids: Shape ``(B,)``, int64: the image's global index in the iteration.
        conditioning: One row per group; ``rows`` maps images to rows.
        rows: Shape ``(B,)``, int64.
        schedule: The sampler's times ``(S,)``, float32 in (0, 1], noisiest first.
        iteration: Number of the iteration, from 0.
        seed: The run's seed.
        group_size: Images of a whole group, some of which may be on other ranks.
        spec: Settings that the images were sampled with.
        trajectory: The SDE steps, for a method that trains on them.
    """

    latents: Tensor
    group_ids: Tensor
    image_ids: Tensor
    conditioning: Conditioning
    rows: Tensor
    schedule: Tensor
    iteration: int
    seed: int
    group_size: int
    spec: RolloutSpec = field(default_factory=RolloutSpec)
    trajectory: Trajectory | None = None

    def __len__(self) -> int:
        return len(self.latents)

    @classmethod
    def joined(cls, batches: Sequence[Rollout]) -> Rollout:
        """Return the images of several batches of one request."""
        if len(batches) == 1:
            return batches[0]
        columns: dict[str, Any] = {
            name: torch.cat([getattr(batch, name) for batch in batches])
            for name in ("latents", "group_ids", "image_ids", "rows")
        }
        trajectories = [batch.trajectory for batch in batches if batch.trajectory is not None]
        return replace(batches[-1], **columns, trajectory=Trajectory.joined(trajectories) if trajectories else None)

    def made_finite(self, images: Tensor) -> Rollout:
        """Return the rollout with numbers for NaN in some images, ``(B,)``, bool: NaN times a weight of 0 is NaN."""

        def finite(values: Tensor) -> Tensor:
            chosen = images.to(values.device).view(-1, *[1] * (values.ndim - 1))
            return torch.where(chosen, values.nan_to_num(0, 0, 0), values)

        steps = self.trajectory
        if steps is not None:
            of_images = {n: v for n, v in vars(steps).items() if isinstance(v, Tensor) and n != "times"}
            columns: dict[str, Any] = {name: finite(values) for name, values in of_images.items()}
            steps = replace(steps, **columns)
        return replace(self, latents=finite(self.latents), trajectory=steps)

    def followed_by(self, other: Rollout) -> Rollout:
        """Return these images, followed by others with other numbers of groups and images."""
        rows = torch.cat([self.rows, other.rows + len(self.conditioning)])
        columns: dict[str, Any] = {
            name: torch.cat([getattr(self, name), getattr(other, name)])
            for name in ("latents", "group_ids", "image_ids")
        }
        conditioning = self.conditioning.joined_with(other.conditioning)
        return replace(self, **columns, conditioning=conditioning, rows=rows, trajectory=None)


@dataclass
class Steps:
    """The sampling steps that a method trains on, ``K`` per image; tensors have one row per image.

    Attributes:
        before: ``(B, K, C, h, w)``, float32: the latents that the network sees.
        t: ``(B, K)``, float32, their times.
        weight: ``(B, K)``, the weight of each step in the loss.
        after: ``(B, K, C, h, w)``, the latents after each step, of a method on the steps' likelihood.
        t_next: ``(B, K)``, the times after the steps, likewise.
        second_time: ``(B, K)``, the schedule's second time, likewise.
    """

    before: Tensor
    t: Tensor
    weight: Tensor
    after: Tensor | None = None
    t_next: Tensor | None = None
    second_time: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that the method has, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Steps:
        """Return the steps with a function applied to every tensor."""
        return Steps(**{name: function(value) for name, value in self.tensors().items()})


@dataclass
class Experience:
    """The inputs of the loss, one row per image; created by ``objective.prepare``.

    Attributes:
        latents: ``(B, C, h, w)``, the images' final latents ``o``.
        advantages: ``(B,)``, float32.
        conditioning: One row per group.
        rows: ``(B,)``, the conditioning row of each image.
        group_ids: ``(B,)``, int64: the images of a group have the same number.
        group_size: Images of a whole group, some of which may be elsewhere.
        pairs: Monte-Carlo pairs at which the network is asked, if any.
        steps: Sampling steps at which it is asked, if any.
        kept: What passes of copies left, by name; one row per image.
        weights: ``(B,)``, the images' weights in the loss, 0 for those that are left out; ``None`` for equal ones.
    """

    latents: Tensor
    advantages: Tensor
    conditioning: Conditioning
    rows: Tensor
    group_ids: Tensor
    group_size: int
    pairs: Pairs | None = None
    steps: Steps | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None

    def __len__(self) -> int:
        return len(self.latents)

    @property
    def counts(self) -> Tensor:
        """The images with a weight in the loss, ``(B,)``, bool."""
        return torch.ones_like(self.group_ids, dtype=torch.bool) if self.weights is None else self.weights > 0

    def to(self, device: torch.device) -> Experience:
        """Return the experience on another device with only the rows it uses; itself if it is there already."""
        if self.latents.device == device:
            return self
        used, rows = torch.unique(self.rows, return_inverse=True)
        pairs = None if self.pairs is None else self.pairs.compact().to(device)
        moved = self._map(lambda value: value.to(device))
        return replace(moved, conditioning=self.conditioning.select(used).to(device), rows=rows.to(device), pairs=pairs)

    def select(self, index: slice | Tensor) -> Experience:
        """Return the rows of some images, e.g. a micro-batch."""
        pairs = None if self.pairs is None else self.pairs.select(index)
        return replace(self._map(lambda value: value[index]), rows=self.rows[index], pairs=pairs)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Experience:
        """Apply a function to the tensors with one row per image, except the rows of the conditioning and pairs."""
        return replace(
            self,
            latents=function(self.latents),
            advantages=function(self.advantages),
            group_ids=function(self.group_ids),
            steps=None if self.steps is None else self.steps.map(function),
            kept={name: function(value) for name, value in self.kept.items()},
            weights=None if self.weights is None else function(self.weights),
        )

    def keep_shared(self, name: str, values: Tensor) -> Tensor:
        """Keep the predictions at the pairs whose pass a group shares once per row of pairs, and return the others.

        Args:
            values: ``(B, N, C, h, w)``; other shapes have a value per image, and all are returned.
        """
        pairs = self.pairs
        if pairs is None or not pairs.shared or values.ndim != self.latents.ndim + 1:
            return values
        if name not in pairs.predictions:
            shape = (len(pairs.times), pairs.shared, *values.shape[2:])
            pairs.predictions[name] = values.new_full(shape, math.nan)
        pairs.predictions[name][pairs.rows] = values[:, : pairs.shared]
        return values[:, pairs.shared :].clone()  # a view would keep the shared part in memory

    def kept_values(self, name: str) -> Tensor | None:
        """Return the values kept under a name, one row per image, or ``None``."""
        values, pairs = self.kept.get(name), self.pairs
        if values is None or pairs is None or name not in pairs.predictions:
            return values
        return torch.cat([pairs.predictions[name][pairs.rows], values], dim=1)

    def micro_batches(self, size: int) -> list[Experience]:
        """Return the rows cut into micro-batches of ``size`` images, in order."""
        return [self.select(slice(start, start + size)) for start in range(0, len(self), size)]
