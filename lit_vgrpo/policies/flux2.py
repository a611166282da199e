"""FLUX.2 [klein] and [dev], also with pictures to edit."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_vgrpo.core.ranges import PositiveInt, checked
from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.flow import PATCH, REFERENCE_LATENTS
from lit_vgrpo.policies.language_model import LanguageModelPolicy
from lit_vgrpo.policies.loading import INDEX, config_value
from lit_vgrpo.system.hub import LoadError

STEP = 10  # between the positions of images
LARGEST = 1024 * 1024  # pixels of a picture


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
        name = "is_distilled"
        known = self.pipeline.config.get(name) if self.loaded else config_value(self, INDEX, name)
        if not known:
            return None
        return (
            f"{self.checkpoint} is distilled (is_distilled in its {INDEX}) and cannot be guided. Use a scale of 1, or "
            "the base model that it was distilled from."
        )

    def pipeline_guidance(self, guidance: float, prompts: int) -> dict[str, Any]:
        if self.embeds_guidance:
            return super().pipeline_guidance(guidance, prompts)
        negative = self.encode_negative()["tokens"].expand(prompts, -1, -1)
        return {"guidance_scale": guidance, "negative_prompt_embeds": negative}

    @property
    def pixels_per_latent(self) -> int:
        return self.pipeline.vae_scale_factor * PATCH

    def find_latent_shape(self) -> tuple[int, ...]:
        height, width = self.latent_sides(self.pipeline.default_sample_size, PATCH)
        return self.network.config.in_channels, height // PATCH, width // PATCH

    def pipeline_latents(self, noise: Tensor) -> Tensor:
        return noise

    def _latent_affine(self) -> tuple[Tensor, Tensor]:
        vae = self.pipeline.vae
        variance = vae.bn.running_var + vae.config.batch_norm_eps
        mean, std = (values.reshape(1, -1, 1, 1) for values in (vae.bn.running_mean, variance.sqrt()))
        return 1 / std, mean

    def vae_latents(self, latents: Tensor) -> Tensor:
        return F.pixel_shuffle(super().vae_latents(latents), PATCH)

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
        return {"tokens": self.pipeline_embeddings(prompts)[0]}

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        tokens = cond.tensors["tokens"]
        rows, columns = z.shape[-2:]
        images = self.images(z, cond)
        prediction = self.network(
            hidden_states=torch.cat([image.flatten(2) for image in images], dim=2).transpose(1, 2),
            timestep=t,  # the network multiplies it by 1000
            guidance=cond.tensors.get("guidance"),
            encoder_hidden_states=tokens,
            txt_ids=_ids(0, 1, 1, tokens.shape[1], z.device)[None],
            img_ids=torch.cat(
                [_ids(STEP * i, image.shape[2], image.shape[3], 1, z.device) for i, image in enumerate(images)]
            )[None],  # with a batch dimension, which context parallelism needs
            return_dict=False,
        )[0]
        return prediction[:, : rows * columns].transpose(1, 2).unflatten(2, (rows, columns))


@checked
class Flux2EditPolicy(Flux2Policy):
    """``Flux2KleinPipeline`` called with pictures for each prompt; their latents follow the image's.

    The encoder does not see the pictures. The pipeline shrinks pictures of more than 1024 x 1024 pixels; such sizes are
    refused.

    Args:
        checkpoint: A hub name, a local pipeline folder, or ``shipped:...``.
        references: Pictures per prompt, up to four.
        **options: See :class:`~lit_vgrpo.policies.flow.FlowPolicy`.
    """

    edits: ClassVar[bool] = True
    pipeline_takes_one: ClassVar[bool] = True
    most_references: ClassVar[int] = 4

    def __init__(self, checkpoint: str, references: PositiveInt = 1, **options: Any) -> None:
        super().__init__(checkpoint, **options)
        if references > self.most_references:
            raise ValueError(f"references={references}: {type(self).__name__} takes at most {self.most_references}.")
        self.references = references

    def find_latent_shape(self) -> tuple[int, ...]:
        shape = super().find_latent_shape()
        if math.prod(shape[1:]) * self.pixels_per_latent**2 > LARGEST:
            raise LoadError("FLUX.2 shrinks pictures of more than 1024 x 1024 pixels. Set a smaller height and width.")
        return shape

    def encode_edits(self, prompts: list[str], pictures: Tensor) -> dict[str, Tensor]:
        latents = self.vae_encode(pictures.flatten(0, -4) * 2 - 1)
        return {**self.encode_prompts(prompts), REFERENCE_LATENTS: latents.unflatten(0, (len(prompts), -1))}


class Flux2DevPolicy(Flux2Policy):
    """``Flux2Pipeline`` (FLUX.2 [dev]) as a policy: the guidance scale is an input, and there is no negative prompt."""

    pipeline_class: ClassVar[str] = "Flux2Pipeline"
    takes_guidance: ClassVar[bool] = True

    @property
    def tokenizer(self) -> Any:
        return self.pipeline.tokenizer.tokenizer

    def templated(self, prompt: str) -> str:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        (messages,) = format_input([prompt], self.pipeline.system_message)
        return self.pipeline.tokenizer.apply_chat_template(messages, tokenize=False)


class Flux2DevEditPolicy(Flux2EditPolicy, Flux2DevPolicy):
    """``Flux2Pipeline`` called with up to six pictures for each prompt, see :class:`Flux2EditPolicy`."""

    most_references: ClassVar[int] = 6


def _ids(image: int, rows: int, columns: int, length: int, device: torch.device) -> Tensor:
    """Return each token's position, ``(rows x columns x length, 4)``: image, row, column, place in the prompt."""
    sides = (1, rows, columns, length)
    ids = torch.cartesian_prod(*(torch.arange(side, device=device) for side in sides))
    ids[:, 0] = image
    return ids
