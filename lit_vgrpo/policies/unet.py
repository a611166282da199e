"""Stable Diffusion 1.x and 2.x: a UNet on the variance-preserving path (arXiv 2112.10752)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import Tensor

from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.conditioning import Conditioning
from lit_vgrpo.policies.paths import VariancePreserving
from lit_vgrpo.policies.schedulers import VP_SOLVERS, vp_scheduler
from lit_vgrpo.solvers import VP_SDES

PREDICTIONS = {"epsilon": "eps", "v_prediction": "v"}


class UNetPolicy(Policy):
    """``StableDiffusionPipeline`` (UNet2DConditionModel, epsilon or v-prediction) as a policy.

    The safety checker is left out: rewards must see what the policy draws. Rollouts space their timesteps
    "trailing", so that they start from pure noise as :meth:`Policy.prior` does.

    Args:
        checkpoint: a hub name, a local pipeline folder, or ``shipped:...``.
        **options: see :class:`~lit_vgrpo.policies.base.Policy`.
    """

    pipeline_class: ClassVar[str] = "StableDiffusionPipeline"
    network_name: ClassVar[str] = "unet"
    solvers: ClassVar[tuple[str, ...]] = VP_SOLVERS
    sde_solvers: ClassVar[tuple[str, ...]] = VP_SDES
    path_kind: ClassVar[Literal["flow", "vp"]] = "vp"
    default_lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    uses_latent_shift: ClassVar[bool] = False

    def null_components(self, folder: Path) -> dict[str, None]:
        return {**super().null_components(folder), "safety_checker": None, "feature_extractor": None}

    def build_path(self) -> VariancePreserving:
        base = self.pipeline.scheduler
        kind = base.config.prediction_type
        if kind not in PREDICTIONS:
            raise ValueError(f"{self.checkpoint} predicts {kind!r}. UNetPolicy takes {' or '.join(PREDICTIONS)}.")
        # The betas may be rescaled to a zero terminal SNR, which every scheduler does in its own constructor.
        return VariancePreserving(vp_scheduler("ddim", base).alphas_cumprod, PREDICTIONS[kind])  # type: ignore[arg-type]

    def lora_names(self, layers: dict[str, Tensor]) -> dict[str, Tensor]:
        from diffusers.utils import convert_state_dict_to_diffusers

        return convert_state_dict_to_diffusers(layers)

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        tokens, _ = self.pipeline.encode_prompt(
            prompts, device=self.device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"tokens": tokens}

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        assert isinstance(self.path, VariancePreserving)
        timestep = self.path.index(t).clamp(min=0)
        return self.network(z, timestep, encoder_hidden_states=cond.tensors["tokens"], return_dict=False)[0]

    def scheduler(self, solver: str, steps: int) -> Any:
        scheduler = vp_scheduler(solver, self.pipeline.scheduler)
        scheduler.set_timesteps(steps, device=self.device)
        return scheduler

    def scheduler_times(self, scheduler: Any) -> Tensor:
        assert isinstance(self.path, VariancePreserving)
        return self.path.time(scheduler.timesteps)
