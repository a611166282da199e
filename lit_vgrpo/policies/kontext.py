"""FLUX.1 Kontext (arXiv 2506.15742): edits a picture."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.flux import FluxPolicy, image_ids, packed

LATENTS = "reference_latents"


class KontextPolicy(FluxPolicy):
    """``FluxKontextPipeline`` as a policy on a rectified flow.

    Each prompt's row has a picture to edit, of the images' size. Its latents follow the image's in the network's
    sequence, with another id, and the prediction for them is cut off.
    """

    pipeline_class: ClassVar[str] = "FluxKontextPipeline"
    has_cache: ClassVar[bool] = False
    edits: ClassVar[bool] = True

    def encode_edits(self, prompts: list[str], pictures: Tensor) -> dict[str, Tensor]:
        return {**self.encode_prompts(prompts), LATENTS: self.vae_encode(pictures * 2 - 1)}

    def pipeline_references(self, pictures: Tensor) -> dict[str, Any]:
        height, width = pictures.shape[-2:]
        return {"image": pictures, "max_area": height * width, "_auto_resize": False}  # it would resize both

    def sequence(self, z: Tensor, cond: Conditioning) -> tuple[Tensor, Tensor]:
        reference = cond.tensors[LATENTS]
        tokens = torch.cat([packed(z), packed(reference)], dim=1)
        return tokens, torch.cat([image_ids(z, 0), image_ids(reference, 1)])
