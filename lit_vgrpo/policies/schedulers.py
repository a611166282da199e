"""diffusers' ODE schedulers, configured for each path.

``from_config`` across scheduler classes silently falls back to epsilon prediction and to unshifted sigmas, so every
setting that matters is passed by name. Timesteps stay on the CPU, whatever the network's device: some schedulers branch
on them at each step, where the host would wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

FLOW_SOLVERS = ("euler", "dpm++", "unipc")
VP_SOLVERS = ("ddim", "dpm++")


def flow_scheduler(
    solver: str,
    base: Any,
    steps: int,
    image_tokens: int,
    euler_sigmas: Sequence[float] | None = None,
    mu: float | None = None,
) -> Any:
    """Return a scheduler for a rectified flow: ``euler`` (the pipeline's own), ``dpm++`` (2M) or ``unipc``.

    Args:
        base: the pipeline's own scheduler, whose sigma shift all solvers use.
        steps: number of network calls.
        image_tokens: tokens per image in the network, for a dynamic shift.
        euler_sigmas: unshifted sigmas that the pipeline passes to its scheduler, ``(steps,)``; ``None`` for the
            scheduler's own.
        mu: the dynamic shift's logarithm, where it depends on more than the tokens; ``None`` computes it from these.

    Raises:
        ValueError: the path does not have this solver.
    """
    from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

    by_tokens = dynamic_mu(base, image_tokens)
    mu = by_tokens if by_tokens is None or mu is None else mu
    if solver == "euler":
        scheduler = type(base).from_config(base.config)
        given: dict[str, Any] = {} if mu is None else {"mu": mu}
        if euler_sigmas is not None:
            given["sigmas"] = list(euler_sigmas)
        scheduler.set_timesteps(steps, **given)
        return scheduler
    shared = {
        "num_train_timesteps": base.config.num_train_timesteps,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": static_shift(base, mu),
        "final_sigmas_type": "zero",
    }
    if solver == "dpm++":
        scheduler = DPMSolverMultistepScheduler(**shared, algorithm_type="dpmsolver++", solver_order=2)
    elif solver == "unipc":
        scheduler = UniPCMultistepScheduler(**shared)
    else:
        raise ValueError(f"solver={solver!r} does not exist on a rectified flow. Use {' or '.join(FLOW_SOLVERS)}.")
    scheduler.set_timesteps(steps)
    return scheduler


def dynamic_mu(base: Any, image_tokens: int) -> float | None:
    """Return the logarithm ``mu`` of a resolution-dependent shift; ``None`` for a fixed shift.

    Linear in the number of tokens, through the two points in the scheduler's config.
    """
    config = base.config
    if not config.get("use_dynamic_shifting"):
        return None
    tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    shifts = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (shifts[1] - shifts[0]) / (tokens[1] - tokens[0])
    return shifts[0] + slope * (image_tokens - tokens[0])


def static_shift(base: Any, mu: float | None) -> float:
    """Return the factor ``s`` of ``s t / (1 + (s - 1) t)`` that reproduces the scheduler's shift of the sigmas."""
    if mu is None:
        return base.config.shift
    return mu if base.config.get("time_shift_type") == "linear" else math.exp(mu)


def vp_scheduler(solver: str, base: Any) -> Any:
    """Return a variance-preserving scheduler: ``ddim`` (eta 0) or ``dpm++`` (2M), with the pipeline's betas.

    Raises:
        ValueError: the path does not have this solver.
    """
    from diffusers import DDIMScheduler, DPMSolverMultistepScheduler

    config = base.config
    shared = {
        "num_train_timesteps": config.num_train_timesteps,
        "beta_start": config.beta_start,
        "beta_end": config.beta_end,
        "beta_schedule": config.beta_schedule,
        "trained_betas": config.get("trained_betas"),
        "prediction_type": config.prediction_type,
        "rescale_betas_zero_snr": config.get("rescale_betas_zero_snr", False),
        "timestep_spacing": "trailing",
    }
    if solver == "ddim":
        return DDIMScheduler(**shared, clip_sample=False, set_alpha_to_one=True)
    if solver == "dpm++":
        return DPMSolverMultistepScheduler(
            **shared, algorithm_type="dpmsolver++", solver_order=2, final_sigmas_type="zero"
        )
    raise ValueError(f"solver={solver!r} does not exist on this path. Use {' or '.join(VP_SOLVERS)}.")
