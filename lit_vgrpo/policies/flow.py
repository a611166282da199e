"""Shared code of transformers on a rectified flow (arXiv 2209.03003)."""

from __future__ import annotations

from abc import ABC
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from lit_vgrpo.core.probability_paths import RectifiedFlow
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.solvers import FLOW_SDES
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.schedulers import FLOW_SOLVERS, flow_scheduler

LONGEST_PROMPT = 1024  # tokens
PATCH = 2  # latents per side of a token


@checked
class FlowPolicy(Policy, ABC):
    """A ``transformer`` whose pipeline passes its scheduler equally spaced sigmas.

    Args:
        checkpoint: a hub name, a local pipeline folder, or ``shipped:...``.
        max_sequence_length: tokens of a prompt that the network sees, the chat template included. Longer prompts are
            cut, shorter ones padded, and masked if the pipeline has masks.
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

    def __init__(
        self, checkpoint: str, max_sequence_length: Annotated[int, Range(1, LONGEST_PROMPT)] = 512, **options: Any
    ) -> None:
        super().__init__(checkpoint, **options)
        self.max_sequence_length = max_sequence_length

    def misfit(self, pipeline: Any) -> str | None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler, config = pipeline.scheduler, pipeline.scheduler.config
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) and not config.get("stochastic_sampling"):
            return None
        return (
            f"comes with {type(scheduler).__name__}: a rectified flow needs FlowMatchEulerDiscreteScheduler, without "
            "stochastic_sampling."
        )

    def find_latent_shape(self) -> tuple[int, int, int]:
        sides = self.latent_sides(self.pipeline.default_sample_size, PATCH)
        return self.network.config.in_channels // self.packed**2, *sides

    def build_path(self) -> RectifiedFlow:
        return RectifiedFlow()

    def image_tokens(self) -> int:
        """Return the number of tokens per image, 2 x 2 latents each."""
        _, height, width = self.latent_shape
        return height // PATCH * (width // PATCH)

    def shift_mu(self, steps: int) -> float | None:
        """Return the logarithm of a dynamic shift; ``None`` for the usual one, linear in the number of tokens."""
        return None

    def scheduler(self, solver: str, steps: int) -> Any:
        sigmas = np.linspace(1.0, 1 / steps, steps).tolist()  # as in the pipeline
        base, tokens = self.pipeline.scheduler, self.image_tokens()
        return flow_scheduler(solver, base, steps, tokens, sigmas, self.shift_mu(steps))

    def scheduler_times(self, scheduler: Any) -> Tensor:
        return (scheduler.timesteps.double() / scheduler.config.num_train_timesteps).float()
