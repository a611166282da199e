"""Network passes on Monte-Carlo pairs, shared by all objectives that use the denoising surrogate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lit_vgrpo.core.noise import STREAM_BASES, STREAM_PAIRS, image_generators, unit_noise
from lit_vgrpo.core.probability_paths import ProbabilityPath, Space, expand
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
    pure_noise: bool = False,
) -> Pairs:
    """Draw an iteration's pairs: one row per image, per group, or for all images.

    A row is seeded by its group's (or image's) global number, so that it does not depend on the number of ranks.

    Args:
        num_pairs: N, even if ``antithetic``.
        shared: Images that share a row; True means those of a group.
        stratified: Draw one time from each of N parts of the times, or of N / 2 if ``antithetic``.
        times: Schedule to draw the times from.
        shift: Resolution shift of the continuous schedule, for ``times="uniform"``.
        antithetic: Draw N / 2 pairs, and use each with the negative noise too.
        pure_noise: Put the first drawn pair at ``t = 1``; the images of a row then share its network pass.
    """
    rollout = context.rollout
    if times == "sampler":
        times = SamplerTimes(rollout.schedule.cpu())
    elif times == "uniform":
        times = ContinuousTimes(shift)
    owners, rows = pair_owners(rollout, shared)
    generators = image_generators(STREAM_PAIRS, rollout.seed, rollout.iteration, owners.tolist())
    drawn = num_pairs // 2 if antithetic else num_pairs
    shape = rollout.latents.shape[1:]
    pairs = draw_pairs(generators, rows, drawn, shape, times=times, stratified=stratified, pure_noise=pure_noise)
    pairs.times, pairs.shared = context.policy.path.snap(pairs.times), int(pure_noise)
    return (with_negatives(pairs) if antithetic else pairs).to(rollout.latents.device)


def with_negatives(pairs: Pairs) -> Pairs:
    """Return ``(K, 2 N)`` pairs: each of the given ones, followed by the same time with the negative noise."""
    noise = torch.stack([pairs.noise, -pairs.noise], dim=2).flatten(1, 2)
    return Pairs(pairs.times.repeat_interleave(2, dim=1), noise, pairs.rows, 2 * pairs.shared)


def share_noisy_latents(context: PrepareContext, pairs: Pairs, all_ranks: Callable[[Tensor], Tensor]) -> Pairs:
    """Replace each group's noise with one noisy latent per pair, made from one of its images, and share its pass.

    Args:
        pairs: One row per group.
        all_ranks: Concatenates every rank's ``(B, ...)`` in rank order; needed where ranks split groups.
    """
    rollout, path = context.rollout, context.policy.path
    owners, rows = pair_owners(rollout, "group")
    size, num_pairs, home = rollout.group_size, pairs.times.shape[1], rollout.latents.device
    generators = image_generators(STREAM_BASES, rollout.seed, rollout.iteration, owners.tolist())
    members = torch.stack([torch.randint(size, (num_pairs,), generator=generator) for generator in generators])
    image, pair = (owners[rows, None] * size + members[rows] == rollout.image_ids[:, None]).nonzero(as_tuple=True)
    bases = rollout.latents.new_zeros(len(owners), num_pairs, *rollout.latents.shape[1:])
    bases[rows[image].to(home), pair.to(home)] = rollout.latents[image.to(home)]
    if len(rollout) < len(owners) * size:  # the image that a noisy latent starts from is on one of the group's ranks
        found, groups = all_ranks(bases), all_ranks(owners)
        bases = torch.stack([found[groups == owner].sum(dim=0) for owner in owners]).to(home)
    noisy = path.interpolate(bases.flatten(0, 1), pairs.noise.flatten(0, 1), pairs.times.flatten())
    return replace(pairs, noise=noisy.unflatten(0, pairs.times.shape), shared=num_pairs)


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
    path, shared = policy.path, micro.pairs.shared
    prediction = predictions(policy, micro, guidance).flatten(0, 1)
    times, noise = micro.pairs.of_images()
    if shared:
        of_rows = _noise_from(path, micro.latents, noise[:, :shared], times[:, :shared])
        noise = torch.cat([of_rows, noise[:, shared:]], dim=1)
    t, x = times.flatten(), micro.latents.repeat_interleave(times.shape[1], dim=0)
    scale = expand(path.error_scale(space, t, cap), x)
    error = scale * (prediction - path.target(x, noise.flatten(0, 1), t))
    prediction, error, scale = (value.unflatten(0, times.shape).to(home) for value in (prediction, error, scale))
    return prediction, error, scale


def predictions(policy: Policy, micro: Experience, guidance: float) -> Tensor:
    """Return the network's predictions ``(M, N, ...)`` of :func:`predict_pairs`, of a micro-batch on any device."""
    home, micro = micro.latents.device, micro.to(policy.device)
    assert micro.pairs is not None
    pairs, shared = micro.pairs, micro.pairs.shared
    own = pairs.times.shape[1] - shared
    x = micro.latents.repeat_interleave(own, dim=0)
    t, eps = pairs.times[:, shared:][pairs.rows].flatten(), pairs.noise[:, shared:][pairs.rows].flatten(0, 1)
    z, rows = policy.path.interpolate(x, eps, t), micro.rows.repeat_interleave(own)
    if shared:
        used, place = torch.unique(pairs.rows, return_inverse=True)
        row_of = micro.rows.new_zeros(len(used)).scatter(0, place, micro.rows)
        z = torch.cat([pairs.noise[used, :shared].flatten(0, 1), z])
        t = torch.cat([pairs.times[used, :shared].flatten(), t])
        rows = torch.cat([row_of.repeat_interleave(shared), rows])
    prediction = policy(z, t, micro.conditioning.select(rows), guidance)
    of_rows, of_images = prediction.split([len(z) - len(x), len(x)])
    of_images = of_images.unflatten(0, (len(micro), own))
    if shared:
        of_images = torch.cat([of_rows.unflatten(0, (len(used), shared))[place], of_images], dim=1)
    return of_images.to(home)


def _noise_from(path: ProbabilityPath, latents: Tensor, noisy: Tensor, times: Tensor) -> Tensor:
    """Return the noise with which each image would give a noisy latent, ``(z - a o) / b``; ``(M, N, ...)``."""
    a, b = (
        expand(value, noisy.flatten(0, 1)).unflatten(0, times.shape) for value in path.coefficients(times.flatten())
    )
    return (noisy - a * latents[:, None]) / b


def store_predictions(
    experience: Experience,
    name: str,
    micros: Sequence[Experience],
    predictions: Iterable[Tensor],
    placed: Callable[[Tensor], Tensor] = lambda values: values,
) -> None:
    """Store the predictions ``(M, N, ...)`` of an experience's micro-batches; those of a shared pass once.

    Args:
        name: Name for :func:`stored`.
        predictions: One tensor per micro-batch; a generator computes them one at a time.
        placed: Scatters the values of the micro-batches' images to all images.
    """
    pairs, of_images = experience.pairs, []
    assert pairs is not None
    shared = pairs.shared
    for micro, prediction in zip(micros, predictions, strict=True):
        assert micro.pairs is not None
        if shared:
            if name not in pairs.predictions:
                table = (len(pairs.times), shared, *prediction.shape[2:])
                pairs.predictions[name] = prediction.new_full(table, math.nan)
            pairs.predictions[name][micro.pairs.rows] = prediction[:, :shared]
            prediction = prediction[:, shared:].clone()  # a view would keep the shared part
        of_images.append(prediction)
    if shared < pairs.times.shape[1]:
        experience.extras[name] = placed(torch.cat(of_images))


def stored(micro: Experience, name: str) -> Tensor | None:
    """Return a micro-batch's values stored under a name, ``(M, N, ...)`` or ``(M, ...)``, or ``None``."""
    own = micro.extras.get(name)
    if micro.pairs is None or name not in micro.pairs.predictions:
        return own
    of_rows = micro.pairs.predictions[name][micro.pairs.rows]
    return of_rows if own is None else torch.cat([of_rows, own], dim=1)


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
    old = stored(micro, name)
    return current.detach() if old is None else torch.where(old.isnan(), current.detach(), old)


def distance_to(micro: Experience, copy: str, prediction: Tensor) -> Tensor:
    """Return ``m((v_theta - v_copy)^2)``, mean over the pairs, ``(M,)``; zeros if the copy has none stored."""
    of_copy = stored(micro, f"{copy}_prediction")
    if of_copy is None:
        return prediction.new_zeros(len(prediction))
    return surrogate(mean_over_pixels((prediction - of_copy).square(), 2))


def norm_excess(prediction: Tensor, of_reference: Tensor) -> Tensor:
    """Return ``relu(|v_theta| - |v_ref|)`` of each pair; ``(B, N, ...) -> (B, N)``.

    Norms are root mean squares, so that a weight does not depend on the latents' size: our choice, as is the use for
    other predictions than velocities. They have a floor, since the gradient of a root of 0 is not finite.

    Source:
        The abstract of arXiv 2606.27771 (NormGuard) and third-party summaries; its weight and scaling were not read.
    """
    norm, start = (mean_over_pixels(v.square(), 2).clamp(min=1e-37).sqrt() for v in (prediction, of_reference))
    return (norm - start).relu()


def distance_to_copy(prediction: Tensor, of_copy: Tensor, error: Tensor, scale: Tensor) -> Tensor:
    """Return ``m((s (v_theta - v_copy))^2) / sg(m(|e|))`` of each pair; ``(B, N, ...) -> (B, N)``.

    Both predictions start from the same noisy latent, so their errors differ by ``s (v_theta - v_copy)``. Divided by
    the absolute error, the distance has the unit of the self-normalised surrogate, so that one weight fits every time.

    Args:
        prediction: The network's prediction; carries grad.
        of_copy: The copy's prediction.
        error: The policy's error in the space of the method's loss.
        scale: Factor ``s`` from an error of the prediction to one in that space, ``(B, N, 1...)``.
    """
    return mean_over_pixels((scale * (prediction - of_copy)).square(), 2) / absolute_error(error)
