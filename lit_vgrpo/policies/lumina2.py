"""Lumina Image 2.0 (arXiv 2503.21758)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.types import MASK, Conditioning
from lit_vgrpo.policies.flow import ATTENTION, dynamic_mu
from lit_vgrpo.policies.language_model import LanguageModelPolicy


class Lumina2Policy(LanguageModelPolicy):
    """``Lumina2Pipeline`` as a policy on a rectified flow.

    Prompts follow the system prompt, negative prompts do not. Each row of the guided prediction is rescaled to
    its length in the conditional prediction (``cfg_normalization``, the pipeline's default).
    """

    pipeline_class: ClassVar[str] = "Lumina2Pipeline"
    default_lora_targets: ClassVar[tuple[str, ...]] = ATTENTION
    comfyui_names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("attn.to_q", "attn.to_k", "attn.to_v"), "attention.qkv"),
        "attn.to_out.0": "attention.out",
        **{f"feed_forward.linear_{number}": f"feed_forward.w{number}" for number in (1, 2, 3)},
        "norm1.linear": "adaLN_modulation.1",
        "norm_out.linear_1": "final_layer.adaLN_modulation.1",
        "norm_out.linear_2": "final_layer.linear",
        "time_caption_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_caption_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_caption_embed.caption_embedder.1": "cap_embedder.1",
    }
    """The names of the model's authors; diffusers' ``convert_lumina2_to_diffusers`` has the inverse."""

    def __init__(self, checkpoint: str, max_sequence_length: int = 256, **options: Any) -> None:
        super().__init__(checkpoint, max_sequence_length=max_sequence_length, **options)

    def misfit(self, pipeline: Any) -> str | None:
        if self.max_sequence_length >= (positions := pipeline.transformer.config.axes_lens[0]):
            return f"has {positions} text positions. Set model.policy.max_sequence_length={positions - 1} or less."
        return super().misfit(pipeline)

    def shift_mu(self, steps: int) -> float | None:
        return dynamic_mu(self.pipeline.scheduler, self.latent_shape[0])  # the pipeline counts channels, not tokens

    def templated(self, prompt: str) -> str:
        return f"{self.pipeline.system_prompt} <Prompt Start> {prompt}"

    def encode_negative(self) -> dict[str, Tensor]:
        return self.encode_texts([self.negative_prompt])

    def guided(self, with_prompt: Tensor, without: Tensor, guidance: Any) -> Tensor:
        combined = super().guided(with_prompt, without, guidance)
        return combined * with_prompt.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True)

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        mask = cond.tensors[MASK].bool()
        prediction = self.network(
            hidden_states=z,
            timestep=1 - t,
            encoder_hidden_states=cond.tensors["tokens"],
            encoder_attention_mask=torch.ones(mask.shape, dtype=torch.bool) if mask.is_meta else mask,
            return_dict=False,
        )[0]
        return -prediction
