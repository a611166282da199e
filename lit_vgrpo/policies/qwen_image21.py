"""Qwen-Image-2.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.types import MASK, Conditioning
from lit_vgrpo.policies.flow import ATTENTION
from lit_vgrpo.policies.language_model import unpadded
from lit_vgrpo.policies.qwen_image import QwenVAEPolicy

SLOT = 4  # image tokens per place of the prompt's sequence


class QwenImage21Policy(QwenVAEPolicy):
    """``QwenImage21Pipeline`` as a policy on a rectified flow, without pictures to edit.

    The network places the image after its prompt, so padding would move the image. Each image therefore has a separate
    pass, as in a pipeline called with one prompt. The VAE's fourth channel, transparency, is dropped. The pipeline does
    not truncate prompts; here ``max_sequence_length`` does.
    """

    pipeline_class: ClassVar[str] = "QwenImage21Pipeline"
    pipeline_takes_one: ClassVar[bool] = True
    default_lora_targets: ClassVar[tuple[str, ...]] = ATTENTION
    patch: ClassVar[int] = 1
    time_scale: ClassVar[int | None] = 1
    text_layer: ClassVar[int] = -1

    def scheduler(self, solver: str, steps: int) -> Any:
        given = self.pipeline.config.sample_sigmas
        if given is not None and (solver, steps) != ("euler", len(given)):
            problem = f"solver={solver!r} and steps={steps} do not fit the sample_sigmas of {self.checkpoint}"
            raise ValueError(f"{problem}. Use euler and steps={len(given)}.")
        return super().scheduler(solver, steps)

    def sigmas(self, steps: int) -> Sequence[float] | None:
        return self.pipeline.config.sample_sigmas or super().sigmas(steps)

    @property
    def tokenizer(self) -> Any:
        return self.pipeline.processor.tokenizer

    def templated(self, prompt: str) -> str:
        return self.pipeline.prompt_template_t2i.format(prompt)

    def tokens_dropped(self) -> int:
        message = {"role": "system", "content": [{"type": "text", "text": self.pipeline.sys_prompt}]}
        return len(self.pipeline.processor.apply_chat_template([message], tokenize=True, return_dict=False)[0])

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        return super().encode_prompts([prompt or " " for prompt in prompts])  # as in the pipeline

    def embedding(self, ids: Tensor) -> Tensor:
        norm = self.pipeline.text_encoder.model.language_model.norm
        handle = norm.register_forward_hook(lambda module, given, output: given[0])  # the pipeline leaves it out
        try:
            return super().embedding(ids)
        finally:
            handle.remove()

    def vae_decode(self, latents: Tensor) -> Tensor:
        return super().vae_decode(latents)[:, :3]

    def vae_encode(self, images: Tensor) -> Tensor:
        return super().vae_encode(torch.cat([images, torch.ones_like(images[:, :1])], dim=1))

    def predict(self, z: Tensor, t: Tensor, cond: Conditioning) -> Tensor:
        texts = unpadded(cond.tensors["tokens"], cond.tensors[MASK])
        return torch.stack([self._one(*row) for row in zip(z, t, texts, strict=True)])

    def _one(self, z: Tensor, t: Tensor, text: Tensor) -> Tensor:
        """Return the prediction for one image ``(C, h, w)`` and the tokens of its prompt ``(L, D)``."""
        rows, columns = z.shape[1:]
        places = torch.arange(len(text) + rows * columns // SLOT, device="cpu" if z.is_meta else z.device)
        prediction = self.network(
            hidden_states=z.flatten(1).T[None],
            timestep=t[None],  # the network multiplies it by 1000
            encoder_hidden_states=text[None],
            img_shapes=[[(1, rows, columns)]],
            img_mask=(places >= len(text))[None],
            return_dict=False,
        )[0]
        return prediction[0, -rows * columns :].T.unflatten(1, (rows, columns))
