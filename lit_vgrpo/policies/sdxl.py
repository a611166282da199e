"""Stable Diffusion XL (arXiv 2307.01952), its base model."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.unet import UNetPolicy


class SDXLPolicy(UNetPolicy):
    """``StableDiffusionXLPipeline`` as a policy on the variance-preserving path.

    The network is conditioned on an uncropped image of the sampled size, as in the pipeline by default. An empty
    negative prompt is treated as in the pipeline: zeros if ``force_zeros_for_empty_prompt`` is set.
    """

    pipeline_class: ClassVar[str] = "StableDiffusionXLPipeline"
    left_out: tuple[str, ...] = ()  # there is no safety checker

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        tokens, _, pooled, _ = self.pipeline_embeddings(prompts)
        return {"tokens": tokens, "pooled": pooled}

    def encode_negative(self) -> dict[str, Tensor]:
        negative = {"do_classifier_free_guidance": True, "negative_prompt": self.negative_prompt or None}
        _, tokens, _, pooled = self.pipeline_embeddings([""], **negative)
        return {"tokens": tokens, "pooled": pooled}

    def added_conditions(self, z: Tensor, cond: Conditioning) -> dict[str, Tensor]:
        factor = self.pipeline.vae_scale_factor
        height, width = (side * factor for side in z.shape[-2:])
        # original size, top left corner of the crop, target size
        sizes = torch.tensor([[height, width, 0, 0, height, width]], dtype=torch.float32, device=z.device)
        return {"text_embeds": cond.tensors["pooled"], "time_ids": sizes.expand(len(z), -1)}
