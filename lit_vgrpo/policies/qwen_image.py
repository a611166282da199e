"""Qwen-Image and, from version 2509 on, Qwen-Image-Edit (arXiv 2508.02324)."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.types import MASK, Conditioning, lengthened
from lit_vgrpo.policies.flow import PATCH, REFERENCE_LATENTS
from lit_vgrpo.policies.flux import packed, unpacked
from lit_vgrpo.policies.language_model import LanguageModelPolicy
from lit_vgrpo.policies.prompt_encoder import masked_rows

NEGATIVE, NEGATIVE_MASK = "reference_negative", "reference_negative_mask"
PICTURE = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"
READ = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
"""The processor's outputs that the pipeline passes to the encoder."""


class QwenVAEPolicy(LanguageModelPolicy, ABC):
    """A policy in the latent space of Qwen-Image's VAE, a video VAE that is used here with one frame."""

    def vae_decode(self, latents: Tensor) -> Tensor:
        return super().vae_decode(latents.unsqueeze(2))[:, :, 0]  # a video of one frame

    def vae_encode(self, images: Tensor) -> Tensor:
        scale, shift = self._latent_affine()
        return (self.pipeline.vae.encode(images.unsqueeze(2)).latent_dist.mode()[:, :, 0] - shift) * scale


class QwenImagePolicy(QwenVAEPolicy):
    """``QwenImagePipeline`` as a policy on a rectified flow.

    Guidance takes two passes, and each token of the guided prediction is rescaled to its length in the conditional
    prediction. The pipeline always does this.
    """

    pipeline_class: ClassVar[str] = "QwenImagePipeline"
    packed: ClassVar[int] = PATCH
    time_scale: ClassVar[int | None] = 1
    text_layer: ClassVar[int] = -1

    def unused_weights(self) -> tuple[str, ...]:
        last = f"transformer_blocks.{self.network.config.num_layers - 1}"
        return f"{last}.attn.to_add_out.*", f"{last}.txt_mlp.*"  # its text tokens are dropped

    def templated(self, prompt: str) -> str:
        return self.pipeline.prompt_template_encode.format(prompt)

    def tokens_dropped(self) -> int:
        return self.pipeline.prompt_template_encode_start_idx

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        images = self.images(z, cond)
        shapes = [(1, *(side // PATCH for side in image.shape[-2:])) for image in images]  # frames, rows, columns
        prediction = self.network(
            hidden_states=packed(*images),
            timestep=t,  # the network multiplies it by 1000
            encoder_hidden_states=cond.tensors["tokens"],
            encoder_hidden_states_mask=cond.tensors[MASK].bool(),
            img_shapes=[shapes] * len(z),
            return_dict=False,
        )[0]
        return unpacked(prediction, z)

    def guided(self, with_prompt: Tensor, without: Tensor, guidance: Any) -> Tensor:
        combined = super().guided(with_prompt, without, guidance)
        ratio = _token_norms(with_prompt) / _token_norms(combined)
        return combined * F.interpolate(ratio, scale_factor=PATCH, mode="nearest")


@checked
class QwenImageEditPolicy(QwenImagePolicy):
    """``QwenImageEditPlusPipeline`` as a policy on a rectified flow, with one or several pictures per prompt.

    The text encoder reads the pictures with the prompt and also with the negative prompt, whose embedding therefore
    depends on them. The pictures' latents follow the image's in the network's sequence, and the prediction for
    them is discarded. As in the pipeline, the encoder sees each picture at about 384 x 384 pixels and the VAE at about
    1024 x 1024, regardless of the images' size. A picture takes about 200 of the ``max_sequence_length`` tokens.

    Args:
        checkpoint: A hub name, a local pipeline folder, or ``shipped:...``.
        references: Pictures per prompt; the model was trained on up to three.
        **options: See :class:`~lit_vgrpo.policies.flow.FlowPolicy`.
    """

    pipeline_class: ClassVar[str] = "QwenImageEditPlusPipeline"
    edits: ClassVar[bool] = True
    pipeline_takes_one: ClassVar[bool] = True

    def __init__(self, checkpoint: str, references: Annotated[int, Range(1, 3)] = 1, **options: Any) -> None:
        super().__init__(checkpoint, **options)
        self.references = references

    def prompt_limit(self) -> tuple[Any, int, str]:
        tokenizer, _, encoder = super().prompt_limit()
        blank = self._resized(Image.new("RGB", (self.image_size or (1, 1))[::-1]))[0]
        inputs = self._inputs("", [blank] * self.references)
        taken = inputs["input_ids"].shape[1] - self.pipeline.prompt_template_encode_start_idx
        return tokenizer, self.max_sequence_length - taken, encoder

    def encode_edits(self, prompts: list[str], pictures: Tensor) -> dict[str, Tensor]:
        files = to_pil((torch.zeros(pictures.shape) if pictures.is_meta else pictures).flatten(0, -4))
        seen, large = zip(*map(self._resized, files), strict=True)
        number = len(files) // len(prompts)
        prompt_pictures = [seen[start : start + number] for start in range(0, len(files), number)]
        rows = [self._read(prompt, own) for prompt, own in zip(prompts, prompt_pictures, strict=True)]
        negative = masked_rows([self._read(self.negative_prompt, own) for own in prompt_pictures])
        return {
            **masked_rows(rows),
            REFERENCE_LATENTS: self.vae_encode(torch.cat(large).to(self.device)).unflatten(0, (-1, number)),
            NEGATIVE: lengthened(negative["tokens"], self.max_sequence_length),
            NEGATIVE_MASK: lengthened(negative[MASK], self.max_sequence_length),
        }

    def _resized(self, picture: Image.Image) -> tuple[Image.Image, Tensor]:
        """Return a picture as the encoder sees it, and as the VAE does, ``(1, 3, h, w)`` in [-1, 1]."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

        ratio, processor = picture.width / picture.height, self.pipeline.image_processor
        seen, large = (
            plus.calculate_dimensions(area, ratio) for area in (plus.CONDITION_IMAGE_SIZE, plus.VAE_IMAGE_SIZE)
        )
        return processor.resize(picture, seen[1], seen[0]), processor.preprocess(picture, large[1], large[0])

    def _inputs(self, prompt: str, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """Return the encoder's inputs for one prompt and its pictures."""
        pipeline = self.pipeline
        named = "".join(PICTURE.format(number) for number in range(1, len(pictures) + 1))
        text = pipeline.prompt_template_encode.format(named + prompt)
        return dict(pipeline.processor(text=[text], images=list(pictures), return_tensors="pt"))

    def _read(self, prompt: str, pictures: Sequence[Image.Image]) -> Tensor:
        """Return the last hidden states of the pictures' and a prompt's tokens, ``(L, D)``."""
        before = self.pipeline.prompt_template_encode_start_idx
        given = self._inputs(prompt, pictures)
        for name in ("input_ids", "attention_mask"):
            given[name] = given[name][:, : before + self.max_sequence_length]
        # without the vision tower on the meta device, where patches cannot be counted; the VAE takes far more memory
        names = ("input_ids",) if self.device.type == "meta" else READ
        inputs = {name: given[name].to(self.device) for name in names}
        tokens: Tensor = self.pipeline.text_encoder(**inputs, output_hidden_states=True).hidden_states[-1][0, before:]
        return tokens

    def negative_of(self, cond: Conditioning) -> Conditioning:
        negative = {"tokens": cond.tensors[NEGATIVE], MASK: cond.tensors[NEGATIVE_MASK]}
        return Conditioning({**cond.tensors, **negative})


def _token_norms(latents: Tensor) -> Tensor:
    """Return the norm of each token's 2 x 2 latents, ``(B, 1, h / 2, w / 2)``."""
    return F.pixel_unshuffle(latents, PATCH).norm(dim=1, keepdim=True)
