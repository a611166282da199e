"""The gradient of a differentiable reward with respect to latents, and functions for methods that train on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_vgrpo.core.batches import in_batches
from lit_vgrpo.core.noise import STREAM_CROPS, STREAM_RENOISED, image_generators, unit_noise
from lit_vgrpo.objectives.base import PrepareContext


def score_gradient(
    context: PrepareContext, latents: Tensor, images: Tensor, crop: float | None = None, halved: bool = False
) -> tuple[Tensor, Tensor]:
    """Decode latents, score them, and return the scores ``(N,)`` and their gradient ``(N, C, h, w)``, float32.

    The VAE's batches are decoded, scored and differentiated one by one, so that only one of them has a graph. Their
    size is fixed: a gradient does not depend on the other images.

    Args:
        context: Its policy decodes, its reward scores.
        latents: Clean latents ``(N, C, h, w)``.
        images: The images of the rollout whose prompts they belong to, ``(N,)``, int64.
        crop: Decode only a window with this share of each side, at a random place of each image.
        halved: Decode at half the resolution.

    Raises:
        RuntimeError: The context has no reward.
    """
    if context.is_trial:  # measures the network
        return latents.new_zeros(len(latents)), torch.zeros_like(latents)
    reward, policy, rollout = context.reward, context.policy, context.rollout
    if reward is None:
        raise RuntimeError(
            "This method needs the reward's gradient. Give PrepareContext reward, prompts and data_rows."
        )
    whole, sides = latents.shape[-2:], window(latents.shape[-2:], crop)
    generators = image_generators(STREAM_CROPS, rollout.seed, rollout.iteration, rollout.image_ids.tolist())
    room = [1 + most - side for most, side in zip(whole, sides, strict=True)]
    places = [[int(torch.randint(number, (), generator=drawn)) for number in room] for drawn in generators]

    @torch.enable_grad()
    def of_batch(part: Tensor, numbers: Tensor) -> Tensor:
        leaf, chosen = part.detach().to(policy.device).float().requires_grad_(), numbers.tolist()
        corners = [places[i] for i in chosen]
        seen = [z[..., y : y + sides[0], x : x + sides[1]] for z, (y, x) in zip(leaf, corners, strict=True)]
        prompts, rows = [context.prompts[i] for i in chosen], [dict(context.data_rows[i]) for i in chosen]
        scores = reward.with_gradient(policy.decode_with_gradient(torch.stack(seen), halved), prompts, rows)
        (gradient,) = torch.autograd.grad(scores.sum(), leaf)
        return torch.cat([scores.detach()[:, None], gradient.flatten(1)], dim=1).to(latents.device)

    both = in_batches(of_batch, policy.decode_batch_size, latents, images.cpu())
    context.ledger.count_decoded(len(latents))
    return both[:, 0].clone(), both[:, 1:].reshape(latents.shape)


def window(sides: Sequence[int], crop: float | None) -> list[int]:
    """Return the sides of the decoded window of latents; ``crop`` is its share of each side, ``None`` for all."""
    return [side if crop is None else max(1, round(crop * side)) for side in sides]


def active_steps(steps: int, number: int, late_bias: float, generator: torch.Generator) -> list[int]:
    """Draw distinct steps of a rollout with probabilities proportional to ``(i + 1)^late_bias``, ascending."""
    weights = torch.arange(1, steps + 1, dtype=torch.float64) ** late_bias
    return sorted(torch.multinomial(weights, number, generator=generator).tolist())


def renoised(context: PrepareContext, number: int, t: Tensor) -> Tensor:
    """Return the rollout's images with new noise at a time ``t (1,)``, ``(B, number, C, h, w)``."""
    rollout, home = context.rollout, context.rollout.latents.device
    generators = image_generators(STREAM_RENOISED, rollout.seed, rollout.iteration, rollout.image_ids.tolist())
    noise = unit_noise(generators, (number, *rollout.latents.shape[1:])).to(home)
    copies = rollout.latents.repeat_interleave(number, dim=0)
    return context.policy.path.interpolate(copies, noise.flatten(0, 1), t.expand(len(copies)).to(home)).view_as(noise)


def linearised(losses: Tensor, gradient: Tensor, images: Tensor) -> Tensor:
    """Return ``l + <dl/dx, x - sg(x)>``, which has the value and the gradient of the loss where they were taken.

    Args:
        losses: ``(M, N)``.
        gradient: Their gradient with respect to the images, ``(M, N, C, h, w)``.
        images: ``(M, N, C, h, w)``, up to a constant; carries grad.
    """
    return losses + (gradient * (images - images.detach())).flatten(2).sum(2)


def expanded(values: Tensor, like: Tensor) -> Tensor:
    """Return values with trailing dimensions of size 1, up to the number of dimensions of ``like``."""
    return values[(...,) + (None,) * (like.ndim - values.ndim)]
