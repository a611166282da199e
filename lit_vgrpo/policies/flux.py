"""FLUX.1 (dev, schnell and derivatives)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.types import Conditioning
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.contract import Parts
from lit_vgrpo.policies.flow import FlowPolicy
from lit_vgrpo.policies.pipeline_folder import config_value
from lit_vgrpo.policies.vae import latent_sides
from lit_vgrpo.system.hub import LoadError

LONGEST_PROMPT = 512  # tokens
PATCH = 2  # latents per side packed into one token


@checked
class FluxPolicy(FlowPolicy):
    """``FluxPipeline`` as a policy on a rectified flow.

    FLUX.1-dev takes the guidance scale as an input: guidance needs no second pass, and there is no negative prompt. A
    FLUX network without that input uses two passes, like the pipeline's ``true_cfg_scale``.

    Args:
        checkpoint: a hub name, a local pipeline folder, or ``shipped:...``.
        max_sequence_length: length of the T5 block in tokens, at most 512; CLIP sees only the first 77.
        **options: see :class:`~lit_vgrpo.policies.base.Policy`.
    """

    pipeline_class: ClassVar[str] = "FluxPipeline"
    packed: ClassVar[int] = PATCH
    has_cache: ClassVar[bool] = True

    def __init__(
        self,
        checkpoint: str,
        max_sequence_length: Annotated[int, Range(1, LONGEST_PROMPT)] = LONGEST_PROMPT,
        **options: Any,
    ) -> None:
        super().__init__(checkpoint, **options)
        self.max_sequence_length = max_sequence_length

    # --- guidance --------------------------------------------------------------------------------------------------

    @property
    def embeds_guidance(self) -> bool:
        known = self.network.config.guidance_embeds if self.loaded else self._embeds_guidance_on_disk()
        return True if known is None else bool(known)

    def _embeds_guidance_on_disk(self) -> Any:
        """Return the value in the network's config, or ``None`` if it is not on this machine."""
        return config_value(self, f"{self.network_name}/config.json", "guidance_embeds")

    def check(self) -> list[str]:
        errors = super().check()
        if not errors and not self.loaded and self.negative_prompt and self._embeds_guidance_on_disk():
            return [self._unused_negative_prompt()]
        return errors

    def adopt(self, pipeline: Any) -> Policy:
        if self.negative_prompt and pipeline.transformer.config.guidance_embeds:
            raise LoadError(self._unused_negative_prompt())
        return super().adopt(pipeline)

    def _unused_negative_prompt(self) -> str:
        return (
            f"model.policy.negative_prompt={self.negative_prompt!r} has no effect: {self.checkpoint} takes guidance as "
            "an input, and there is no pass with a negative prompt. Leave it out."
        )

    def distilled_by(self, parts: Parts) -> str | None:
        network, scheduler = (parts.get(name) or {} for name in (self.network_name, "scheduler"))
        if network.get("guidance_embeds", True) or scheduler.get("use_dynamic_shifting", True):
            return None
        return "neither guidance_embeds nor use_dynamic_shifting, as in FLUX.1-schnell"

    # --- the model -------------------------------------------------------------------------------------------------

    def find_latent_shape(self) -> tuple[int, int, int]:
        factor = self.pipeline.vae_scale_factor
        default = self.pipeline.default_sample_size * factor  # the network's config has no size
        sides = latent_sides(self.height, self.width, default, factor, PATCH)
        return self.network.config.in_channels // PATCH**2, *sides

    def prompt_limit(self) -> tuple[Any, int, str]:
        encoder = type(self.pipeline.text_encoder_2).__name__  # CLIP only gives one vector, from the prompt's start
        return self.pipeline.tokenizer_2, self.max_sequence_length, encoder

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        tokens, pooled, _ = self.pipeline.encode_prompt(
            prompt=prompts, prompt_2=prompts, device=self.device, max_sequence_length=self.max_sequence_length
        )
        return {"tokens": tokens, "pooled": pooled}

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        tokens = cond.tensors["tokens"]
        sequence, ids = self.sequence(z, cond)
        prediction = self.network(
            hidden_states=sequence,
            timestep=t,  # the network multiplies it by 1000 itself
            guidance=cond.tensors.get("guidance"),
            encoder_hidden_states=tokens,
            pooled_projections=cond.tensors["pooled"],
            txt_ids=torch.zeros(tokens.shape[1], 3, device=z.device),
            img_ids=ids,
            return_dict=False,
        )[0]
        return unpacked(prediction, z)

    def sequence(self, z: Tensor, cond: Conditioning) -> tuple[Tensor, Tensor]:
        """Return the network's image tokens ``(B, N, C)``, those of ``z`` first, and their ids ``(N, 3)``."""
        return packed(z), image_ids(z, 0)


def packed(latents: Tensor) -> Tensor:
    """Return latents ``(B, C, h, w)`` as tokens ``(B, h / 2 x w / 2, 4 C)``."""
    return F.pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2)


def unpacked(tokens: Tensor, latents: Tensor) -> Tensor:
    """Return the first tokens ``(B, N, 4 C)`` as latents of the shape of ``latents``."""
    rows, columns = (side // PATCH for side in latents.shape[-2:])
    return F.pixel_shuffle(tokens[:, : rows * columns].transpose(1, 2).unflatten(2, (rows, columns)), PATCH)


def image_ids(latents: Tensor, image: int) -> Tensor:
    """Return the id of each token of latents ``(B, C, h, w)``, ``(h / 2 x w / 2, 3)``: the image's, row, column."""
    rows, columns = (side // PATCH for side in latents.shape[-2:])
    ids = torch.full((rows, columns, 3), float(image), device=latents.device)
    ids[..., 1] = torch.arange(rows, device=latents.device)[:, None]
    ids[..., 2] = torch.arange(columns, device=latents.device)
    return ids.flatten(0, 1)
