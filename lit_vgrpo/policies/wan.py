"""Wan 2.1 and Wan 2.2 (arXiv 2503.20314), for video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.ranges import PositiveFloat, Range, checked
from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.errors import counted
from lit_vgrpo.policies.flow import FlowPolicy
from lit_vgrpo.policies.loading import INDEX, config_value
from lit_vgrpo.system.hub import LoadError


@checked
class WanPolicy(FlowPolicy):
    """``WanPipeline`` as a policy on a rectified flow; its images are videos ``(B, F, 3, H, W)``.

    Latents are ``(B, C, f, h, w)``. The first solver is the pipeline's. Wan 2.2 A14B has two networks, for early and
    late times; both are trained.

    Args:
        checkpoint: A hub name, a local pipeline folder, or ``shipped:...``.
        num_frames: Frames per video: 1 plus a multiple of the VAE's temporal compression factor (4).
        height: Height in pixels.
        width: Width in pixels.
        max_sequence_length: See :class:`~lit_vgrpo.policies.flow.FlowPolicy`.
        guidance_scale_2: Guidance scale of the second network, if sampling uses guidance; ``None`` uses the first's.
        **options: See :class:`~lit_vgrpo.policies.base.Policy`.
    """

    pipeline_class: ClassVar[str] = "WanPipeline"
    pipeline_solver: ClassVar[str] = "unipc"
    solvers: ClassVar[tuple[str, ...]] = ("unipc", "euler", "dpm++")
    default_lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    comfyui_names: ClassVar[Mapping[str, str]] = {
        **{f"attn1.to_{name}": f"self_attn.{name}" for name in "qkv"},
        **{f"attn2.to_{name}": f"cross_attn.{name}" for name in "qkv"},
        "attn1.to_out.0": "self_attn.o",
        "attn2.to_out.0": "cross_attn.o",
        "ffn.net.0.proj": "ffn.0",
        "ffn.net.2": "ffn.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        "proj_out": "head.head",
    }
    """The names of the model's authors; diffusers' ``_convert_non_diffusers_wan_lora_to_diffusers`` has the inverse."""

    num_frames: int

    def __init__(
        self,
        checkpoint: str,
        num_frames: Annotated[int, Range(1, 1001)] = 81,
        height: Annotated[int, Range(1, 16_384)] = 480,
        width: Annotated[int, Range(1, 16_384)] = 832,
        max_sequence_length: int = 512,
        guidance_scale_2: PositiveFloat | None = None,
        **options: Any,
    ) -> None:
        super().__init__(checkpoint, max_sequence_length, height=height, width=width, **options)
        self.num_frames, self.guidance_scale_2 = num_frames, guidance_scale_2

    @property
    def frames_per_second(self) -> int:
        """Rate of the videos that the model was trained on."""
        return 24 if self.pipeline.config.expand_timesteps else 16

    @property
    def pixels_per_latent(self) -> int:
        return int(self.pipeline.vae_scale_factor_spatial)

    def misfit(self, pipeline: Any) -> str | None:
        number = sum(network is not None for network in (pipeline.transformer, pipeline.transformer_2))
        if number != (1 if pipeline.config.boundary_ratio is None else 2) or pipeline.transformer is None:
            ratio = pipeline.config.boundary_ratio
            return f"has {counted(number, 'network')} and boundary_ratio={ratio}. Set it for two networks, not for one."
        if number == 1 and self.guidance_scale_2 is not None:
            return "has one network, so model.policy.guidance_scale_2 has no effect. Leave it out."
        return super().misfit(pipeline)

    def scheduler_misfit(self, scheduler: Any) -> str | None:
        if scheduler.config.get("use_flow_sigmas") and scheduler.config.get("prediction_type") == "flow_prediction":
            return None
        return f"comes with {type(scheduler).__name__}, but Wan needs UniPC with use_flow_sigmas."

    @property
    def network_names(self) -> tuple[str, ...]:
        ratio = self.pipeline.config.boundary_ratio if self.loaded else config_value(self, INDEX, "boundary_ratio")
        return ("transformer",) if ratio is None else ("transformer", "transformer_2")

    def pipeline_guidance(self, guidance: float, prompts: int) -> dict[str, Any]:
        second = {} if self.guidance_scale_2 is None else {"guidance_scale_2": self.guidance_scale_2}
        return super().pipeline_guidance(guidance, prompts) | second

    def guidance_at(self, t: Tensor, guidance: float) -> Any:
        if self.guidance_scale_2 is None:
            return guidance
        is_early = t * self.pipeline.scheduler.config.num_train_timesteps >= self.network.boundary
        return torch.where(is_early, guidance, self.guidance_scale_2)[:, None, None, None, None]

    def find_latent_shape(self) -> tuple[int, ...]:
        factor, frames = int(self.pipeline.vae_scale_factor_temporal), self.num_frames
        if over := (frames - 1) % factor:
            raise LoadError(
                f"model.policy.num_frames={frames}: the VAE decodes 1 plus a multiple of {factor} frames. "
                f"Use {frames - over} or {frames - over + factor}."
            )
        config = self.network.config
        return config.in_channels, 1 + frames // factor, *self.latent_sides(0, config.patch_size[1])

    def vae_decode(self, latents: Tensor) -> Tensor:
        """Return the videos ``(B, F, 3, H, W)`` in [-1, 1] of the VAE's latents ``(B, C, f, h, w)``."""
        return super().vae_decode(latents).transpose(1, 2)

    def vae_encode(self, images: Tensor) -> Tensor:
        """Return the network's latents of videos ``(B, F, 3, H, W)`` in [-1, 1]."""
        return super().vae_encode(images.transpose(1, 2))

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        return {"tokens": self.pipeline_embeddings(prompts)[0]}

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        timestep = t * self.pipeline.scheduler.config.num_train_timesteps
        if self.pipeline.config.expand_timesteps:  # one timestep per token
            timestep = timestep[:, None].expand(-1, self.image_tokens())
        given = {"hidden_states": z, "timestep": timestep, "encoder_hidden_states": cond.tensors["tokens"]}
        if len(self.network_names) == 1:
            return self.network(**given, return_dict=False)[0]
        return self.network(z, timestep, lambda rows: {name: value[rows] for name, value in given.items()})[0]
