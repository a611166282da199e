"""Network passes on Monte-Carlo pairs, shared by all objectives that use the denoising surrogate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_vgrpo.core.noise import STREAM_PAIRS, image_generators, unit_noise
from lit_vgrpo.core.probability_paths import Space, expand
from lit_vgrpo.core.surrogate import (
    ContinuousTimes,
    Pairs,
    SamplerTimes,
    TimePool,
    absolute_error,
    draw_pairs,
    mean_over_pixels,
    surrogate,
)
from lit_vgrpo.core.types import Experience, Rollout
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.policies.base import Policy

TimeSource = Literal["sampler", "uniform"]
Sharing = Literal["none", "group", "iteration"]
"""Images with the same times and noise: none, those of a group, or all in the iteration, on all ranks."""


def rollout_pairs(
    context: PrepareContext,
    num_pairs: int,
    *,
    shared: bool | Sharing,
    stratified: bool,
    times: TimeSource | TimePool,
    shift: float = 1.0,
    antithetic: bool = False,
) -> Pairs:
    """Draw an iteration's pairs: one row per image, per group, or for all images.

    A row is seeded by its group's (or image's) global number, so that it does not depend on the number of ranks.

    Args:
        num_pairs: N, even if ``antithetic``.
        shared: Images that share a row; True means those of a group.
        stratified: Draw one time from each of N parts of the times, or of N / 2 if ``antithetic``.
        times: Schedule to draw the times from.
        shift: Resolution shift of the continuous schedule, for ``times="uniform"``.
        antithetic: Draw N / 2 pairs, and repeat them with the negative noise.
    """
    rollout = context.rollout
    if times == "sampler":
        times = SamplerTimes(rollout.schedule.cpu())
    elif times == "uniform":
        times = ContinuousTimes(shift)
    owners, rows = pair_owners(rollout, shared)
    generators = image_generators(STREAM_PAIRS, rollout.seed, rollout.iteration, owners.tolist())
    drawn = num_pairs // 2 if antithetic else num_pairs
    pairs = draw_pairs(generators, rows, drawn, rollout.latents.shape[1:], times=times, stratified=stratified)
    pairs.times = context.policy.path.snap(pairs.times)
    return (with_negatives(pairs) if antithetic else pairs).to(rollout.latents.device)


def with_negatives(pairs: Pairs) -> Pairs:
    """Return ``(K, 2 N)`` pairs: the given ones, then the same times with the negative noise."""
    return Pairs(pairs.times.repeat(1, 2), torch.cat([pairs.noise, -pairs.noise], dim=1), pairs.rows)


def pairs_at(context: PrepareContext, times: Tensor, *, shared: bool | Sharing) -> Pairs:
    """Return pairs at given times, with separate noise for each of them.

    Args:
        times: ``(N,)`` for all images, or ``(K, N)``: a row for each group when ``shared``, else for each image.
        shared: One row of noise for each group, in the order of the groups' numbers, or one for each image.
    """
    rollout = context.rollout
    owners, rows = pair_owners(rollout, shared)
    times = context.policy.path.snap(times.cpu()).expand(len(owners), -1)
    shape = (times.shape[1], *rollout.latents.shape[1:])
    generators = image_generators(STREAM_PAIRS, rollout.seed, rollout.iteration, owners.tolist())
    return Pairs(times, unit_noise(generators, shape), rows).to(rollout.latents.device)


def pair_owners(rollout: Rollout, shared: bool | Sharing) -> tuple[Tensor, Tensor]:
    """Return the numbers of the groups or images with a row of pairs ``(K,)``, and each image's row ``(B,)``.

    The numbers are global, and 0 for the one row of all images.
    """
    if shared == "iteration":
        return torch.zeros(1, dtype=torch.int64), torch.zeros(len(rollout), dtype=torch.int64)
    if shared in (True, "group"):
        owners, rows = torch.unique(rollout.group_ids, return_inverse=True)
        return owners, rows
    return rollout.image_ids, torch.arange(len(rollout))


def predict_pairs(
    policy: Policy, micro: Experience, space: Space, cap: float | None, guidance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the network on every pair of a micro-batch, in one pass of ``M N`` rows.

    Args:
        micro: On any device; the results come back to it.
        space: Space of the error.
        cap: Bound on the factor from the prediction's error to that space, where it diverges.
        guidance: Guidance scale of the network.

    Returns:
        The network's predictions ``(M, N, ...)``, the error ``estimate - truth`` in ``space`` (up to its sign)
        ``(M, N, ...)``, and the factor from an error of the prediction to one in ``space``, ``(M, N, 1...)``.
    """
    home, micro = micro.latents.device, micro.to(policy.device)
    assert micro.pairs is not None
    times, noise = micro.pairs.of_images()
    num_pairs = times.shape[1]
    t, eps = times.flatten(), noise.flatten(0, 1)
    x = micro.latents.repeat_interleave(num_pairs, dim=0)
    rows = micro.rows.repeat_interleave(num_pairs)
    prediction = policy(policy.path.interpolate(x, eps, t), t, micro.conditioning.select(rows), guidance)
    scale = expand(policy.path.error_scale(space, t, cap), x)
    error = scale * (prediction - policy.path.target(x, eps, t))
    prediction, error, scale = (value.unflatten(0, times.shape).to(home) for value in (prediction, error, scale))
    return prediction, error, scale


@torch.no_grad()
def stored_predictions(context: PrepareContext, experience: Experience, guidance: float) -> Tensor:
    """Return the network's predictions on all pairs ``(B, N, ...)``, with the current weights."""
    policy, micros = context.policy, experience.micro_batches(context.micro_batch_size)
    return torch.cat([predict_pairs(policy, micro, policy.path.prediction, None, guidance)[0] for micro in micros])


@torch.no_grad()
def stored_errors(
    context: PrepareContext, experience: Experience, space: Space, cap: float | None, guidance: float
) -> Tensor:
    """Return the errors of :func:`predict_pairs` on all pairs ``(B, N, ...)``, with the current weights."""
    policy, micros = context.policy, experience.micro_batches(context.micro_batch_size)
    return torch.cat([predict_pairs(policy, micro, space, cap, guidance)[1] for micro in micros])


def old_values(micro: Experience, name: str, current: Tensor) -> Tensor:
    """Return the values that the old policy's passes stored under a name, else the current values, detached.

    An iteration's first update trains the old policy itself, so its images need no passes: NaN marks them.
    """
    stored = micro.extras.get(name)
    return current.detach() if stored is None else torch.where(stored.isnan(), current.detach(), stored)


def distance_to(micro: Experience, copy: str, prediction: Tensor) -> Tensor:
    """Return ``m((v_theta - v_copy)^2)``, mean over the pairs, ``(M,)``; zeros if the copy has none stored."""
    stored = micro.extras.get(f"{copy}_prediction")
    if stored is None:
        return prediction.new_zeros(len(prediction))
    return surrogate(mean_over_pixels((prediction - stored).square(), 2))


def distance_to_copy(prediction: Tensor, stored: Tensor, error: Tensor, scale: Tensor) -> Tensor:
    """Return ``m((s (v_theta - v_copy))^2) / sg(m(|e|))`` of each pair; ``(B, N, ...) -> (B, N)``.

    Both predictions start from the same noisy latent, so their errors differ by ``s (v_theta - v_copy)``. Divided by
    the absolute error, the distance has the unit of the self-normalised surrogate, so that one weight fits every time.

    Args:
        prediction: The network's prediction; carries grad.
        stored: The copy's prediction.
        error: The policy's error in the space of the method's loss.
        scale: Factor ``s`` from an error of the prediction to one in that space, ``(B, N, 1...)``.
    """
    return mean_over_pixels((scale * (prediction - stored)).square(), 2) / absolute_error(error)
