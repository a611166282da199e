"""Shared code of transformers on a rectified flow (arXiv 2209.03003)."""

from __future__ import annotations

from abc import ABC
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from lit_vgrpo.core.probability_paths import RectifiedFlow
from lit_vgrpo.core.solvers import FLOW_SDES
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.misfits import channels_misfit, flow_misfit
from lit_vgrpo.policies.pipeline_folder import Parts
from lit_vgrpo.policies.schedulers import FLOW_SOLVERS, flow_scheduler


class FlowPolicy(Policy, ABC):
    """A ``transformer`` whose pipeline passes its scheduler equally spaced sigmas.

    Args:
        checkpoint: a hub name, a local pipeline folder, or ``shipped:...``.
        **options: see :class:`~lit_vgrpo.policies.base.Policy`.
    """

    network_name: ClassVar[str] = "transformer"
    solvers: ClassVar[tuple[str, ...]] = FLOW_SOLVERS
    sde_solvers: ClassVar[tuple[str, ...]] = FLOW_SDES
    path_kind: ClassVar[Literal["flow", "vp"]] = "flow"
    default_lora_targets: ClassVar[tuple[str, ...]] = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    """The attention of images and text together, which most families have."""
    packed: ClassVar[int] = 1
    """Latents per side in one of the network's ``in_channels`` inputs."""

    def misfit(self, parts: Parts) -> str | None:
        network, vae = parts.get(self.network_name), parts.get("vae")
        error = channels_misfit(self.network_name, network, vae, self.packed**2)
        return error or flow_misfit(parts.get("scheduler"))

    def build_path(self) -> RectifiedFlow:
        return RectifiedFlow()

    def image_tokens(self) -> int:
        """Return the number of tokens per image, 2 x 2 latents each."""
        _, height, width = self.latent_shape
        return height // 2 * (width // 2)

    def shift_mu(self, steps: int) -> float | None:
        """Return the logarithm of a dynamic shift; ``None`` for the usual one, linear in the number of tokens."""
        return None

    def scheduler(self, solver: str, steps: int) -> Any:
        sigmas = np.linspace(1.0, 1 / steps, steps).tolist()  # as in the pipeline
        base, tokens = self.pipeline.scheduler, self.image_tokens()
        return flow_scheduler(solver, base, steps, tokens, sigmas, self.shift_mu(steps))

    def scheduler_times(self, scheduler: Any) -> Tensor:
        return (scheduler.timesteps.double() / scheduler.config.num_train_timesteps).float()
