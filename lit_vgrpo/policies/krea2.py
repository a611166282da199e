"""Krea 2."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.types import MASK, Conditioning
from lit_vgrpo.policies.flow import ATTENTION, PATCH
from lit_vgrpo.policies.flux import image_ids, packed, unpacked
from lit_vgrpo.policies.qwen_image import QwenVAEPolicy

DISTILLED_MU = 1.15  # the pipeline's


class Krea2Policy(QwenVAEPolicy):
    """``Krea2Pipeline`` as a policy on a rectified flow.

    As in every family, a guidance scale of 1 disables guidance; the pipeline's ``guidance_scale`` is one less. A
    prompt's embedding holds several layers of the encoder, ``(L, layers, D)``.
    """

    pipeline_class: ClassVar[str] = "Krea2Pipeline"
    packed: ClassVar[int] = PATCH
    default_lora_targets: ClassVar[tuple[str, ...]] = ATTENTION

    def pipeline_guidance(self, guidance: float, prompts: int) -> dict[str, Any]:
        return {"guidance_scale": guidance - 1, "negative_prompt": [self.negative_prompt] * prompts}

    def shift_mu(self, steps: int) -> float | None:
        return DISTILLED_MU if self.pipeline.config.is_distilled else None

    def tokens_dropped(self) -> int:
        return self.pipeline.prompt_template_encode_start_idx

    def templated(self, prompt: str) -> str:
        return self.pipeline.prompt_template_encode_prefix + prompt + self.pipeline.prompt_template_encode_suffix

    def token_ids(self, text: str) -> Tensor:
        """Return the ids of a text; a long one is truncated before its suffix."""
        suffix = self.pipeline.prompt_template_encode_suffix
        parts, room = (text.removesuffix(suffix), suffix), self.pipeline.prompt_template_encode_num_suffix_tokens
        length = self.max_sequence_length + self.tokens_dropped() - room
        ids = [self.tokenizer(part, max_length=length, truncation=True)["input_ids"] for part in parts]
        return torch.tensor([[*ids[0], *ids[1]]], device=self.device)

    def embedding(self, ids: Tensor) -> Tensor:
        hidden = self.pipeline.text_encoder(ids, output_hidden_states=True).hidden_states
        return torch.stack([hidden[layer][0] for layer in self.pipeline.text_encoder_select_layers], dim=1)

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        tokens, ids = cond.tensors["tokens"], image_ids(z)
        prediction = self.network(
            hidden_states=packed(z),
            encoder_hidden_states=tokens,
            timestep=t,
            position_ids=torch.cat([ids.new_zeros(tokens.shape[1], 3), ids]),
            encoder_attention_mask=cond.tensors[MASK].bool(),
            return_dict=False,
        )[0]
        return unpacked(prediction, z)
