"""The loops that sample images from noise: by an ODE, and by an SDE whose steps have a likelihood."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from lit_vgrpo.core.batches import filled
from lit_vgrpo.core.noise import STREAM_GROUP_NOISE, STREAM_ROLLOUT, STREAM_SDE, image_generators, unit_noise
from lit_vgrpo.core.pictures import references_of
from lit_vgrpo.core.probability_paths import ProbabilityPath
from lit_vgrpo.core.solvers import log_prob, regrid, tail_steps, transition
from lit_vgrpo.core.types import Conditioning, Rollout, RolloutRequest, RolloutSpec, Trajectory
from lit_vgrpo.system.process import bar


class Policy(Protocol):
    """What sampling needs of a loaded :class:`~lit_vgrpo.policies.base.Policy`, which this package does not import."""

    path: ProbabilityPath
    solvers: ClassVar[tuple[str, ...]]

    @property
    def device(self) -> torch.device: ...
    def encode(self, prompts: Sequence[str], references: Sequence[Tensor] | None = None) -> Conditioning: ...
    def prior(self, generators: Sequence[torch.Generator]) -> Tensor: ...
    def sampling(self) -> AbstractContextManager[None]: ...
    def scheduler(self, solver: str, steps: int) -> Any: ...
    def scheduler_times(self, scheduler: Any) -> Tensor: ...
    def sampled(self, z: Tensor, cond: Conditioning) -> Tensor: ...
    def __call__(self, z: Tensor, t: Tensor, cond: Conditioning, guidance: float, /) -> Tensor: ...


def schedule_of(policy: Policy, spec: RolloutSpec) -> tuple[Any, Tensor]:
    """Return a diffusers scheduler at its first step, an SDE's of its ODE, and its times ``(S,)`` on the CPU.

    Integer timesteps may repeat; their noise levels still differ. ValueError if a time is NaN or not in (0, 1].
    """
    solver, steps = spec.ode_solver(policy.solvers), spec.steps
    scheduler = policy.scheduler(solver, steps)
    if spec.tail is not None:
        policy.scheduler("dpm++", steps)  # the tail's, which some pipelines refuse
    if hasattr(scheduler, "set_begin_index"):  # else it looks for the first timestep, and skips one that is repeated
        scheduler.set_begin_index(0)
    times = policy.scheduler_times(scheduler).cpu()
    if len(times) != steps or not ((times > 0) & (times <= 1)).all() or (times.diff() > 0).any():
        raise ValueError(
            f"solver={solver} with steps={steps} has {len(times)} times from {times[0]:.6g} to {times[-1]:.6g}, which "
            "must lie in (0, 1] and not increase. Use fewer steps, or another solver."
        )
    return scheduler, times


@torch.no_grad()
def rollout_batches(
    policy: Policy,
    request: RolloutRequest,
    spec: RolloutSpec,
    *,
    device: torch.device | None = None,
    record_means: bool = False,
    record: Sequence[int] = (),
    with_graph: bool = False,
) -> Generator[Rollout, None, None]:
    """Sample the images of a request, one forward batch at a time: noise, then the ODE or the SDE.

    Yields ``request.batch_size`` images at a time, in the order of ``request.layout()``. Close the iterator if you do
    not exhaust it: the adapter stays merged until then.

    Args:
        device: Device that stores the images and embeddings; ``None`` uses the network's device.
        record_means: Keep the mean of every SDE step.
        record: ODE steps whose initial latents are kept, ascending.
        with_graph: Keep the network's prediction at every SDE step, with its graph.
    """
    device = device or policy.device
    group_rows, image_ids = request.layout()
    rows = group_rows.to(device)
    conditioning = policy.encode(request.prompts, references_of(request.rows)).to(device)

    def generators(stream: int, numbers: Sequence[int]) -> list[torch.Generator]:
        return image_generators(stream, request.seed, request.iteration, numbers)

    if spec.shared_noise:
        noise = policy.prior(generators(STREAM_GROUP_NOISE, request.slots)).to(device)[rows]
    else:
        noise = policy.prior(generators(STREAM_ROLLOUT, image_ids.tolist())).to(device)
    if spec.is_sde:
        noises = generators(STREAM_SDE, image_ids.tolist())
        kept = record_means, with_graph
        batches = _chain_batches(policy, conditioning, rows, spec, noise, request.batch_size, noises, *kept)
    else:
        batches = _ode_batches(policy, conditioning, rows, spec, noise, request.batch_size, record)
    start = 0
    with closing(batches):
        for latents, schedule, trajectory in batches:
            part = slice(start, start + len(latents))
            start = part.stop
            yield Rollout(
                latents=latents,
                group_ids=torch.tensor(request.slots)[group_rows[part]],
                image_ids=image_ids[part],
                conditioning=conditioning,
                rows=rows[part],
                schedule=schedule,
                iteration=request.iteration,
                seed=request.seed,
                group_size=request.group_size,
                spec=spec,
                trajectory=trajectory,
            )


@torch.no_grad()
def sample(
    policy: Policy,
    conditioning: Conditioning,
    rows: Tensor,
    spec: RolloutSpec,
    noise: Tensor,
    batch_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return clean latents ``(B, C, h, w)`` and the times ``(S,)`` at which the network was called, float32.

    Args:
        conditioning: One row per prompt.
        rows: ``(B,)``: the conditioning row of each image.
        noise: ``z_1``, shape ``(B, C, h, w)``, on any device, which is also that of the result.
        batch_size: Images per forward pass; the last batch is padded. ``None`` uses one batch.
    """
    batches = [*_ode_batches(policy, conditioning, rows, spec, noise, batch_size)]
    return torch.cat([latents for latents, _, _ in batches]), batches[-1][1]


Batch = tuple[Tensor, Tensor, Trajectory | None]
"""The latents of a batch, the times at which the network was called, and the SDE steps."""


def _ode_batches(
    policy: Policy,
    conditioning: Conditioning,
    rows: Tensor,
    spec: RolloutSpec,
    noise: Tensor,
    batch_size: int | None,
    record: Sequence[int] = (),
) -> Generator[Batch, None, None]:
    size = batch_size or len(noise)
    with policy.sampling():
        for start in range(0, len(noise), size):
            part = slice(start, start + size)
            cond = conditioning.select(filled(rows[part], size)).to(policy.device)
            z = filled(noise[part], size).to(policy.device).float()
            scheduler, schedule = schedule_of(policy, spec)
            z, kept = _integrate(policy, cond, spec, z, scheduler, schedule.to(z.device), record)
            latents, trajectory = policy.sampled(z, cond)[: len(noise[part])].to(noise.device), None
            if record:
                states = torch.stack([state[: len(latents)].to(noise.device) for state in kept], dim=1)
                times = schedule[list(record)].to(noise.device)
                trajectory = Trajectory(states, latents.new_zeros(len(latents), 0), None, times, second_time=0.0)
            yield latents, schedule.to(noise.device), trajectory


def _chain_batches(
    policy: Policy,
    conditioning: Conditioning,
    rows: Tensor,
    spec: RolloutSpec,
    noise: Tensor,
    batch_size: int | None,
    generators: Sequence[torch.Generator],
    record_means: bool = False,
    with_graph: bool = False,
) -> Generator[Batch, None, None]:
    """Sample with an SDE whose steps have a likelihood, and keep the steps with noise.

    Steps outside ``spec.sde_steps`` follow the ODE; steps after them are re-gridded if ``spec.tail`` is set.

    Args:
        generators: One per image, the source of all its SDE noise, so that an image depends on no other.
        record_means: Also keep the mean of every step.
        with_graph: Also keep the network's prediction at every step, with its graph.
    """
    _, schedule = schedule_of(policy, spec)
    on_host = torch.cat([schedule, schedule.new_zeros(1)])
    second_time = float(on_host[1])
    window, steps, tail, solver = spec.sde_steps, spec.steps, on_host[:0], str(spec.solver)
    if spec.tail is not None and window.stop < steps:
        steps, tail = window.stop, regrid(on_host[window.stop :], tail_steps(steps - window.stop, spec.tail))
    times, window_times = on_host.to(policy.device), on_host[window.start : window.stop + 1].to(noise.device)
    called_at = torch.cat([on_host[:steps], tail[:-1]]).to(noise.device)
    size = batch_size or len(noise)
    for start in range(0, len(noise), size):
        part = slice(start, start + size)
        cond = conditioning.select(filled(rows[part], size)).to(policy.device)
        z = filled(noise[part], size).to(policy.device).float()
        ends, densities, centres, predictions = [], [], [], []
        for index in bar("Sampling", range(steps), is_brief=True):
            if index == window.start:
                first = z
            t, t_next = times[index].expand(len(z)), times[index + 1].expand(len(z))
            with torch.set_grad_enabled(with_graph and index in window):
                prediction = policy(z, t, cond, spec.guidance)
            level = spec.noise_level if index in window else 0.0
            step = transition(solver, policy.path, prediction, z, t, t_next, level, second_time)
            if index not in window:
                z = step.mean
                continue
            drawn = unit_noise(generators[part], z.shape[1:])
            z = step.mean + step.std * _without_waiting(filled(drawn, size), z.device)
            ends.append(z)
            densities.append(log_prob(solver, z, step))
            centres += [step.mean] if record_means else []
            predictions += [prediction] if with_graph else []
        if len(tail):
            z = _integrate_tail(policy, cond, spec, z, tail)

        def stored(values: Tensor, length: int = len(noise[part])) -> Tensor:
            return values[:length].to(noise.device)  # without the padding

        with torch.set_grad_enabled(with_graph):
            asked = stored(torch.stack(predictions, dim=1)) if with_graph else None
        trajectory = Trajectory(
            states=stored(torch.stack([first, *ends], dim=1)),
            log_probs=stored(torch.stack(densities, dim=1)),
            means=stored(torch.stack(centres, dim=1)) if record_means else None,
            times=window_times,
            second_time=second_time,
            predictions=asked,
        )
        yield stored(policy.sampled(z, cond)), called_at, trajectory


def _without_waiting(values: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU while the device computes; a copy from pageable memory waits for it."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def _integrate_tail(policy: Policy, cond: Conditioning, spec: RolloutSpec, z: Tensor, times: Tensor) -> Tensor:
    """Integrate from ``z`` at ``times[0]``, on the CPU, to 0 with DPM-Solver++ 2M."""
    steps = len(times) - 1
    scheduler = policy.scheduler("dpm++", steps)
    # The scheduler cannot create a schedule that starts in the middle. It reads these by index, never by timestep.
    a, b = policy.path.coefficients(times)
    scheduler.sigmas = b if scheduler.config.use_flow_sigmas else b / a
    scheduler.timesteps = torch.arange(steps)
    scheduler.num_inference_steps = steps
    scheduler.set_begin_index(0)
    return _integrate(policy, cond, spec, z, scheduler, times[:-1].to(z.device))[0]


def _integrate(
    policy: Policy,
    cond: Conditioning,
    spec: RolloutSpec,
    z: Tensor,
    scheduler: Any,
    times: Tensor,
    record: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Return the end of the ODE, and the latents before each recorded step."""
    kept = []
    steps = [*zip(scheduler.timesteps, times, strict=True)]
    for index, (timestep, t) in enumerate(bar("Sampling", steps, is_brief=True)):
        if index in record:
            kept.append(z)
        prediction = policy(z, t.expand(len(z)), cond, spec.guidance)
        z = scheduler.step(prediction, timestep, z, return_dict=False)[0].float()
    return z, kept
