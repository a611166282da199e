"""Whole rollouts of a request, and whole SDE chains."""

import torch

from lit_vgrpo.core.sampling import _chain_batches, rollout_batches
from lit_vgrpo.core.types import Rollout, Trajectory


def roll_out(policy, request, spec):
    return Rollout.joined([*rollout_batches(policy, request, spec)])


@torch.no_grad()
def sample_chain(policy, conditioning, rows, spec, noise, generators, batch_size=None, record_means=False):
    """Latents, the times at which the network was called, and the SDE steps."""
    batches = [*_chain_batches(policy, conditioning, rows, spec, noise, batch_size, generators, record_means)]
    latents, schedules, chains = zip(*batches, strict=True)
    return torch.cat(latents), schedules[0], Trajectory.joined(chains)
