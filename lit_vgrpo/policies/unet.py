"""Stable Diffusion 1.x and 2.x (arXiv 2112.10752)."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from torch import Tensor

from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.latent_diffusion import LatentDiffusionPolicy


class UNetPolicy(LatentDiffusionPolicy):
    """``StableDiffusionPipeline`` (SD 1.5, SD 2.1) as a policy on the variance-preserving path.

    The safety checker is left out: rewards must see what the policy samples.
    """

    pipeline_class: ClassVar[str] = "StableDiffusionPipeline"

    def null_components(self, folder: Path) -> dict[str, None]:
        return {**super().null_components(folder), "safety_checker": None, "feature_extractor": None}

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        tokens, _ = self.pipeline.encode_prompt(
            prompts, device=self.device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        return {"tokens": tokens}

    def added_conditions(self, z: Tensor, cond: Conditioning) -> None:
        return None
