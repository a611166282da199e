"""What a rollout is asked for, what it returns, and the loop that samples it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_vgrpo.surrogate import Pairs, seeded_generator

if TYPE_CHECKING:
    from lit_vgrpo.policies.base import Conditioning, Policy

# Streams of the seeded generators; a new use gets a new number, so that runs stay reproducible.
STREAM_ROLLOUT, STREAM_PAIRS, STREAM_HELDOUT, STREAM_DATA = 1, 2, 3, 4


@dataclass
class RolloutSpec:
    """How images are sampled.

    Args:
        solver: a diffusers scheduler: euler, dpm++ or unipc on a rectified flow; ddim or dpm++ on a VP path.
        steps: number of sampling steps, one network pass each (two with guidance).
        guidance: classifier-free guidance scale; 1.0 switches it off.
    """

    solver: str = "euler"
    steps: int = 10
    guidance: float = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"rollout.steps={self.steps} samples nothing. Use 1 or more.")
        if self.guidance < 1.0:
            raise ValueError(f"rollout.guidance={self.guidance} is below 1.0 (1.0 switches guidance off).")


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
    """

    latents: Tensor
    group_ids: Tensor
    image_ids: Tensor
    conditioning: Conditioning
    rows: Tensor
    schedule: Tensor
    iteration: int
    seed: int

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

    def select(self, index: slice) -> Experience:
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
) -> tuple[Tensor, Tensor]:
    """Integrate the policy from noise to clean latents with a diffusers scheduler.

    Args:
        conditioning: one row a prompt.
        rows: ``(B,)``: the conditioning row of each image.
        noise: ``z_1``, shape ``(B, C, h, w)``.
        batch_size: images a network pass; ``None`` takes all at once.

    Returns:
        Latents ``(B, C, h, w)`` float32, and the times ``(S,)`` at which the network was called, float32.
    """
    size = batch_size or len(noise)
    schedule = torch.empty(0)
    latents = []
    for start in range(0, len(noise), size):
        part = slice(start, start + size)
        cond = conditioning.select(rows[part])
        scheduler = policy.scheduler(spec.solver, spec.steps)
        z = noise[part].float()
        schedule = policy.scheduler_times(scheduler).to(z.device)
        for timestep, t in zip(scheduler.timesteps, schedule, strict=True):
            prediction = policy(z, t.expand(len(z)), cond, spec.guidance)
            z = scheduler.step(prediction, timestep, z, return_dict=False)[0].float()
        latents.append(z)
    return torch.cat(latents), schedule
