"""CLIP models of transformers, and the rewards that are computed from their embeddings."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from lit_vgrpo.core.batches import in_batches
from lit_vgrpo.core.pictures import picture_error
from lit_vgrpo.core.pixels import clip_normalised, resized_as_pil, shortest_edge
from lit_vgrpo.core.ranges import checked
from lit_vgrpo.rewards.model import Dtype, ModelReward, ScoreHead, longer_than, unit, weights_file
from lit_vgrpo.system.hub import load_network, loading, read_weights, source_of, tokenizer_error

HUB_CHECKPOINT = "openai/clip-vit-large-patch14"
HUB_PICKSCORE = "yuvalkirstain/PickScore_v1"
HUB_PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # the PickScore repository has none
PICKSCORE_SCALE = 26.0
HUB_AESTHETIC = "camenduru/improved-aesthetic-predictor"  # a copy of the original's GitHub repository
AESTHETIC_FILE = "sac+logos+ava1-l14-linearMSE.pth"


@dataclass
class CLIPEncoder:
    """A ``CLIPModel`` and its ``CLIPProcessor``, which return embeddings of length 1, float32."""

    model: Any
    processor: Any

    def encode_images(self, images: Any) -> Tensor:
        """Return the embeddings of images as in :func:`clip_pixels`, ``(b, D)``."""
        return unit(self.model.get_image_features(clip_pixels(self.processor, images, self.model)).pooler_output)

    def encode_texts(self, texts: list[str]) -> Tensor:
        """Return the embeddings of texts, truncated to the context: ``(b, D)``."""
        config, tokenizer = self.model.config.text_config, self.processor.tokenizer
        length = min(tokenizer.model_max_length, config.max_position_embeddings)
        tokens = self.processor(
            text=texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        ).to(self.model.device)
        features = self.model.get_text_features(tokens["input_ids"], attention_mask=tokens["attention_mask"])
        return unit(features.pooler_output)


def clip_pixels(processor: Any, images: Any, model: Any) -> Tensor:
    """Return images ``(b, 3, h, w)`` preprocessed for a model, with its device and dtype.

    They are PIL images, or a tensor ``(b, 3, H, W)``: uint8, or floats in [0, 1], whose gradient is kept.
    """
    prepare = processor.image_processor
    if not isinstance(images, Tensor):
        pixels: Tensor = prepare(list(images), return_tensors="pt")["pixel_values"]
    elif images.is_floating_point():
        raw = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
        pixels = clip_normalised(prepare(list(images), **raw)["pixel_values"], prepare.image_mean, prepare.image_std)
    else:
        edge, is_bicubic = prepare.size.get("shortest_edge"), prepare.resample == Image.Resampling.BICUBIC
        resizes = not (edge and is_bicubic and prepare.do_resize)  # itself, which rounds as PIL does on the CPU alone
        images = images.cpu() if resizes else resized_as_pil(images, *shortest_edge(images, edge))
        pixels = prepare(list(images), return_tensors="pt", **({} if resizes else {"do_resize": False}))["pixel_values"]
    return pixels.to(model.device, model.dtype)


def clip_model(checkpoint: str, dtype: Dtype, what_to_set: str) -> Any:
    """Load a ``CLIPModel``; raise LoadError if the checkpoint is incomplete."""
    from transformers import CLIPModel

    remedy = f"Set {what_to_set} to a folder with a complete CLIP checkpoint."
    return load_network(CLIPModel, checkpoint, remedy, dtype=getattr(torch, dtype))


def clip_processor(checkpoint: str, what_to_set: str, of: str) -> Any:
    """Load the ``CLIPProcessor`` of a checkpoint; raise LoadError if it has none, or not that of the model ``of``."""
    from transformers import CLIPProcessor

    with loading(checkpoint, f"Set {what_to_set} to a folder with a complete CLIP processor."):
        processor = CLIPProcessor.from_pretrained(source_of(checkpoint))
        if error := tokenizer_error(processor.tokenizer, text_config(of).vocab_size):
            raise ValueError(f"its tokenizer {error}")
    return processor


def text_config(checkpoint: str) -> Any:
    """Return the configuration of a ``CLIPModel``'s text encoder."""
    from transformers import CLIPTextConfig

    return CLIPTextConfig.from_pretrained(source_of(checkpoint))


@checked
@dataclass(eq=False)
class CLIPReward(ModelReward):
    """The cosine similarity of image and prompt embeddings, scaled by a subclass; arguments as in :class:`CLIPScore`.

    Resizing, cropping and normalisation follow the checkpoint's processor; long prompts are truncated to the context.
    """

    weight_files = (("checkpoint", "config.json"), ("processor", "tokenizer_config.json"))
    differentiable = True

    checkpoint: str
    processor: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.processor = self.processor or self.checkpoint

    def _build(self) -> nn.Module:
        model: nn.Module = clip_model(self.checkpoint, self.dtype, self.option("checkpoint"))
        self._encoder = CLIPEncoder(model, self._processor)
        return model

    @cached_property
    def _processor(self) -> Any:
        return clip_processor(str(self.processor), self.option("processor"), self.checkpoint)

    @cached_property
    def _context(self) -> int:
        positions: int = text_config(self.checkpoint).max_position_embeddings
        return min(self._processor.tokenizer.model_max_length, positions)

    def truncated(self, prompts: list[str]) -> tuple[list[bool], int]:
        return longer_than(self._context, self._processor.tokenizer, prompts), self._context

    def _read(self, prompts: list[str]) -> Tensor:
        return self._encoder.encode_texts(prompts)

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        return self._scaled((self._encoder.encode_images(images) * texts).sum(-1))

    def _scaled(self, cosines: Tensor) -> Tensor:
        """Return the scores of cosines, shape ``(b,)``, float32."""
        return cosines


@checked
@dataclass(eq=False)
class CLIPScore(CLIPReward):
    """``100 * max(cos, 0)`` of image and prompt, 0 to 100; about 20 to 35 for matching images.

    Per-image scores of ``torchmetrics.functional.multimodal.clip_score``, which returns only their mean. A truncated
    prompt keeps its end token here; without it CLIP would embed only the start token.

    Args:
        checkpoint: Hub name or local folder of a ``CLIPModel``; torchmetrics' default.
        processor: Hub name or local folder of its ``CLIPProcessor``; None uses ``checkpoint``.
        batch_size: Images per forward pass; smaller batches are padded.
        dtype: Dtype of the weights; scores are float32.
        device: Device of the model; ``"auto"`` follows the images.

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
        checkpoint: Hub name or local folder of a ``CLIPModel``.
        processor: Hub name or local folder of its ``CLIPProcessor``; None uses the published one for the published
            checkpoint, else ``checkpoint``.

    The other options are those of :class:`CLIPScore`.

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
class CLIPImageSimilarity(CLIPReward):
    """The cosine similarity of the CLIP embeddings of an image and of the picture that its prompt edits, -1 to 1.

    An unchanged copy scores 1; with several pictures, the score is the mean over them. Use it with a reward for the
    edit, such as CLIPScore, to preserve the rest.

    Args:
        checkpoint: Hub name or local folder of a ``CLIPModel``.
        processor: Hub name or local folder of its ``CLIPProcessor``; None uses ``checkpoint``.

    The other options are those of :class:`CLIPScore`.
    """

    name = "clip_image"
    differentiable = False

    checkpoint: str = HUB_CHECKPOINT

    def truncated(self, prompts: list[str]) -> tuple[list[bool], int]:
        return ModelReward.truncated(self, prompts)  # it reads none

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        return picture_error(prompt, row)

    @torch.no_grad()
    def __call__(
        self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]], references: Tensor | None = None
    ) -> Tensor:
        self.load_for(images)
        if references is None:
            return torch.full((len(images),), torch.nan, device=images.device)
        given = in_batches(self._encoder.encode_images, self.batch_size, self.rounded(references.flatten(0, -4)))
        given = given.unflatten(0, (len(images), -1)).mean(1)
        return in_batches(self._score, self.batch_size, self.rounded(images), given).to(images.device)


@checked
@dataclass(eq=False)
class AestheticScore(ModelReward):
    """A predicted rating of the image without its prompt, about 1 to 10; most images of diffusion models get 5 to 7.

    A linear network on the normalised CLIP image embedding. It never sees the prompt, so a policy trained on it alone
    forgets its prompts.

    Args:
        checkpoint: The head: hub name, local folder with ``sac+logos+ava1-l14-linearMSE.pth``, or that file.
        clip: Hub name or local folder of the ``CLIPModel`` that the head was trained on, with its processor.
        batch_size: Images per forward pass; smaller batches are padded.
        dtype: Dtype of CLIP's weights; the head and the scores are float32.
        device: Device of the model; ``"auto"`` follows the images.

    Source:
        github.com/christophschuhmann/improved-aesthetic-predictor, simple_inference.py.
    """

    name = "aesthetic"
    differentiable = True
    weight_files = (("checkpoint", AESTHETIC_FILE), ("clip", "config.json"))

    checkpoint: str = HUB_AESTHETIC
    clip: str = HUB_CHECKPOINT

    def _build(self) -> nn.Module:
        clip = clip_model(self.clip, self.dtype, self.option("clip"))
        self._processor = clip_processor(self.clip, self.option("clip"), self.clip)
        head = ScoreHead(clip.visual_projection.out_features)
        with loading(self.checkpoint, f"Set {self.option('checkpoint')} and {self.option('clip')} to a matching pair."):
            head.load_state_dict(read_weights(weights_file(self.checkpoint, AESTHETIC_FILE)))
        return nn.ModuleDict({"vision": clip.vision_model, "projection": clip.visual_projection, "head": head})

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        vision = self._model["vision"]
        features = self._model["projection"](vision(clip_pixels(self._processor, images, vision)).pooler_output)
        scores: Tensor = self._model["head"](unit(features))
        return scores
