"""Sampling steps with a likelihood: one Gaussian transition for each SDE.

The ODE solvers are diffusers' schedulers, which do not provide the distribution of a step. All functions are pure and
in float32; times are those of the path, 1 = pure noise, ``h = t - t_next > 0``. Shapes: ``z (B, ...)``, times ``(B,)``.
Without noise every mean is the step of the path's first-order ODE solver: Euler, or DDIM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lit_vgrpo.core.probability_paths import ProbabilityPath, expand

FLOW_SDES = ("flow_sde", "cps", "dance_sde")
VP_SDES = ("ddim_sde",)
ODE_OF = {"flow_sde": "euler", "cps": "euler", "dance_sde": "euler", "ddim_sde": "ddim"}
"""The ODE solver that each SDE becomes without noise."""

SOLVERS = dict.fromkeys(("euler", "dpm++", "unipc", "ddim", *ODE_OF))
"""Names of all solvers; the classes of policies add theirs."""

DEFAULT_NOISE = {"flow_sde": 0.7, "cps": 0.8, "dance_sde": 0.3, "ddim_sde": 1.0}
"""The published noise level of each SDE."""


@dataclass
class Transition:
    """The Gaussian distribution of a sampling step.

    Attributes:
        mean: ``(B, ...)``; carries the network's gradient.
        std: ``(B, 1...)``, the standard deviation of the whole step.
        diffusion: ``(B, 1...)``, sigma without the step's ``sqrt(h)``, the divisor in the method's KL. The same as
            ``std`` if the step does not discretise a rate (cps, ddim_sde).
    """

    mean: Tensor
    std: Tensor
    diffusion: Tensor


def flow_sde_step(
    velocity: Tensor, z: Tensor, t: Tensor, t_next: Tensor, noise_level: float, second_time: float | Tensor
) -> Transition:
    """Take a step with ``sigma = noise_level sqrt(t / (1 - t))``, the SDE with the marginals of the flow.

    At ``t = 1`` the denominator uses the schedule's second time. Source: arXiv 2505.05470.
    """
    bounded = torch.where(t > 1 - 1e-5, second_time, t)  # some shifts start at 0.9999998
    t, h, bounded = (expand(value, z) for value in (t, t - t_next, bounded))
    sigma = noise_level * (t / (1 - bounded)).sqrt()
    drift = sigma.square() * h / (2 * t)
    mean = z * (1 - drift) - velocity * (h + drift * (1 - t))
    return Transition(mean, sigma * h.sqrt(), sigma)


def cps_step(velocity: Tensor, z: Tensor, t: Tensor, t_next: Tensor, noise_level: float) -> Transition:
    """Take a step with ``s = t' sin(noise_level pi / 2)``: new noise replaces part of the predicted, totalling ``t'``.

    Source: arXiv 2509.05952, as used with arXiv 2505.05470.
    """
    t, t_next = expand(t, z), expand(t_next, z)
    x, eps = z - t * velocity, z + (1 - t) * velocity
    std = t_next * math.sin(noise_level * math.pi / 2)
    kept = t_next * abs(math.cos(noise_level * math.pi / 2))  # sqrt(t'^2 - s^2)
    return Transition((1 - t_next) * x + kept * eps, std, std)


def dance_step(velocity: Tensor, z: Tensor, t: Tensor, t_next: Tensor, noise_level: float) -> Transition:
    """Take an Euler step plus a drift along the score, with a constant ``eta = noise_level`` (arXiv 2505.07818)."""
    t, h = expand(t, z), expand(t - t_next, z)
    x = z - t * velocity
    score = -(z - (1 - t) * x) / t.square()
    mean = z - h * velocity + noise_level**2 * h * score / 2
    sigma = torch.full_like(h, noise_level)
    return Transition(mean, sigma * h.sqrt(), sigma)


def ddim_step(
    path: ProbabilityPath, prediction: Tensor, z: Tensor, t: Tensor, t_next: Tensor, eta: float
) -> Transition:
    """Take a DDIM step with noise ``eta``: 1 is the ancestral chain of a variance-preserving network, 0 the ODE.

    Source: arXiv 2010.02502; as a policy's chain arXiv 2305.13301.
    """
    x, eps = path.to_x(prediction, z, t), path.to_eps(prediction, z, t)
    a, b = (expand(value, z) for value in path.coefficients(t))
    a_next, b_next = (expand(value, z) for value in path.coefficients(t_next))
    variance = eta**2 * (b_next / b).square() * (1 - (a / a_next).square()).clamp(min=0)
    kept = (b_next.square() - variance).clamp(min=0).sqrt()
    std = variance.sqrt()
    return Transition(a_next * x + kept * eps, std, std)


def transition(
    solver: str,
    path: ProbabilityPath,
    prediction: Tensor,
    z: Tensor,
    t: Tensor,
    t_next: Tensor,
    noise_level: float | None = None,
    second_time: float | Tensor = 0.0,
) -> Transition:
    """Take one step of ``solver`` from the network's prediction at ``z``.

    Args:
        noise_level: ``None`` uses the solver's default; 0 gives the ODE step as the mean, with std 0.
        second_time: The schedule's second time, a number or ``(B,)``; flow_sde needs it at ``t = 1``.
    """
    level = DEFAULT_NOISE[solver] if noise_level is None else noise_level
    if solver == "ddim_sde":
        return ddim_step(path, prediction, z, t, t_next, level)
    velocity = path.to_v(prediction, z, t)
    if solver == "flow_sde":
        return flow_sde_step(velocity, z, t, t_next, level, second_time)
    return (cps_step if solver == "cps" else dance_step)(velocity, z, t, t_next, level)


def log_prob(solver: str, sample: Tensor, step: Transition) -> Tensor:
    """Return the log-probability ``(B,)`` of a step's end ``sample (B, ...)``: a mean over dimensions, not a sum.

    For cps it is ``-m((z' - mean)^2)``, as published, and 0 for a step without noise, which has no density.
    """
    squared = (sample - step.mean).square().flatten(1).mean(dim=1)
    if solver == "cps":
        return -squared
    std = step.std.flatten()
    safe = torch.where(std > 0, std, 1.0)
    density = -squared / (2 * safe.square()) - safe.log() - math.log(2 * math.pi) / 2
    return torch.where(std > 0, density, 0.0)


def tail_steps(remaining: int, share: float) -> int:
    """Return the number of steps of the re-gridded tail: ``share`` of the remaining, at least one if any remain."""
    return min(remaining, max(1, math.ceil(share * remaining))) if remaining else 0


def regrid(times: Tensor, steps: int) -> Tensor:
    """Resample times ``(R + 1,)`` on the CPU to fewer steps over the same interval, with the same spacing."""
    at = torch.linspace(0, len(times) - 1, steps + 1, dtype=torch.float64)
    return torch.from_numpy(np.interp(at, np.arange(len(times)), times)).float()
