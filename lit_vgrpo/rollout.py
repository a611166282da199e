"""What a rollout is asked for, what it returns, and the loop that samples it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor

from lit_vgrpo.batches import filled
from lit_vgrpo.ranges import GuidanceScale, NonNegativeInt, Range, checked
from lit_vgrpo.solvers import ODE_OF, log_prob, regrid, tail_steps, transition
from lit_vgrpo.surrogate import Pairs, seeded_generator

if TYPE_CHECKING:
    from lit_vgrpo.policies.base import Policy
    from lit_vgrpo.policies.conditioning import Conditioning

BatchHook = Callable[[slice, Tensor], None]
"""Takes the place of a batch among the images, and its final latents ``(b, C, h, w)``."""

# Streams of the seeded generators; a new use gets a new number, so that runs stay reproducible.
STREAM_ROLLOUT, STREAM_PAIRS, STREAM_HELDOUT, STREAM_DATA = 1, 2, 3, 4
STREAM_GROUP_NOISE, STREAM_SDE, STREAM_TIMES, STREAM_STEPS = 5, 6, 7, 8


@checked
@dataclass
class RolloutSpec:
    """How images are sampled.

    Args:
        solver: an ODE solver (a diffusers scheduler: euler, dpm++ or unipc on a rectified flow; ddim or dpm++ on a VP
            path) or an SDE whose steps have a likelihood (flow_sde, cps or dance_sde; ddim_sde on a VP path).
        steps: number of sampling steps, one network pass each (two with guidance).
        guidance: classifier-free guidance scale; 1.0 switches it off.
        noise_level: strength of the SDE's noise; null takes the solver's published one.
        shared_noise: start all images of a group from the same noise; only an SDE makes them differ then.
        window: steps ``[first, stop)`` that take SDE noise, the others follow the ODE; null is all but the last.
        tail: re-grid what follows the window to this share of its steps, with DPM-Solver++; null for no re-gridding.
    """

    solver: str = "euler"
    steps: Annotated[int, Range(1, 1000, example=10)] = 10
    guidance: GuidanceScale = 1.0
    noise_level: Annotated[float, Range(0, 100, example=0.7)] | None = None
    shared_noise: bool = False
    window: tuple[NonNegativeInt, NonNegativeInt] | None = None
    tail: Annotated[float, Range(above=0, most=1, example=0.4)] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not 0 <= self.window[0] < self.window[1] <= self.steps:
            raise ValueError(
                f"window={list(self.window)} holds no step of {self.steps}. Use [first, stop) within 0 and "
                f"{self.steps}, or null."
            )

    @property
    def is_sde(self) -> bool:
        """Whether steps are drawn from a distribution with a likelihood."""
        return self.solver in ODE_OF

    @property
    def sde_steps(self) -> range:
        """The steps that take SDE noise; empty for an ODE."""
        if not self.is_sde:
            return range(0)
        return range(*(self.window or (0, max(1, self.steps - 1))))

    @property
    def network_calls(self) -> int:
        """Sampling steps that are really taken, after the re-gridding of the tail."""
        if not self.is_sde or self.tail is None:
            return self.steps
        stop = self.sde_steps.stop
        return stop + tail_steps(self.steps - stop, self.tail)

    def as_ode(self) -> RolloutSpec:
        """The same number of steps without noise: how held-out images of an SDE method are sampled."""
        if not self.is_sde:
            return self
        return RolloutSpec(ODE_OF[self.solver], self.steps, self.guidance)

    def faults(self) -> list[str]:
        """Settings that cannot work together, a line each."""
        where = "model.objective.rollout"
        if self.is_sde:
            return []
        faults = []
        if self.shared_noise:
            faults.append(
                f"{where}.shared_noise=true with the ODE solver {self.solver} makes all images of a group identical. "
                "Set shared_noise=false."
            )
        for name in ("noise_level", "window", "tail"):
            value = getattr(self, name)
            if value is not None:
                faults.append(f"{where}.{name}={value} has no effect with the ODE solver {self.solver}. Leave it out.")
        return faults


@dataclass
class Trajectory:
    """The steps of a rollout that were drawn from an SDE, to be trained on.

    Attributes:
        states: ``(B, n + 1, C, h, w)``, float32: where step k started and, at k + 1, where it ended.
        log_probs: ``(B, n)``, float32: the log-probability of each step under the weights that rolled out.
        means: ``(B, n, C, h, w)``, the mean of each step's distribution, or ``None`` where it was not asked for.
        times: ``(n + 1,)``, float32, the steps' times and the one after the last.
        second_time: the second time of the whole schedule, which stands in where a formula diverges at ``t = 1``.
    """

    states: Tensor
    log_probs: Tensor
    means: Tensor | None
    times: Tensor
    second_time: float


@dataclass
class Rollout:
    """The images of one iteration on this rank, as final latents.

    Attributes:
        latents: shape ``(B, C, h, w)``, float32, detached.
        group_ids: shape ``(B,)``, int64: the prompt's global slot in the iteration.
        image_ids: shape ``(B,)``, int64: the image's global index in the iteration.
        conditioning: one row a group; ``rows`` says which row an image uses.
        rows: shape ``(B,)``, int64.
        schedule: the sampler's own times ``(S,)``, float32 in (0, 1], noisiest first.
        iteration: number of the iteration, from 0.
        seed: the run's seed.
        group_size: images of a whole group; other ranks may hold some of them.
        spec: how the images were sampled.
        trajectory: the SDE steps, for a method that trains on them.
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


@dataclass
class Experience:
    """What the loss needs again, one row an image; made by ``objective.prepare``.

    Attributes:
        latents: ``(B, C, h, w)``, the images' final latents ``o``.
        advantages: ``(B,)``, float32.
        conditioning: one row a group.
        rows: ``(B,)``, the conditioning row of each image.
        pairs: Monte-Carlo pairs, or ``None`` for an objective without.
        extras: named tensors with one row an image (old surrogates, stored predictions).
    """

    latents: Tensor
    advantages: Tensor
    conditioning: Conditioning
    rows: Tensor
    pairs: Pairs | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.latents)

    @classmethod
    def of(
        cls, rollout: Rollout, advantages: Tensor, pairs: Pairs | None = None, extras: dict[str, Tensor] | None = None
    ) -> Experience:
        """A rollout's images with their advantages, beside which everything else is the method's own."""
        return cls(
            latents=rollout.latents,
            advantages=advantages.to(rollout.latents.device),
            conditioning=rollout.conditioning,
            rows=rollout.rows,
            pairs=pairs,
            extras=extras or {},
        )

    def to(self, device: torch.device) -> Experience:
        """The same on another device, with only the shared rows that it uses; itself where it is there already."""
        if self.latents.device == device:
            return self
        used, rows = torch.unique(self.rows, return_inverse=True)
        return Experience(
            latents=self.latents.to(device),
            advantages=self.advantages.to(device),
            conditioning=self.conditioning.select(used).to(device),
            rows=rows.to(device),
            pairs=None if self.pairs is None else self.pairs.compact().to(device),
            extras={name: value.to(device) for name, value in self.extras.items()},
        )

    def select(self, index: slice | Tensor) -> Experience:
        """The rows of some images, e.g. a micro-batch."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("latents", "advantages", "rows"):
            values[name] = values[name][index]
        values["pairs"] = None if self.pairs is None else self.pairs.select(index)
        values["extras"] = {name: value[index] for name, value in self.extras.items()}
        return Experience(**values)

    def micro_batches(self, size: int) -> list[Experience]:
        """The rows cut into micro-batches of ``size`` images, in order."""
        return [self.select(slice(start, start + size)) for start in range(0, len(self), size)]


def image_generators(stream: int, seed: int, iteration: int, image_ids: Sequence[int]) -> list[torch.Generator]:
    """One generator an image, seeded from (seed, stream, iteration, global image index)."""
    return [seeded_generator(seed, stream, iteration, index) for index in image_ids]


@torch.no_grad()
def sample(
    policy: Policy,
    conditioning: Conditioning,
    rows: Tensor,
    spec: RolloutSpec,
    noise: Tensor,
    batch_size: int | None = None,
    on_batch: BatchHook | None = None,
) -> tuple[Tensor, Tensor]:
    """Integrate the policy from noise to clean latents with a diffusers scheduler.

    Args:
        conditioning: one row a prompt.
        rows: ``(B,)``: the conditioning row of each image.
        noise: ``z_1``, shape ``(B, C, h, w)``, on any device; what is returned is there too.
        batch_size: images of every network pass, the last of which is filled up; ``None`` takes all at once.
        on_batch: called with every batch as soon as it is done.

    Returns:
        Latents ``(B, C, h, w)`` float32, and the times ``(S,)`` at which the network was called, float32.
    """
    size = batch_size or len(noise)
    schedule = torch.empty(0)
    latents = []
    with policy.sampling():
        for start in range(0, len(noise), size):
            part = slice(start, start + size)
            cond = conditioning.select(filled(rows[part], size)).to(policy.device)
            scheduler = policy.scheduler(spec.solver, spec.steps)
            z = filled(noise[part], size).to(policy.device).float()
            schedule = policy.scheduler_times(scheduler).to(z.device)
            for timestep, t in zip(scheduler.timesteps, schedule, strict=True):
                prediction = policy(z, t.expand(len(z)), cond, spec.guidance)
                z = scheduler.step(prediction, timestep, z, return_dict=False)[0].float()
            z = z[: len(noise[part])]
            latents.append(z.to(noise.device))
            if on_batch is not None:
                on_batch(part, z)
    return torch.cat(latents), schedule.to(noise.device)


@torch.no_grad()
def sample_chain(
    policy: Policy,
    conditioning: Conditioning,
    rows: Tensor,
    spec: RolloutSpec,
    noise: Tensor,
    generators: Sequence[torch.Generator],
    batch_size: int | None = None,
    record_means: bool = False,
    on_batch: BatchHook | None = None,
) -> tuple[Tensor, Tensor, Trajectory]:
    """Sample with an SDE whose steps have a likelihood, and keep the steps that took noise.

    Steps outside ``spec.sde_steps`` follow the ODE; what comes after them is re-gridded where ``spec.tail`` is set.

    Args:
        conditioning: one row a prompt.
        rows: ``(B,)``: the conditioning row of each image.
        noise: ``z_1``, shape ``(B, C, h, w)``, on any device; what is returned is there too.
        generators: one an image; all its SDE noise comes from it, so that an image depends on no other.
        batch_size: images of every network pass, the last of which is filled up; ``None`` takes all at once.
        record_means: keep the mean of every step too.
        on_batch: called with every batch as soon as it is done.

    Returns:
        Latents ``(B, C, h, w)`` float32, the times ``(S,)`` at which the network was called, and the SDE steps.
    """
    scheduler = policy.scheduler(ODE_OF[spec.solver], spec.steps)
    schedule = policy.scheduler_times(scheduler).to(policy.device)
    times = torch.cat([schedule, schedule.new_zeros(1)])
    second_time = float(times[1])
    window, steps, tail = spec.sde_steps, spec.steps, times[:0]
    if spec.tail is not None and window.stop < steps:
        steps, tail = window.stop, regrid(times[window.stop :], tail_steps(steps - window.stop, spec.tail))
        tail[:-1] = policy.path.snap(tail[:-1])
    size = batch_size or len(noise)
    latents, states, log_probs, means = [], [], [], []
    for start in range(0, len(noise), size):
        part = slice(start, start + size)
        cond = conditioning.select(filled(rows[part], size)).to(policy.device)
        own = slice(len(noise[part]))
        z = filled(noise[part], size).to(policy.device).float()
        ends, densities, centres = [], [], []
        for index in range(steps):
            if index == window.start:
                first = z
            t, t_next = times[index].expand(len(z)), times[index + 1].expand(len(z))
            prediction = policy(z, t, cond, spec.guidance)
            level = spec.noise_level if index in window else 0.0
            step = transition(spec.solver, policy.path, prediction, z, t, t_next, level, second_time)
            if index not in window:
                z = step.mean
                continue
            drawn = torch.stack([torch.randn(z.shape[1:], generator=g) for g in generators[part]])
            z = step.mean + step.std * filled(drawn, size).to(z.device)
            ends.append(z)
            densities.append(log_prob(spec.solver, z, step))
            centres += [step.mean] if record_means else []
        if len(tail):
            z = _integrate_tail(policy, cond, spec, z, tail)
        latents.append(z[own].to(noise.device))
        states.append(torch.stack([first, *ends], dim=1)[own].to(noise.device))
        log_probs.append(torch.stack(densities, dim=1)[own].to(noise.device))
        if record_means:
            means.append(torch.stack(centres, dim=1)[own].to(noise.device))
        if on_batch is not None:
            on_batch(part, z[own])
    trajectory = Trajectory(
        states=torch.cat(states),
        log_probs=torch.cat(log_probs),
        means=torch.cat(means) if record_means else None,
        times=times[window.start : window.stop + 1].to(noise.device),
        second_time=second_time,
    )
    return torch.cat(latents), torch.cat([times[:steps], tail[:-1]]).to(noise.device), trajectory


def _integrate_tail(policy: Policy, cond: Conditioning, spec: RolloutSpec, z: Tensor, times: Tensor) -> Tensor:
    """From ``z`` at ``times[0]`` to 0 at their end with DPM-Solver++ 2M."""
    steps = len(times) - 1
    scheduler = policy.scheduler("dpm++", steps)
    # The scheduler cannot make a schedule that starts in the middle. It reads these by position, never by timestep.
    a, b = (values.cpu() for values in policy.path.coefficients(times))
    scheduler.sigmas = b if scheduler.config.use_flow_sigmas else b / a
    scheduler.timesteps = torch.arange(steps)
    scheduler.num_inference_steps = steps
    scheduler.set_begin_index(0)
    for timestep, t in zip(scheduler.timesteps, times[:-1], strict=True):
        prediction = policy(z, t.expand(len(z)), cond, spec.guidance)
        z = scheduler.step(prediction, timestep, z, return_dict=False)[0].float()
    return z
