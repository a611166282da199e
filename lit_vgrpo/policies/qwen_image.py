"""Qwen-Image (arXiv 2508.02324)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_vgrpo.core.types import MASK, Conditioning
from lit_vgrpo.policies.flow import PATCH, FlowPolicy
from lit_vgrpo.policies.flux import packed, unpacked
from lit_vgrpo.policies.prompt_encoder import masked_rows

Shape = tuple[int, int, int]


class QwenImagePolicy(FlowPolicy):
    """``QwenImagePipeline`` as a policy on a rectified flow.

    Guidance takes two passes, and each token of the guided prediction is rescaled to the length that it has with the
    prompt alone, as in the pipeline, which cannot switch that off.
    """

    pipeline_class: ClassVar[str] = "QwenImagePipeline"
    packed: ClassVar[int] = PATCH

    def unused_weights(self) -> tuple[str, ...]:
        last = f"transformer_blocks.{self.network.config.num_layers - 1}"
        return f"{last}.attn.to_add_out.*", f"{last}.txt_mlp.*"  # its text tokens are dropped

    def _latent_affine(self) -> tuple[Tensor, Tensor]:
        config = self.pipeline.vae.config
        mean, std = (
            torch.tensor(values, device=self.device).reshape(1, -1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        return 1 / std, mean

    def vae_decode(self, latents: Tensor) -> Tensor:
        scale, shift = self._latent_affine()
        video = (latents / scale + shift).unsqueeze(2)  # one frame
        return self.pipeline.vae.decode(video, return_dict=False)[0][:, :, 0]

    def vae_encode(self, images: Tensor) -> Tensor:
        scale, shift = self._latent_affine()
        return (self.pipeline.vae.encode(images.unsqueeze(2)).latent_dist.mode()[:, :, 0] - shift) * scale

    def prompt_length(self) -> int:
        return self.max_sequence_length

    def prompt_limit(self) -> tuple[Any, int, str]:
        pipeline = self.pipeline
        after = pipeline.tokenizer(pipeline.prompt_template_encode.partition("{}")[2])["input_ids"]
        return pipeline.tokenizer, self.max_sequence_length - len(after), type(pipeline.text_encoder).__name__

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        return masked_rows([self._encoded(prompt) for prompt in prompts])

    def _encoded(self, prompt: str) -> Tensor:
        """Return the last hidden states of a prompt's tokens without the system prompt's, ``(L, D)``.

        The encoder is causal, so what is cut at the end of a long prompt changes no token before.
        """
        pipeline = self.pipeline
        before = pipeline.prompt_template_encode_start_idx
        ids = pipeline.tokenizer(
            pipeline.prompt_template_encode.format(prompt),
            max_length=before + self.max_sequence_length,
            truncation=True,
            return_tensors="pt",
        )["input_ids"]
        encoded = pipeline.text_encoder(ids.to(self.device), output_hidden_states=True)
        return encoded.hidden_states[-1][0, before:]

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        sequence, shapes = self.sequence(z, cond)
        prediction = self.network(
            hidden_states=sequence,
            timestep=t,  # the network multiplies it by 1000 itself
            encoder_hidden_states=cond.tensors["tokens"],
            encoder_hidden_states_mask=cond.tensors[MASK].bool(),
            img_shapes=[shapes] * len(z),
            return_dict=False,
        )[0]
        return unpacked(prediction, z)

    def sequence(self, z: Tensor, cond: Conditioning) -> tuple[Tensor, list[Shape]]:
        """Return the network's image tokens ``(B, N, C)``, those of ``z`` first, and the shape of each image."""
        return packed(z), [token_shape(z)]

    def guided(self, with_prompt: Tensor, without: Tensor, guidance: float) -> Tensor:
        combined = super().guided(with_prompt, without, guidance)
        ratio = _token_norms(with_prompt) / _token_norms(combined)
        return combined * F.interpolate(ratio, scale_factor=PATCH, mode="nearest")


def token_shape(latents: Tensor) -> Shape:
    """Return the shape in tokens of latents ``(B, C, h, w)``: 1 frame, rows, columns."""
    rows, columns = (side // PATCH for side in latents.shape[-2:])
    return 1, rows, columns


def _token_norms(latents: Tensor) -> Tensor:
    """Return the norm of each token's 2 x 2 latents, ``(B, 1, h / 2, w / 2)``."""
    return F.pixel_unshuffle(latents, PATCH).norm(dim=1, keepdim=True)
