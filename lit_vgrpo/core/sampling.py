"""The loops that sample images from noise: by an ODE, and by an SDE whose steps have a likelihood."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from lit_vgrpo.core.batches import filled
from lit_vgrpo.core.noise import STREAM_GROUP_NOISE, STREAM_ROLLOUT, STREAM_SDE, image_generators, unit_noise
from lit_vgrpo.core.probability_paths import ProbabilityPath
from lit_vgrpo.core.solvers import ODE_OF, log_prob, regrid, tail_steps, transition
from lit_vgrpo.core.types import Conditioning, Rollout, RolloutRequest, RolloutSpec, Trajectory

BatchHook = Callable[[slice, Tensor], None]
"""Called with a batch's slice of the images and its final latents ``(b, C, h, w)``."""


class Denoiser(Protocol):
    """The interface of a policy for sampling; see :class:`~lit_vgrpo.policies.base.Policy`."""

    path: ProbabilityPath

    @property
    def blocks_run(self) -> float | None:
        """Share of the network's blocks that ran in the last sampling; ``None`` without a cache."""

    @property
    def device(self) -> torch.device:
        """Where the network is."""

    def __call__(self, z: Tensor, t: Tensor, cond: Conditioning, guidance: float = 1.0) -> Tensor:
        """Return the network's prediction for noisy latents ``(B, C, h, w)`` at times ``(B,)``, float32."""

    def encode(self, prompts: Sequence[str], references: Sequence[Tensor] | None = None) -> Conditioning:
        """Return the embeddings of the prompts and of the pictures that they edit, one row each."""

    def prior(self, generators: Sequence[torch.Generator]) -> Tensor:
        """Return unit Gaussian noise ``(B, C, h, w)``, one generator per image."""

    def sampling(self, spec: RolloutSpec | None = None) -> AbstractContextManager[None]:
        """Prepare the weights for passes without gradient, accelerated as the spec says."""

    def start_batch(self) -> None:
        """Forget what an accelerator keeps of earlier batches; called in :meth:`sampling` before each batch."""

    def scheduler(self, solver: str, steps: int) -> Any:
        """Return a new diffusers scheduler with timesteps set, on the CPU."""

    def scheduler_times(self, scheduler: Any) -> Tensor:
        """Return the scheduler's timesteps as times ``(S,)`` in (0, 1], float32."""


def roll_out(
    policy: Denoiser,
    request: RolloutRequest,
    spec: RolloutSpec,
    *,
    device: torch.device | None = None,
    record_means: bool = False,
    on_batch: BatchHook | None = None,
) -> Rollout:
    """Sample the images of a request: noise, then the ODE or the SDE.

    Args:
        device: where the images and embeddings are stored; ``None`` uses the network's device.
        record_means: keep the mean of every SDE step.
        on_batch: called with the slice and the final latents of every batch as soon as it is sampled.
    """
    home = device or policy.device
    group_rows, image_ids = request.layout()
    rows = group_rows.to(home)
    conditioning = request.conditioning
    if conditioning is None:
        conditioning = policy.encode(request.prompts, request.references())
    conditioning = conditioning.to(home)

    def generators(stream: int, numbers: Sequence[int]) -> list[torch.Generator]:
        return image_generators(stream, request.seed, request.iteration, numbers)

    if spec.shared_noise:
        noise = policy.prior(generators(STREAM_GROUP_NOISE, request.slots)).to(home)[rows]
    else:
        noise_ids = image_ids if request.noise_ids is None else request.noise_ids
        noise = policy.prior(generators(STREAM_ROLLOUT, noise_ids.tolist())).to(home)
    trajectory = None
    if spec.is_sde:
        own = generators(STREAM_SDE, image_ids.tolist())
        latents, schedule, trajectory = sample_chain(
            policy, conditioning, rows, spec, noise, own, request.batch_size, record_means, on_batch
        )
    else:
        latents, schedule = sample(policy, conditioning, rows, spec, noise, request.batch_size, on_batch)
    return Rollout(
        latents=latents,
        group_ids=torch.tensor(request.slots)[group_rows],
        image_ids=image_ids,
        conditioning=conditioning,
        rows=rows,
        schedule=schedule,
        iteration=request.iteration,
        seed=request.seed,
        group_size=request.group_size,
        spec=spec,
        trajectory=trajectory,
        blocks_run=None if spec.is_sde else policy.blocks_run,
    )


@torch.no_grad()
def sample(
    policy: Denoiser,
    conditioning: Conditioning,
    rows: Tensor,
    spec: RolloutSpec,
    noise: Tensor,
    batch_size: int | None = None,
    on_batch: BatchHook | None = None,
) -> tuple[Tensor, Tensor]:
    """Integrate the policy from noise to clean latents with a diffusers scheduler.

    Args:
        conditioning: one row per prompt.
        rows: ``(B,)``: the conditioning row of each image.
        noise: ``z_1``, shape ``(B, C, h, w)``, on any device, which is also that of the result.
        batch_size: images per network pass, the last of which is padded; ``None`` uses one batch.
        on_batch: called with every batch as soon as it is done.

    Returns:
        Latents ``(B, C, h, w)`` float32, and the times ``(S,)`` at which the network was called, float32.
    """
    size = batch_size or len(noise)
    schedule = torch.empty(0)
    latents = []
    with policy.sampling(spec):
        for start in range(0, len(noise), size):
            part = slice(start, start + size)
            policy.start_batch()
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
    policy: Denoiser,
    conditioning: Conditioning,
    rows: Tensor,
    spec: RolloutSpec,
    noise: Tensor,
    generators: Sequence[torch.Generator],
    batch_size: int | None = None,
    record_means: bool = False,
    on_batch: BatchHook | None = None,
) -> tuple[Tensor, Tensor, Trajectory]:
    """Sample with an SDE whose steps have a likelihood, and keep the steps with noise.

    Steps outside ``spec.sde_steps`` follow the ODE; steps after them are re-gridded if ``spec.tail`` is set.

    Args:
        conditioning: one row per prompt.
        rows: ``(B,)``: the conditioning row of each image.
        noise: ``z_1``, shape ``(B, C, h, w)``, on any device, which is also that of the result.
        generators: one per image, the source of all its SDE noise, so that an image depends on no other.
        batch_size: images per network pass, the last of which is padded; ``None`` uses one batch.
        record_means: also keep the mean of every step.
        on_batch: called with every batch as soon as it is done.

    Returns:
        Latents ``(B, C, h, w)`` float32, the times ``(S,)`` at which the network was called, and the SDE steps.
    """
    scheduler = policy.scheduler(ODE_OF[spec.solver], spec.steps)
    schedule = policy.scheduler_times(scheduler).cpu()
    on_host = torch.cat([schedule, schedule.new_zeros(1)])
    second_time = float(on_host[1])
    window, steps, tail = spec.sde_steps, spec.steps, on_host[:0]
    if spec.tail is not None and window.stop < steps:
        steps, tail = window.stop, regrid(on_host[window.stop :], tail_steps(steps - window.stop, spec.tail))
        tail[:-1] = policy.path.snap(tail[:-1])
    times = on_host.to(policy.device)
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
            drawn = unit_noise(generators[part], z.shape[1:])
            z = step.mean + step.std * _without_waiting(filled(drawn, size), z.device)
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
        times=on_host[window.start : window.stop + 1].to(noise.device),
        second_time=second_time,
    )
    return torch.cat(latents), torch.cat([on_host[:steps], tail[:-1]]).to(noise.device), trajectory


def _without_waiting(values: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU while the device computes; a copy from pageable memory waits for it."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def _integrate_tail(policy: Denoiser, cond: Conditioning, spec: RolloutSpec, z: Tensor, times: Tensor) -> Tensor:
    """Integrate from ``z`` at ``times[0]`` to 0 with DPM-Solver++ 2M.

    Args:
        times: on the CPU.
    """
    steps = len(times) - 1
    scheduler = policy.scheduler("dpm++", steps)
    # The scheduler cannot create a schedule that starts in the middle. It reads these by index, never by timestep.
    a, b = policy.path.coefficients(times)
    scheduler.sigmas = b if scheduler.config.use_flow_sigmas else b / a
    scheduler.timesteps = torch.arange(steps)
    scheduler.num_inference_steps = steps
    scheduler.set_begin_index(0)
    for timestep, t in zip(scheduler.timesteps, times[:-1].to(z.device), strict=True):
        prediction = policy(z, t.expand(len(z)), cond, spec.guidance)
        z = scheduler.step(prediction, timestep, z, return_dict=False)[0].float()
    return z
