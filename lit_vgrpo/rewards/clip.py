"""CLIP models of transformers, and the rewards that compare an image with its prompt or the picture it edits."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from lit_vgrpo.core.batches import in_batches
from lit_vgrpo.core.pictures import picture_error
from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.errors import counted
from lit_vgrpo.rewards.model import Dtype, ModelReward, device_for, unit
from lit_vgrpo.system.hub import LoadError, loading, source_of

if TYPE_CHECKING:
    from transformers import CLIPModel

HUB_CHECKPOINT = "openai/clip-vit-large-patch14"
HUB_PICKSCORE = "yuvalkirstain/PickScore_v1"
HUB_PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # the PickScore repository has none
PICKSCORE_SCALE = 26.0


@dataclass
class CLIPEncoder:
    """A ``CLIPModel`` that returns embeddings of length 1, float32.

    Args:
        model: the model.
        processor: its ``CLIPProcessor``, or for images alone its ``CLIPImageProcessor``.
    """

    model: Any
    processor: Any

    def of_images(self, images: Any) -> Tensor:
        """Return the embeddings of PIL images, or of a tensor ``(b, 3, H, W)`` in uint8: ``(b, D)``."""
        process = getattr(self.processor, "image_processor", self.processor)
        # uint8, because the processor would divide a float tensor by 255
        pixels = process(list(images), return_tensors="pt")["pixel_values"].to(self.model.device, self.model.dtype)
        return unit(_embedding(self.model.get_image_features(pixels)))

    def of_texts(self, texts: list[str]) -> Tensor:
        """Return the embeddings of texts, truncated to the context: ``(b, D)``."""
        config, tokenizer = self.model.config.text_config, self.processor.tokenizer
        length = min(tokenizer.model_max_length, config.max_position_embeddings)
        tokens = self.processor(
            text=texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).to(self.model.device)
        features = self.model.get_text_features(tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return unit(_embedding(features))


def _embedding(features: Any) -> Tensor:
    """Return the tensor of ``get_image_features``, which transformers 5 wraps in an output object."""
    return features if isinstance(features, Tensor) else cast(Tensor, features.pooler_output)


def clip_model(checkpoint: str, dtype: Dtype, what_to_set: str) -> "CLIPModel":
    """Load a ``CLIPModel``; raise LoadError if the checkpoint is incomplete."""
    from transformers import CLIPModel

    remedy = f"Set {what_to_set} to a folder with a complete CLIP checkpoint."
    library = cast(Any, CLIPModel)  # its annotation omits the second value
    with loading(checkpoint, remedy):
        model, found = library.from_pretrained(
            source_of(checkpoint), dtype=getattr(torch, dtype), output_loading_info=True
        )
    if missing := sorted(found["missing_keys"]):  # the library would continue with random ones
        raise LoadError(
            f"Cannot load {checkpoint}: {counted(len(missing), 'weight')} missing, such as {missing[0]}. {remedy}"
        )
    return cast("CLIPModel", model)


def clip_processor(checkpoint: str, what_to_set: str, for_images: bool = False) -> Any:
    """Load a ``CLIPProcessor``, or for images alone a ``CLIPImageProcessor``.

    Raises:
        LoadError: the checkpoint has none.
    """
    from transformers import CLIPImageProcessor, CLIPProcessor

    kind = "image processor" if for_images else "processor"
    with loading(checkpoint, f"Set {what_to_set} to a folder with a complete CLIP {kind}."):
        return (CLIPImageProcessor if for_images else CLIPProcessor).from_pretrained(source_of(checkpoint))


@checked
@dataclass(eq=False)
class CLIPCosine(ModelReward):
    """The cosine similarity of the images' CLIP embeddings and of others that a subclass computes."""

    weight_files: ClassVar[tuple[tuple[str, str], ...]] = (("checkpoint", "config.json"),)

    @abstractmethod
    def _processor(self) -> Any:
        """Return the processor of what the model embeds."""

    def _build(self) -> nn.Module:
        processor = self._processor()
        self._encoder = CLIPEncoder(clip_model(self.checkpoint, self.dtype, self.option("checkpoint")), processor)
        return cast(nn.Module, self._encoder.model)

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        return (self._encoder.of_images(images) * texts).sum(-1)


@checked
@dataclass(eq=False)
class CLIPReward(CLIPCosine):
    """The cosine similarity of image and prompt embeddings, scaled by a subclass.

    Resizing, cropping and normalisation follow the checkpoint's processor; long prompts are truncated to the context.
    Arguments as in :class:`CLIPScore`.
    """

    weight_files = (*CLIPCosine.weight_files, ("processor", "tokenizer_config.json"))

    processor: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.processor = self.processor or self.checkpoint

    def _processor(self) -> Any:
        return clip_processor(str(self.processor), self.option("processor"))

    def _read(self, prompts: list[str]) -> Tensor:
        return self._encoder.of_texts(prompts)

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        return self._scaled(super()._score(images, texts))

    @abstractmethod
    def _scaled(self, cosines: Tensor) -> Tensor:
        """Return the scores of cosines, shape ``(b,)``, float32."""


@checked
@dataclass(eq=False)
class CLIPScore(CLIPReward):
    """``100 * max(cos, 0)`` of image and prompt, 0 to 100; about 20 to 35 for matching images.

    Per-image scores of ``torchmetrics.functional.multimodal.clip_score``, which returns only their mean. A truncated
    prompt keeps its end token here; without it CLIP would embed only the start token.

    Args:
        checkpoint: hub name or local folder of a ``CLIPModel``; torchmetrics' default.
        processor: hub name or local folder of its ``CLIPProcessor``; None uses ``checkpoint``.
        batch_size: images per forward pass; smaller batches are padded.
        dtype: of the weights; scores are float32.
        device: where the model runs; ``"auto"`` follows the images.

    Source:
        arXiv 2104.08718, which uses a factor of 2.5; torchmetrics and most tables use 100.
    """

    name = "clipscore"

    checkpoint: str = HUB_CHECKPOINT

    def _scaled(self, cosines: Tensor) -> Tensor:
        return 100 * cosines.clamp(min=0)


@checked
@dataclass(eq=False)
class PickScore(CLIPReward):
    """CLIP similarity of image and prompt: ``exp(logit_scale) * cos / 26``, near 1 for a preferred image.

    The model is trained on human preferences between two images. Papers often report the cosine instead, about 0.2.

    Args:
        checkpoint: hub name or local folder of a ``CLIPModel``.
        processor: hub name or local folder of its ``CLIPProcessor``; None uses the published one for the published
            checkpoint, else ``checkpoint``.
        batch_size: images per forward pass; smaller batches are padded.
        dtype: of the weights; scores are float32.
        device: where the model runs; ``"auto"`` follows the images.

    Source:
        arXiv 2305.01569; the division by 26 as in Flow-GRPO (arXiv 2505.05470).
    """

    name = "pickscore"

    checkpoint: str = HUB_PICKSCORE

    def __post_init__(self) -> None:
        if self.processor is None and self.checkpoint == HUB_PICKSCORE:
            self.processor = HUB_PICKSCORE_PROCESSOR
        super().__post_init__()

    def _scaled(self, cosines: Tensor) -> Tensor:
        scale: Tensor = self._encoder.model.logit_scale
        return scale.float().exp() * cosines / PICKSCORE_SCALE


@checked
@dataclass(eq=False)
class CLIPImageSimilarity(CLIPCosine):
    """The cosine similarity of the CLIP embeddings of an image and of the picture that its prompt edits, -1 to 1.

    An unchanged copy scores 1: use it with a reward for the edit, such as CLIPScore, to keep what the prompt does not
    name.

    Args:
        checkpoint: hub name or local folder of a ``CLIPModel`` with its image processor.
        batch_size: images per forward pass; smaller batches are padded.
        dtype: of the weights; scores are float32.
        device: where the model runs; ``"auto"`` follows the images.
    """

    name = "clip_image"

    checkpoint: str = HUB_CHECKPOINT

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        return picture_error(prompt, row)

    @torch.no_grad()
    def __call__(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        self.load()
        self._encoder.model.to(device_for(images, self.device))
        if references is None:
            return torch.full((len(images),), torch.nan, device=images.device)
        given = in_batches(self._encoder.of_images, self.batch_size, to_uint8(references).cpu())
        return in_batches(self._score, self.batch_size, to_uint8(images).cpu(), given).to(images.device)

    def _processor(self) -> Any:
        return clip_processor(self.checkpoint, self.option("checkpoint"), for_images=True)
