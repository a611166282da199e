"""The LAION aesthetic score: how much people would like an image, regardless of its prompt."""

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from lit_vgrpo.core.ranges import checked
from lit_vgrpo.rewards.clip import clip_model, clip_processor
from lit_vgrpo.rewards.model import ModelReward, ScoreHead, unit
from lit_vgrpo.rewards.weights import fill, read_weights, weights_path

HUB_CHECKPOINT = "camenduru/improved-aesthetic-predictor"  # a copy of the original's GitHub repository
FILENAME = "sac+logos+ava1-l14-linearMSE.pth"
HUB_CLIP = "openai/clip-vit-large-patch14"


@checked
@dataclass(eq=False)
class AestheticScore(ModelReward):
    """A predicted rating of the image alone, about 1 to 10; most images of diffusion models get 5 to 7.

    A linear network on the normalised CLIP image embedding. It never sees the prompt, so a policy trained on it alone
    forgets its prompts.

    Args:
        checkpoint: of the head: hub name, local folder with ``sac+logos+ava1-l14-linearMSE.pth``, or that file.
        clip: hub name or local folder of the ``CLIPModel`` that the head was trained on, with its image processor.
        batch_size: images per forward pass; smaller batches are padded.
        dtype: of CLIP's weights; the head and the scores are float32.
        device: where the model runs; ``"auto"`` follows the images.

    Source:
        github.com/christophschuhmann/improved-aesthetic-predictor, simple_inference.py.
    """

    name = "aesthetic"
    weight_files = (("checkpoint", FILENAME), ("clip", "config.json"))

    checkpoint: str = HUB_CHECKPOINT
    clip: str = HUB_CLIP

    def _build(self) -> nn.Module:
        self._processor = clip_processor(self.clip, self.option("clip"), for_images=True)
        clip = clip_model(self.clip, self.dtype, self.option("clip"))
        head = ScoreHead(clip.visual_projection.out_features)
        key = self.option("checkpoint")
        path = weights_path(self.checkpoint, FILENAME, key)
        fill(head, read_weights(path, key), path, f"{key} and {self.option('clip')}")
        return nn.ModuleDict({"vision": clip.vision_model, "projection": clip.visual_projection, "head": head})

    def _score(self, images: Tensor, texts: Tensor) -> Tensor:
        model = cast(Any, self._model)
        weight = model["projection"].weight
        # uint8, because the processor would divide a float tensor by 255
        pixels = self._processor(list(images), return_tensors="pt")["pixel_values"].to(weight.device, weight.dtype)
        embeddings = model["projection"](model["vision"](pixels).pooler_output)
        scores: Tensor = model["head"](unit(embeddings))
        return scores
