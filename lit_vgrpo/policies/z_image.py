"""Z-Image (arXiv 2511.22699)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.types import MASK, Conditioning
from lit_vgrpo.policies.flow import PATCH, FlowPolicy
from lit_vgrpo.policies.prompt_encoder import masked_rows

DEFAULT_SIDE = 1024  # pixels, as in the pipeline


class ZImagePolicy(FlowPolicy):
    """``ZImagePipeline`` as a policy on a rectified flow.

    The guidance scale is as in every family: 1 disables it. The pipeline's ``guidance_scale`` is one less.
    """

    pipeline_class: ClassVar[str] = "ZImagePipeline"
    default_lora_targets: ClassVar[tuple[str, ...]] = (
        *("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
    )

    def find_latent_shape(self) -> tuple[int, int, int]:
        sides = self.latent_sides(DEFAULT_SIDE // self.pipeline.vae_scale_factor, PATCH)
        return self.network.config.in_channels, *sides

    def pipeline_guidance(self, guidance: float, prompts: int) -> dict[str, Any]:
        return {"guidance_scale": guidance - 1, "negative_prompt": [self.negative_prompt] * prompts}

    def prompt_length(self) -> int:
        return self.max_sequence_length

    def _templated(self, prompt: str) -> str:
        message = {"role": "user", "content": prompt}
        return self.pipeline.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )

    def prompt_limit(self) -> tuple[Any, int, str]:
        tokenizer = self.pipeline.tokenizer
        limit = self.max_sequence_length - len(tokenizer(self._templated(""))["input_ids"])
        return tokenizer, limit, type(self.pipeline.text_encoder).__name__

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        return masked_rows([self._encoded(prompt) for prompt in prompts])

    def _encoded(self, prompt: str) -> Tensor:
        """Return the penultimate hidden states of a prompt's tokens, ``(L, D)``; the encoder never sees padding."""
        ids = self.pipeline.tokenizer(
            self._templated(prompt), max_length=self.max_sequence_length, truncation=True, return_tensors="pt"
        )["input_ids"]
        return self.pipeline.text_encoder(ids.to(self.device), output_hidden_states=True).hidden_states[-2][0]

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        prediction = self.network(
            list(z.unsqueeze(2)),  # one frame each
            1 - t,
            _texts(cond),
            return_dict=False,
        )[0]
        return -torch.stack(prediction).squeeze(2)


def _texts(cond: Conditioning) -> list[Tensor]:
    """Return each prompt's tokens ``(L, D)``; on the meta device, where a mask has no values, with the padding."""
    tokens, mask = cond.tensors["tokens"], cond.tensors[MASK]
    if mask.is_meta:
        return list(tokens)
    lengths = mask.sum(dim=1).int().tolist()
    return [row[:length] for row, length in zip(tokens, lengths, strict=True)]
