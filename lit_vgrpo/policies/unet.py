"""Stable Diffusion 1.x and 2.x (arXiv 2112.10752): a UNet on the variance-preserving path."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.probability_paths import Space, VariancePreserving
from lit_vgrpo.core.solvers import VP_SDES
from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.base import Policy, PutStart
from lit_vgrpo.policies.flow import SIGMA_KINDS

VP_SOLVERS = ("ddim", "dpm++")
SNR_SHIFT = "snr_shift_scale"
"""Option of CogVideoX's schedulers, which shift the signal-to-noise ratio."""
PREDICTIONS: dict[str, Space] = {"epsilon": "eps", "v_prediction": "v"}


class UNetPolicy(Policy):
    """``StableDiffusionPipeline`` (SD 1.5, SD 2.1; epsilon or v-prediction) as a policy.

    Rollouts use "trailing" timestep spacing, so that they start from pure noise like :meth:`Policy.prior`. The safety
    checker is left out: rewards must see what the policy samples.

    Args:
        checkpoint: A hub name, a local pipeline folder, or ``shipped:...``.
        channels_last: Store the network's weights and activations in channels-last format, for faster convolutions on
            a GPU.
        **options: See :class:`~lit_vgrpo.policies.base.Policy`.
    """

    pipeline_class: ClassVar[str] = "StableDiffusionPipeline"
    network_name: ClassVar[str] = "unet"
    solvers: ClassVar[tuple[str, ...]] = VP_SOLVERS
    sde_solvers: ClassVar[tuple[str, ...]] = VP_SDES
    path_kind: ClassVar[Literal["flow", "vp"]] = "vp"
    default_lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    uses_latent_shift: ClassVar[bool] = False
    path: VariancePreserving
    left_out: tuple[str, ...] = ("safety_checker", "feature_extractor")

    def __init__(self, checkpoint: str, channels_last: bool = False, **options: Any) -> None:
        super().__init__(checkpoint, **options)
        self.channels_last = channels_last

    def adopt(self, pipeline: Any, put_start: PutStart | None = None) -> Policy:
        super().adopt(pipeline, put_start)
        if self.channels_last:
            self.network.to(memory_format=torch.channels_last)
        return self

    def misfit(self, pipeline: Any) -> str | None:
        return vp_misfit(pipeline) or super().misfit(pipeline)

    def build_path(self) -> VariancePreserving:
        base = self.pipeline.scheduler
        # The betas may be rescaled to zero terminal SNR, which every scheduler does in its constructor.
        return VariancePreserving(vp_scheduler("ddim", base).alphas_cumprod, PREDICTIONS[base.config.prediction_type])

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        return {"tokens": self.pipeline_embeddings(prompts)[0]}

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        if self.channels_last:
            z = z.contiguous(memory_format=torch.channels_last)
        return self.network(
            z,
            self.path.index(t).clamp(min=0),
            encoder_hidden_states=cond.tensors["tokens"],
            added_cond_kwargs=self.added_conditions(z, cond),
            return_dict=False,
        )[0]

    def added_conditions(self, z: Tensor, cond: Conditioning) -> dict[str, Tensor] | None:
        """Return the UNet's inputs besides the prompt's tokens, or ``None``."""
        return None

    def scheduler(self, solver: str, steps: int) -> Any:
        return vp_scheduler(solver, self.pipeline.scheduler, steps)

    def scheduler_times(self, scheduler: Any) -> Tensor:
        return self.path.time(scheduler.timesteps)


def vp_misfit(pipeline: Any) -> str | None:
    """Return why a pipeline cannot be sampled on the variance-preserving path, as a phrase, or ``None``."""
    scheduler, config = pipeline.scheduler, pipeline.scheduler.config
    if not hasattr(scheduler, "alphas_cumprod") or config.get("timestep_type") == "continuous":
        return f"comes with {type(scheduler).__name__}: it was trained on another kind of noise schedule."
    network = getattr(pipeline, "unet", None)
    if network is not None and network.config.get("time_cond_proj_dim") is not None:
        return "is a consistency model (time_cond_proj_dim). Use the model that it was distilled from."
    if config.prediction_type not in PREDICTIONS:
        return f"predicts {config.prediction_type!r}, not {' or '.join(PREDICTIONS)}."
    own = vp_scheduler("ddim", scheduler).alphas_cumprod
    if not torch.allclose(own.double(), scheduler.alphas_cumprod.double(), atol=1e-6):  # some end at 2 ** -24
        return f"comes with {type(scheduler).__name__}: it was trained on another kind of noise schedule."
    if config.prediction_type == "epsilon" and config.get("rescale_betas_zero_snr"):
        return "predicts epsilon, which is undefined where its schedule ends in pure noise (zero SNR)."
    return None


def vp_scheduler(solver: str, base: Any, steps: int = 1) -> Any:
    """Return a variance-preserving scheduler: ``ddim`` (eta 0) or ``dpm++`` (2M), with the pipeline's betas.

    diffusers' DDIM steps by ``num_train_timesteps // steps``, so it leaves its times unless ``steps`` is a divisor.
    DPM-Solver++ of the first order takes the same steps and stays on them.

    Raises:
        ValueError: The path has no such solver, or none of diffusers' schedulers has these steps.
    """
    from diffusers import CogVideoXDDIMScheduler, DDIMScheduler, DPMSolverMultistepScheduler

    config = base.config
    kept = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type")
    shared = {name: config[name] for name in (*kept, "rescale_betas_zero_snr") if name in config}
    shared["timestep_spacing"] = "trailing"
    total = config.num_train_timesteps
    if solver not in VP_SOLVERS:
        raise ValueError(f"solver={solver!r} does not exist on this path. Use {' or '.join(VP_SOLVERS)}.")
    if solver == "ddim" and SNR_SHIFT in config:
        if total % steps:
            near = sorted((n for n in range(1, total + 1) if total % n == 0), key=lambda n: abs(n - steps))
            missed = f"steps={steps} does not divide {total}, so that CogVideoXDDIMScheduler misses its times."
            raise ValueError(f"{missed} Use {near[0]} or {near[1]}.")
        shift = {SNR_SHIFT: config[SNR_SHIFT]}
        scheduler = CogVideoXDDIMScheduler(**shared, **shift, clip_sample=False, set_alpha_to_one=True)
    elif solver == "ddim" and total % steps == 0:
        scheduler = DDIMScheduler(**shared, clip_sample=False, set_alpha_to_one=True)
    else:
        grid = {name: config.get(name, False) for name in SIGMA_KINDS if solver == "dpm++"}
        order = VP_SOLVERS.index(solver) + 1
        scheduler = DPMSolverMultistepScheduler(
            **shared, **grid, algorithm_type="dpmsolver++", solver_order=order, final_sigmas_type="zero"
        )
    scheduler.set_timesteps(steps)
    return scheduler
