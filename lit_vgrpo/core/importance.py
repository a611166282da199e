"""Importance weights of a group's images that share one network prediction at one noisy latent.

The latent ``z = a o_b + b eps`` starts from one image ``b`` of the group. Any other image could have produced it, with
density ``N(z; a o_i, b^2)``. The balance heuristic weights image ``i`` by the share of its density in the sum over the
group, which makes the average over ``b`` and ``eps`` unbiased for every image. At ``t = 1`` on a rectified flow
``a = 0``, and all weights are equal.

Source: Veach and Guibas, "Optimally Combining Sampling Techniques for Monte Carlo Rendering", SIGGRAPH 1995. The
application to a group's images is ours, as are the temperature and its choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

BISECTIONS = 50


def negative_log_densities(noisy: Tensor, latents: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``|z - a o_i|^2 / (2 b^2)``, float64, up to an additive constant per pair.

    Args:
        noisy: The noisy latent ``z`` of each image's group and pair, ``(B, N, ...)``.
        latents: ``o_i``, ``(B, ...)``.
        a: Coefficient of the clean latent, ``(B, N)``.
        b: Coefficient of the noise, ``(B, N)``.

    Returns:
        Shape ``(B, N)``.
    """
    columns = []
    for pair in range(noisy.shape[1]):  # one at a time: float64 copies of all pairs may not fit in memory
        scale = a[:, pair].reshape(-1, *[1] * (latents.ndim - 1))
        difference = (noisy[:, pair] - scale * latents).flatten(1).double()
        columns.append(difference.square().sum(dim=1) / (2 * b[:, pair].double().square()))
    return torch.stack(columns, dim=1)


def balance_weights(densities: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Return the weights of the images of each group, ``softmax(-temperature * densities)``.

    Args:
        densities: Negative log-densities, ``(..., G)``.
        temperature: In [0, 1], a number or ``(...)``: 1 is the balance heuristic and unbiased, 0 gives equal weights.

    Returns:
        Shape of ``densities``; sums to 1 over the last dimension.

    >>> balance_weights(torch.tensor([0.0, 0.0, 50.0])).round(decimals=3)
    tensor([0.5000, 0.5000, 0.0000])
    """
    factor = torch.as_tensor(temperature, dtype=densities.dtype, device=densities.device)
    return torch.softmax(-factor[..., None] * densities, dim=-1)


def effective_sample_size(weights: Tensor) -> Tensor:
    """Return ``1 / sum_i w_i^2``, from 1 to G; ``(..., G) -> (...)``."""
    return 1 / weights.square().sum(dim=-1)


def temperature_for(densities: Tensor, target: float) -> Tensor:
    """Return the highest temperature in [0, 1] at which the effective sample size is at least ``target``.

    Args:
        densities: Negative log-densities, ``(..., G)``.
        target: Between 1 and G.

    Returns:
        Shape ``(...)``; 1 where the balance heuristic already reaches the target.
    """
    low, high = torch.zeros_like(densities[..., 0]), torch.ones_like(densities[..., 0])
    enough = effective_sample_size(balance_weights(densities, high)) >= target
    for _ in range(BISECTIONS):  # the size falls as the temperature rises
        middle = (low + high) / 2
        reached = effective_sample_size(balance_weights(densities, middle)) >= target
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return torch.where(enough, torch.ones_like(low), low)
