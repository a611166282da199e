"""FLUX.2 [klein]."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.flow import PATCH
from lit_vgrpo.policies.language_model import LanguageModelPolicy
from lit_vgrpo.policies.loading import config_value
from lit_vgrpo.policies.pipeline import INDEX

TEXT_LAYERS = (9, 18, 27)  # of the encoder's hidden states, as in the pipeline


class Flux2Policy(LanguageModelPolicy):
    """``Flux2KleinPipeline`` as a policy on a rectified flow.

    A latent is 2 x 2 of the VAE's, scaled by the statistics of the VAE's batch norm. The padding of short prompts is
    part of the network's input, as in the pipeline. Distilled models refuse guidance.
    """

    pipeline_class: ClassVar[str] = "Flux2KleinPipeline"
    packed: ClassVar[int] = PATCH
    patch: ClassVar[int] = 1
    default_lora_targets: ClassVar[tuple[str, ...]] = (
        *LanguageModelPolicy.default_lora_targets,
        "attn.to_qkv_mlp_proj",  # of the blocks with a single stream
    )

    def guidance_error(self) -> str | None:
        known = self.pipeline.config.is_distilled if self.loaded else config_value(self, INDEX, "is_distilled")
        if not known:
            return None
        return (
            f"{self.checkpoint} is distilled (is_distilled in its {INDEX}) and cannot be guided. Use a scale of 1, or "
            "the base model that it was distilled from."
        )

    def pipeline_guidance(self, guidance: float, prompts: int) -> dict[str, Any]:
        negative = self.encode_negative()["tokens"].expand(prompts, -1, -1)
        return {"guidance_scale": guidance, "negative_prompt_embeds": negative}

    @property
    def pixels_per_latent(self) -> int:
        return self.pipeline.vae_scale_factor * PATCH

    def find_latent_shape(self) -> tuple[int, int, int]:
        height, width = self.latent_sides(self.pipeline.default_sample_size, PATCH)
        return self.network.config.in_channels, height // PATCH, width // PATCH

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        return noise

    def _latent_affine(self) -> tuple[Tensor, Tensor]:
        vae = self.pipeline.vae
        variance = vae.bn.running_var + vae.config.batch_norm_eps
        mean, std = (values.reshape(1, -1, 1, 1) for values in (vae.bn.running_mean, variance.sqrt()))
        return 1 / std, mean

    def vae_decode(self, latents: Tensor) -> Tensor:
        scale, shift = self._latent_affine()
        return self.pipeline.vae.decode(F.pixel_shuffle(latents / scale + shift, PATCH), return_dict=False)[0]

    def vae_encode(self, images: Tensor) -> Tensor:
        scale, shift = self._latent_affine()
        latents = F.pixel_unshuffle(self.pipeline.vae.encode(images).latent_dist.mode(), PATCH)
        return (latents - shift) * scale

    def shift_mu(self, steps: int) -> float:
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        return compute_empirical_mu(self.image_tokens(), steps)

    def prompt_length(self) -> None:
        return None  # the network reads the padding

    def templated(self, prompt: str) -> str:
        message = {"role": "user", "content": prompt}
        return self.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        tokens, _ = self.pipeline.encode_prompt(
            prompts,
            device=self.device,
            max_sequence_length=self.max_sequence_length,
            text_encoder_out_layers=TEXT_LAYERS,
        )
        return {"tokens": tokens}

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        tokens = cond.tensors["tokens"]
        rows, columns = z.shape[-2:]
        prediction = self.network(
            hidden_states=z.flatten(2).transpose(1, 2),
            timestep=t,  # the network multiplies it by 1000
            encoder_hidden_states=tokens,
            txt_ids=_ids(1, 1, tokens.shape[1], z.device),
            img_ids=_ids(rows, columns, 1, z.device),
            return_dict=False,
        )[0]
        return prediction.transpose(1, 2).unflatten(2, (rows, columns))


def _ids(rows: int, columns: int, length: int, device: torch.device) -> Tensor:
    """Return each token's position, ``(rows x columns x length, 4)``: 0, row, column, place in the prompt."""
    sides = (1, rows, columns, length)
    return torch.cartesian_prod(*(torch.arange(side, device=device) for side in sides))
