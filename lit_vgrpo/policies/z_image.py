"""Z-Image (arXiv 2511.22699)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.types import MASK, Conditioning
from lit_vgrpo.policies.language_model import LanguageModelPolicy, unpadded


class ZImagePolicy(LanguageModelPolicy):
    """``ZImagePipeline`` as a policy on a rectified flow.

    The guidance scale is as in every family: 1 disables it. The pipeline's ``guidance_scale`` is one less.
    """

    pipeline_class: ClassVar[str] = "ZImagePipeline"
    default_lora_targets: ClassVar[tuple[str, ...]] = (
        *("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
    )

    def pipeline_guidance(self, guidance: float, prompts: int) -> dict[str, Any]:
        return {"guidance_scale": guidance - 1, "negative_prompt": [self.negative_prompt] * prompts}

    def templated(self, prompt: str) -> str:
        message = {"role": "user", "content": prompt}
        return self.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        prediction = self.network(
            list(z.unsqueeze(2)),  # one frame each
            1 - t,
            unpadded(cond.tensors["tokens"], cond.tensors[MASK]),
            return_dict=False,
        )[0]
        return -torch.stack(prediction).squeeze(2)
