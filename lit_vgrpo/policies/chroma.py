"""Chroma: FLUX.1 [schnell] with masked prompts, without a pooled embedding or a guidance input."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.base import PutStart
from lit_vgrpo.policies.flow import FlowPolicy
from lit_vgrpo.policies.flux import FluxPolicy

MASK = "prompt_mask"  # not core.types.MASK: the network also reads the padding


class ChromaPolicy(FluxPolicy):
    """``ChromaPipeline`` as a policy on a rectified flow.

    Guidance takes two passes. As in the pipeline, attention adds the mask to its logits: this favours a prompt's tokens
    and one padding token, and hides none.
    """

    pipeline_class: ClassVar[str] = "ChromaPipeline"
    takes_guidance: ClassVar[bool] = False

    def adopt(self, pipeline: Any, put_start: PutStart | None = None) -> ChromaPolicy:
        super().adopt(pipeline, put_start)
        if self.gradient_checkpointing:
            self.network.enable_gradient_checkpointing(self._checkpointed)
        return self

    def _checkpointed(self, block: nn.Module, *given: Any) -> Any:
        """Run a block that is recomputed later, with the mask, which diffusers 0.42.1 omits in single blocks."""
        single = type(block).__name__ == "ChromaSingleTransformerBlock"
        return checkpoint(block.__call__, *given, *((self._mask,) if single else ()), use_reentrant=False)

    prompt_limit = FlowPolicy.prompt_limit

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        tokens, _, mask, *_ = self.pipeline_embeddings(prompts)
        return {"tokens": tokens, MASK: mask}

    def other_inputs(self, cond: Conditioning, image_tokens: int) -> dict[str, Any]:
        mask = cond.tensors[MASK]
        self._mask = torch.cat([mask, mask.new_ones(len(mask), image_tokens)], dim=1)
        return {"attention_mask": self._mask}
