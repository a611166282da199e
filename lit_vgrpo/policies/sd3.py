"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from torch import Tensor

from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.flow import PATCH, FlowPolicy
from lit_vgrpo.system.hub import LoadError


@checked
class SD3Policy(FlowPolicy):
    """``StableDiffusion3Pipeline`` (SD3 medium, SD3.5 medium and large) as a policy on a rectified flow.

    Args:
        checkpoint: A hub name, a local pipeline folder, or ``shipped:...``.
        max_sequence_length: Length of the T5 block in tokens; without T5 it is a block of zeros of that length.
        use_t5: ``False`` omits the T5 encoder and saves its memory.
        **options: See :class:`~lit_vgrpo.policies.base.Policy`.
    """

    pipeline_class: ClassVar[str] = "StableDiffusion3Pipeline"
    may_lack: ClassVar[tuple[str, ...]] = ("text_encoder_3",)

    def __init__(
        self,
        checkpoint: str,
        max_sequence_length: Annotated[int, Range(1, 512)] = 256,
        use_t5: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(checkpoint, max_sequence_length=max_sequence_length, **options)
        self.use_t5 = use_t5
        self.left_out = () if use_t5 else ("text_encoder_3", "tokenizer_3")

    def prompt_limit(self) -> tuple[Any, int, str]:
        clip, t5 = Policy.prompt_limit(self), self.pipeline.text_encoder_3
        if t5 is None or self.max_sequence_length >= clip[1]:
            return clip
        return self.pipeline.tokenizer_3, self.max_sequence_length, type(t5).__name__

    def find_latent_shape(self) -> tuple[int, ...]:
        shape = super().find_latent_shape()
        if max(shape[1:]) > (most := self.network.config.pos_embed_max_size * PATCH):
            pixels = most * self.pipeline.vae_scale_factor
            raise LoadError(f"{self.size_in}.height and width of {self.checkpoint} are at most {pixels} pixels.")
        return shape

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        tokens, _, pooled, _ = self.pipeline_embeddings(prompts)
        return {"tokens": tokens, "pooled": pooled}

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        return self.network(
            hidden_states=z,
            timestep=t * self.pipeline.scheduler.config.num_train_timesteps,
            encoder_hidden_states=cond.tensors["tokens"],
            pooled_projections=cond.tensors["pooled"],
            return_dict=False,
        )[0]

    def sigmas(self, steps: int) -> None:
        return None
