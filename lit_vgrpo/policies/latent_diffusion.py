"""Shared code of Stable Diffusion 1.x, 2.x and XL: a UNet on the variance-preserving path (arXiv 2112.10752)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.probability_paths import Space, VariancePreserving
from lit_vgrpo.core.solvers import VP_SDES
from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.contract import Parts
from lit_vgrpo.policies.misfits import channels_misfit, distillation, noise_misfit
from lit_vgrpo.policies.schedulers import VP_SOLVERS, vp_scheduler

PREDICTIONS: dict[str, Space] = {"epsilon": "eps", "v_prediction": "v"}


class LatentDiffusionPolicy(Policy, ABC):
    """A ``UNet2DConditionModel`` (epsilon or v-prediction) as a policy.

    Rollouts use "trailing" timestep spacing, so that they start from pure noise like :meth:`Policy.prior`.

    Args:
        checkpoint: a hub name, a local pipeline folder, or ``shipped:...``.
        channels_last: store the network's weights and activations in channels-last format, for faster convolutions on
            a GPU.
        **options: see :class:`~lit_vgrpo.policies.base.Policy`.
    """

    network_name: ClassVar[str] = "unet"
    solvers: ClassVar[tuple[str, ...]] = VP_SOLVERS
    sde_solvers: ClassVar[tuple[str, ...]] = VP_SDES
    path_kind: ClassVar[Literal["flow", "vp"]] = "vp"
    default_lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    uses_latent_shift: ClassVar[bool] = False

    def __init__(self, checkpoint: str, channels_last: bool = False, **options: Any) -> None:
        super().__init__(checkpoint, **options)
        self.channels_last = channels_last

    def adopt(self, pipeline: Any) -> Policy:
        super().adopt(pipeline)
        if self.channels_last:
            from lit_vgrpo.policies.speed import use_channels_last

            use_channels_last(self.network)
        return self

    def distilled_by(self, parts: Parts) -> str | None:
        kind = distillation(parts.get("scheduler"))
        return None if kind is None else f"its scheduler is {kind}"

    def misfit(self, parts: Parts) -> str | None:
        network = parts.get(self.network_name)
        if (network or {}).get("time_cond_proj_dim") is not None:
            return (
                "is a consistency model, distilled to a few steps (time_cond_proj_dim in its unet/config.json). Use "
                "the model that it was distilled from."
            )
        return channels_misfit(self.network_name, network, parts.get("vae")) or noise_misfit(
            parts.get("scheduler"), tuple(PREDICTIONS), type(self).__name__
        )

    def build_path(self) -> VariancePreserving:
        base = self.pipeline.scheduler
        # The betas may be rescaled to zero terminal SNR, which every scheduler does in its constructor.
        return VariancePreserving(vp_scheduler("ddim", base).alphas_cumprod, PREDICTIONS[base.config.prediction_type])

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        assert isinstance(self.path, VariancePreserving)
        if self.channels_last:
            z = z.contiguous(memory_format=torch.channels_last)
        return self.network(
            z,
            self.path.index(t).clamp(min=0),
            encoder_hidden_states=cond.tensors["tokens"],
            added_cond_kwargs=self.added_conditions(z, cond),
            return_dict=False,
        )[0]

    @abstractmethod
    def added_conditions(self, z: Tensor, cond: Conditioning) -> dict[str, Tensor] | None:
        """Return the UNet's inputs besides the prompt's tokens, or ``None``."""

    def scheduler(self, solver: str, steps: int) -> Any:
        scheduler = vp_scheduler(solver, self.pipeline.scheduler)
        scheduler.set_timesteps(steps)
        return scheduler

    def scheduler_times(self, scheduler: Any) -> Tensor:
        assert isinstance(self.path, VariancePreserving)
        return self.path.time(scheduler.timesteps)
