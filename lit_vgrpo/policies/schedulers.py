"""diffusers' ODE schedulers, set up for each path.

``from_config`` across scheduler classes silently falls back to epsilon prediction and to unshifted sigmas, so every
setting that matters is passed by name.
"""

from __future__ import annotations

from typing import Any

FLOW_SOLVERS = ("euler", "dpm++", "unipc")
VP_SOLVERS = ("ddim", "dpm++")


def _refuse(solver: str, known: tuple[str, ...], path: str) -> ValueError:
    return ValueError(f"rollout.solver={solver!r} does not exist on the {path} path. Use {' or '.join(known)}.")


def flow_scheduler(solver: str, shift: float, base: Any) -> Any:
    """A scheduler on the rectified flow: ``euler`` (the pipeline's own), ``dpm++`` (2M) or ``unipc``.

    Args:
        shift: the resolution shift of the sigmas.
        base: the pipeline's own scheduler.

    Raises:
        ValueError: the path does not have that solver.
    """
    from diffusers import DPMSolverMultistepScheduler, UniPCMultistepScheduler

    steps = base.config.num_train_timesteps
    if solver == "euler":
        return type(base).from_config(base.config)
    if solver == "dpm++":
        return DPMSolverMultistepScheduler(
            num_train_timesteps=steps,
            algorithm_type="dpmsolver++",
            solver_order=2,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=shift,
            final_sigmas_type="zero",
        )
    if solver == "unipc":
        return UniPCMultistepScheduler(
            num_train_timesteps=steps,
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=shift,
            final_sigmas_type="zero",
        )
    raise _refuse(solver, FLOW_SOLVERS, "rectified-flow")


def vp_scheduler(solver: str, base: Any) -> Any:
    """A scheduler on the variance-preserving path: ``ddim`` (eta 0) or ``dpm++`` (2M), on the pipeline's betas.

    Raises:
        ValueError: the path does not have that solver.
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
    raise _refuse(solver, VP_SOLVERS, "variance-preserving")
