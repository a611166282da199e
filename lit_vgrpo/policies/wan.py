"""Wan 2.1 and the 5B model of Wan 2.2 (arXiv 2503.20314), for video."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from torch import Tensor

from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.flow import FlowPolicy
from lit_vgrpo.policies.qwen_image import channel_statistics
from lit_vgrpo.system.hub import LoadError


@checked
class WanPolicy(FlowPolicy):
    """``WanPipeline`` as a policy on a rectified flow; its images are videos ``(B, F, 3, H, W)``.

    Latents are ``(B, C, f, h, w)``. The first solver is the pipeline's. Wan 2.2 A14B has two networks and is refused.

    Args:
        checkpoint: A hub name, a local pipeline folder, or ``shipped:...``.
        num_frames: Frames per video: 1 plus a multiple of the VAE's temporal compression factor (4).
        height: Height in pixels.
        width: Width in pixels.
        max_sequence_length: See :class:`~lit_vgrpo.policies.flow.FlowPolicy`.
        **options: See :class:`~lit_vgrpo.policies.base.Policy`.
    """

    pipeline_class: ClassVar[str] = "WanPipeline"
    pipeline_solver: ClassVar[str] = "unipc"
    solvers: ClassVar[tuple[str, ...]] = ("unipc", "euler", "dpm++")
    default_lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")

    def __init__(
        self,
        checkpoint: str,
        num_frames: Annotated[int, Range(1, 1001)] = 81,
        height: Annotated[int, Range(1, 16_384)] = 480,
        width: Annotated[int, Range(1, 16_384)] = 832,
        max_sequence_length: int = 512,
        **options: Any,
    ) -> None:
        super().__init__(checkpoint, max_sequence_length, height=height, width=width, **options)
        self.num_frames = num_frames

    @property
    def frames_per_second(self) -> int:
        """Rate of the videos that the model was trained on."""
        return 24 if self.pipeline.config.expand_timesteps else 16

    @property
    def pixels_per_latent(self) -> int:
        return int(self.pipeline.vae_scale_factor_spatial)

    def misfit(self, pipeline: Any) -> str | None:
        if pipeline.transformer_2 is not None or pipeline.transformer is None:
            return "has two networks, for early and late times. Only models with one are supported."
        config = pipeline.scheduler.config
        if config.get("use_flow_sigmas") and config.get("prediction_type") == "flow_prediction":
            return None
        return f"comes with {type(pipeline.scheduler).__name__}, but Wan needs UniPC with use_flow_sigmas."

    def find_latent_shape(self) -> tuple[int, ...]:
        factor, frames = int(self.pipeline.vae_scale_factor_temporal), self.num_frames
        if over := (frames - 1) % factor:
            raise LoadError(
                f"model.policy.num_frames={frames}: the VAE decodes 1 plus a multiple of {factor} frames. "
                f"Use {frames - over} or {frames - over + factor}."
            )
        config = self.network.config
        return config.in_channels, 1 + frames // factor, *self.latent_sides(0, config.patch_size[1])

    def _latent_affine(self) -> tuple[Tensor, Tensor]:
        return channel_statistics(self.pipeline.vae, self.device)

    def vae_decode(self, latents: Tensor) -> Tensor:
        """Return the videos ``(B, F, 3, H, W)`` in [-1, 1] of the VAE's latents ``(B, C, f, h, w)``."""
        return super().vae_decode(latents).transpose(1, 2)

    def vae_encode(self, images: Tensor) -> Tensor:
        """Return the network's latents of videos ``(B, F, 3, H, W)`` in [-1, 1]."""
        return super().vae_encode(images.transpose(1, 2))

    def prompt_limit(self) -> tuple[Any, int, str]:
        return self.pipeline.tokenizer, self.max_sequence_length, type(self.pipeline.text_encoder).__name__

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        length = {"device": self.device, "max_sequence_length": self.max_sequence_length}
        return {"tokens": self.pipeline.encode_prompt(prompts, None, False, **length)[0]}

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        timestep = t * self.pipeline.scheduler.config.num_train_timesteps
        if self.pipeline.config.expand_timesteps:  # one timestep per token
            timestep = timestep[:, None].expand(-1, self.image_tokens())
        return self.network(z, timestep, cond.tensors["tokens"], return_dict=False)[0]
