"""The network on Monte-Carlo pairs: shared by every objective built on the denoising surrogate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.paths import Space, expand
from lit_vgrpo.rollout import STREAM_PAIRS, Experience, Rollout, image_generators
from lit_vgrpo.surrogate import Pairs, draw_pairs

TimeSource = Literal["sampler", "uniform"]


def rollout_pairs(
    policy: Policy,
    rollout: Rollout,
    num_pairs: int,
    *,
    shared: bool,
    stratified: bool,
    times: TimeSource,
    shift: float = 1.0,
) -> Pairs:
    """Draw the pairs of an iteration: one row for each group, or one for each image when not ``shared``.

    A row is seeded by its group's (or image's) global number, so that it does not depend on the number of ranks.
    """
    if shared:
        owners, rows = torch.unique(rollout.group_ids, return_inverse=True)
    else:
        owners, rows = rollout.image_ids, torch.arange(len(rollout))
    pairs = draw_pairs(
        image_generators(STREAM_PAIRS, rollout.seed, rollout.iteration, owners.tolist()),
        rows,
        num_pairs,
        rollout.latents.shape[1:],
        stratified=stratified,
        schedule=rollout.schedule.cpu() if times == "sampler" else None,
        shift=shift,
    )
    pairs.times = policy.path.snap(pairs.times)
    return pairs.to(rollout.latents.device)


def predict_pairs(policy: Policy, micro: Experience, space: Space, cap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Run the network on every pair of a micro-batch, in one pass of ``M N`` rows.

    Args:
        space: where the error is measured.
        cap: bound on the factor from the prediction's own error to that space, where it diverges.

    Returns:
        The network's own predictions ``(M, N, ...)``, the error ``estimate - truth`` in ``space`` (up to its sign)
        ``(M, N, ...)``, and the factor between an error of the one and of the other, ``(M, N, 1...)``.
    """
    assert micro.pairs is not None
    times, noise = micro.pairs.of_images()
    num_pairs = times.shape[1]
    t, eps = times.flatten(), noise.flatten(0, 1)
    x = micro.latents.repeat_interleave(num_pairs, dim=0)
    rows = micro.rows.repeat_interleave(num_pairs)
    prediction = policy(policy.path.interpolate(x, eps, t), t, micro.conditioning.select(rows))
    scale = expand(policy.path.error_scale(space, t, cap), x)
    error = scale * (prediction - policy.path.target(x, eps, t))
    shape = times.shape
    return prediction.unflatten(0, shape), error.unflatten(0, shape), scale.unflatten(0, shape)
