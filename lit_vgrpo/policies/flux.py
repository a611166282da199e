"""FLUX.1 (dev, schnell and derivatives) and FLUX.1 Kontext (arXiv 2506.15742), which edits a picture."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.flow import PATCH, REFERENCE_LATENTS, FlowPolicy


class FluxPolicy(FlowPolicy):
    """``FluxPipeline`` as a policy on a rectified flow.

    FLUX.1-dev takes the guidance scale as an input: guidance needs no second pass, and there is no negative prompt. A
    FLUX network without that input uses two passes, like the pipeline's ``true_cfg_scale``.
    """

    pipeline_class: ClassVar[str] = "FluxPipeline"
    packed: ClassVar[int] = PATCH
    time_scale: ClassVar[int | None] = 1000
    takes_guidance: ClassVar[bool] = True

    def prompt_limit(self) -> tuple[Any, int, str]:
        encoder = type(self.pipeline.text_encoder_2).__name__  # CLIP gives only one vector, from the prompt's start
        return self.pipeline.tokenizer_2, self.max_sequence_length, encoder

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        tokens, pooled, _ = self.pipeline_embeddings(prompts)
        return {"tokens": tokens, "pooled": pooled}

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        tokens, images = cond.tensors["tokens"], self.images(z, cond)
        ids = image_ids(*images)
        prediction = self.network(
            hidden_states=packed(*images),
            timestep=t,  # the network multiplies it by 1000
            encoder_hidden_states=tokens,
            txt_ids=torch.zeros(tokens.shape[1], 3, device=z.device),
            img_ids=ids,
            return_dict=False,
            **self.other_inputs(cond, len(ids)),
        )[0]
        return unpacked(prediction, z)

    def other_inputs(self, cond: Conditioning, image_tokens: int) -> dict[str, Any]:
        """Return the inputs that only some of these networks take."""
        return {"guidance": cond.tensors.get("guidance"), "pooled_projections": cond.tensors["pooled"]}


class KontextPolicy(FluxPolicy):
    """``FluxKontextPipeline`` as a policy on a rectified flow.

    Each prompt's row has a picture to edit, of the images' size. Its latents follow the image's in the network's
    sequence, with another id, and the prediction for them is discarded.
    """

    pipeline_class: ClassVar[str] = "FluxKontextPipeline"
    edits: ClassVar[bool] = True

    def encode_edits(self, prompts: list[str], pictures: Tensor) -> dict[str, Tensor]:
        return {**self.encode_prompts(prompts), REFERENCE_LATENTS: self.vae_encode(pictures * 2 - 1)}

    def pipeline_references(self, pictures: Tensor) -> dict[str, Any]:
        height, width = pictures.shape[-2:]
        return {"image": pictures, "max_area": height * width, "_auto_resize": False}  # it would resize both


def packed(*images: Tensor) -> Tensor:
    """Return latents ``(B, C, h, w)`` as tokens ``(B, h / 2 x w / 2, 4 C)``, those of several one after another."""
    tokens = [F.pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2) for latents in images]
    return torch.cat(tokens, dim=1) if len(tokens) > 1 else tokens[0]


def unpacked(tokens: Tensor, latents: Tensor) -> Tensor:
    """Return the first tokens ``(B, N, 4 C)`` as latents of the shape of ``latents``."""
    rows, columns = (side // PATCH for side in latents.shape[-2:])
    return F.pixel_shuffle(tokens[:, : rows * columns].transpose(1, 2).unflatten(2, (rows, columns)), PATCH)


def image_ids(*images: Tensor) -> Tensor:
    """Return the id of each token of latents ``(B, C, h, w)``, ``(N, 3)``: the image's number, row, column."""
    ids = []
    for number, latents in enumerate(images):
        sides = (torch.arange(float(side // PATCH), device=latents.device) for side in latents.shape[-2:])
        ids.append(torch.cartesian_prod(torch.full((1,), float(number), device=latents.device), *sides))
    return torch.cat(ids)
