"""Qwen-Image-Edit (arXiv 2508.02324), from version 2509 on: edits a picture."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from lit_vgrpo.core.pixels import to_pil
from lit_vgrpo.core.types import MASK, Conditioning, lengthened
from lit_vgrpo.policies.flux import packed
from lit_vgrpo.policies.prompt_encoder import masked_rows
from lit_vgrpo.policies.qwen_image import QwenImagePolicy, Shape, token_shape

LATENTS, NEGATIVE, NEGATIVE_MASK = "reference_latents", "reference_negative", "reference_negative_mask"
PICTURE = "Picture 1: <|vision_start|><|image_pad|><|vision_end|>"
READ = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
"""The processor's outputs that the pipeline hands to the encoder."""


class QwenImageEditPolicy(QwenImagePolicy):
    """``QwenImageEditPlusPipeline`` as a policy on a rectified flow, with one picture per prompt.

    The text encoder reads the picture with the prompt, and with the negative prompt too, whose embedding therefore
    belongs to the picture. The picture's latents follow the image's in the network's sequence, and the prediction for
    them is cut off. As in the pipeline, the encoder sees about 384 x 384 pixels of the picture and the VAE about
    1024 x 1024, whatever the images' size. The picture takes about 200 of a prompt's ``max_sequence_length`` tokens.
    """

    pipeline_class: ClassVar[str] = "QwenImageEditPlusPipeline"
    edits: ClassVar[bool] = True
    pipeline_takes_one: ClassVar[bool] = True

    def prompt_limit(self) -> tuple[Any, int, str]:
        tokenizer, _, encoder = super().prompt_limit()
        blank = self._resized(Image.new("RGB", (self.image_size or (1, 1))[::-1]))[0]
        taken = self._inputs("", blank)["input_ids"].shape[1] - self.pipeline.prompt_template_encode_start_idx
        return tokenizer, self.max_sequence_length - taken, encoder

    def encode_edits(self, prompts: list[str], pictures: Tensor) -> dict[str, Tensor]:
        files = to_pil(torch.zeros(pictures.shape) if pictures.is_meta else pictures)
        seen, large = zip(*map(self._resized, files), strict=True)
        rows = [self._read(prompt, picture) for prompt, picture in zip(prompts, seen, strict=True)]
        negative = masked_rows([self._read(self.negative_prompt, picture) for picture in seen])
        return {
            **masked_rows(rows),
            LATENTS: self.vae_encode(torch.cat(large).to(self.device)),
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

    def _inputs(self, prompt: str, picture: Image.Image) -> dict[str, Tensor]:
        """Return the encoder's inputs for one prompt and picture, one row each."""
        pipeline = self.pipeline
        text = pipeline.prompt_template_encode.format(PICTURE + prompt)
        return dict(pipeline.processor(text=[text], images=[picture], return_tensors="pt"))

    def _read(self, prompt: str, picture: Image.Image) -> Tensor:
        """Return the last hidden states of a picture's and a prompt's tokens, ``(L, D)``."""
        before = self.pipeline.prompt_template_encode_start_idx
        given = self._inputs(prompt, picture)
        for name in ("input_ids", "attention_mask"):
            given[name] = given[name][:, : before + self.max_sequence_length]
        # without the vision tower on the meta device, which has no counts of patches; the VAE takes far more than it
        names = ("input_ids",) if self.device.type == "meta" else READ
        inputs = {name: given[name].to(self.device) for name in names}
        tokens: Tensor = self.pipeline.text_encoder(**inputs, output_hidden_states=True).hidden_states[-1][0, before:]
        return tokens

    def negative_of(self, cond: Conditioning) -> Conditioning:
        own = {"tokens": cond.tensors[NEGATIVE], MASK: cond.tensors[NEGATIVE_MASK]}
        return Conditioning({**cond.tensors, **own})

    def pipeline_references(self, pictures: Tensor) -> dict[str, Any]:
        return {"image": to_pil(pictures)}

    def sequence(self, z: Tensor, cond: Conditioning) -> tuple[Tensor, list[Shape]]:
        reference = cond.tensors[LATENTS]
        return torch.cat([packed(z), packed(reference)], dim=1), [token_shape(z), token_shape(reference)]
