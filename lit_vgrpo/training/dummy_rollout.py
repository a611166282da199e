"""A dummy rollout with real shapes and random latents, for trying a method without sampling."""

from __future__ import annotations

from math import gcd

import torch

from lit_vgrpo.core.probability_paths import ProbabilityPath
from lit_vgrpo.core.types import Conditioning, Rollout, Trajectory, group_layout
from lit_vgrpo.objectives.base import Objective


def dummy_rollout(
    objective: Objective,
    path: ProbabilityPath,
    conditioning: Conditioning,
    latent_shape: tuple[int, ...],
    images: int,
    group_size: int,
    seed: int = 0,
) -> Rollout:
    """Return a rollout of whole groups on the conditioning's device; global random generators are not used.

    Args:
        conditioning: Any number of rows; the groups use them in turn.
        group_size: Images per group; reduced to a divisor of ``images`` if necessary.
    """
    spec, size = objective.rollout_spec(0), gcd(images, group_size)
    rows, image_ids = group_layout(range(images // size), size)
    device = next(iter(conditioning.tensors.values())).device
    generator = torch.Generator().manual_seed(seed)
    times = torch.cat([path.snap(1 - torch.arange(spec.steps) / spec.steps), torch.zeros(1)]).to(device)
    trajectory = None
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
        seed=seed,
        group_size=size,
        spec=spec,
        trajectory=trajectory,
    )
