"""PickScore: a CLIP model trained on people's choices between two pictures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from PIL import Image
from torch import Tensor

from lit_vgrpo.hub import LoadError, explain_unloadable, local_folder, quiet_libraries, source_of
from lit_vgrpo.rewards.base import Reward, to_uint8

if TYPE_CHECKING:
    from transformers import CLIPModel, CLIPProcessor

HUB_CHECKPOINT = "yuvalkirstain/PickScore_v1"
HUB_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # the PickScore repository holds no processor
SCALE = 26.0
Dtype = Literal["float32", "bfloat16", "float16"]


class PickScore(Reward):
    """CLIP similarity of picture and prompt: ``exp(logit_scale) * cos / 26``, near 1 for a picture that people like.

    The tables of papers often give the bare cosine instead, about 0.2.

    Args:
        checkpoint: hub name or local folder of a ``CLIPModel``.
        processor: hub name or local folder of its ``CLIPProcessor``; None takes the published one for the published
            checkpoint, else ``checkpoint``.
        batch_size: most images in one forward pass.
        dtype: of the weights; scores are float32.
        device: where the model runs; ``"auto"`` follows the images.

    Source:
        arXiv 2305.01569; the division by 26 as in Flow-GRPO (arXiv 2505.05470).
    """

    name = "pickscore"

    def __init__(
        self,
        checkpoint: str = HUB_CHECKPOINT,
        processor: str | None = None,
        batch_size: int = 16,
        dtype: Dtype = "float32",
        device: str = "auto",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is too small. Use 1 or more.")
        if dtype not in get_args(Dtype):
            raise ValueError(f"dtype={dtype!r} is unknown. Use one of: {', '.join(get_args(Dtype))}.")
        self.checkpoint = checkpoint
        self.processor = processor or (HUB_PROCESSOR if checkpoint == HUB_CHECKPOINT else checkpoint)
        self.batch_size = batch_size
        self.dtype = dtype
        self.device = device
        self._model: CLIPModel | None = None
        self._processor: CLIPProcessor | None = None

    def check(self) -> list[str]:
        """A missing folder or file, a model of another family, or weights that are neither cached nor reachable."""
        model_fault = explain_unloadable(self.checkpoint, "config.json", "PickScore.checkpoint")
        faults = [model_fault or self._family_fault()]
        if not (model_fault and self.processor == self.checkpoint):
            # the one file that a saved processor has in transformers 4 and in transformers 5
            faults.append(explain_unloadable(self.processor, "tokenizer_config.json", "PickScore.processor"))
        return [fault for fault in faults if fault]

    def load(self) -> None:
        """Load model and processor.

        Raises:
            LoadError: one of the faults of :meth:`check`, or files that do not hold what they should.
        """
        if self._model is not None:
            return
        for fault in self.check():
            raise LoadError(fault)
        from transformers import CLIPModel, CLIPProcessor

        try:
            with quiet_libraries():
                self._processor = CLIPProcessor.from_pretrained(source_of(self.processor))
        except (OSError, ValueError) as error:
            raise LoadError(_unloadable("processor", self.processor, error)) from error
        try:
            with quiet_libraries():
                model = CLIPModel.from_pretrained(source_of(self.checkpoint), dtype=getattr(torch, self.dtype))
        except (OSError, ValueError) as error:
            raise LoadError(_unloadable("checkpoint", self.checkpoint, error)) from error
        self._model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        self.load()
        assert self._model is not None
        cast(torch.nn.Module, self._model).to(images.device if self.device == "auto" else self.device)
        pictures = to_uint8(images).permute(0, 2, 3, 1).contiguous().cpu().numpy()
        scores = [
            self._score(list(pictures[start : start + self.batch_size]), prompts[start : start + self.batch_size])
            for start in range(0, len(prompts), self.batch_size)
        ]
        return torch.cat(scores) if scores else torch.zeros(0)

    def _score(self, pictures: list[Any], prompts: list[str]) -> Tensor:
        assert self._model is not None
        assert self._processor is not None
        model, device = self._model, self._model.device
        # PIL images: the processor takes a float tensor for one that is still to be divided by 255
        pixels = self._processor(images=[Image.fromarray(picture) for picture in pictures], return_tensors="pt")
        distinct = list(dict.fromkeys(prompts))  # a group shares its prompt
        text_config = cast(Any, model.config.text_config)
        length = min(self._processor.tokenizer.model_max_length, text_config.max_position_embeddings)
        text = self._processor(
            text=distinct, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        image_embeds = _unit(model.get_image_features(pixels["pixel_values"].to(device, model.dtype)))
        text_embeds = _unit(
            model.get_text_features(text["input_ids"].to(device), attention_mask=text["attention_mask"].to(device))
        )
        per_image = text_embeds[[distinct.index(prompt) for prompt in prompts]]
        return model.logit_scale.float().exp() * (image_embeds * per_image).sum(-1) / SCALE

    def _family_fault(self) -> str | None:
        folder = local_folder(self.checkpoint)
        if folder is None:
            return None
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            return f"{folder / 'config.json'} is not JSON ({error}). Set checkpoint to a folder of a CLIP model."
        family = config.get("model_type") if isinstance(config, dict) else None
        if family != "clip":
            return f"{folder} holds a model of type {family!r}, not 'clip'. Set checkpoint to a folder of a CLIP model."
        return None


def _unloadable(key: str, checkpoint: str, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0].rstrip(".")
    return f"Cannot load {checkpoint}: {reason}. Set PickScore.{key} to a folder that holds a whole CLIP {key}."


def _unit(features: Any) -> Tensor:
    # transformers 5 returns an output object here, transformers 4 a tensor
    embeds: Tensor = features if isinstance(features, Tensor) else features.pooler_output
    return torch.nn.functional.normalize(embeds.float(), dim=-1)
