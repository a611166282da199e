"""PickScore: a CLIP model trained on human preferences between two images."""

from dataclasses import dataclass

from torch import Tensor

from lit_vgrpo.core.ranges import checked
from lit_vgrpo.rewards.clip import CLIPReward

HUB_CHECKPOINT = "yuvalkirstain/PickScore_v1"
HUB_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # the PickScore repository has no processor
SCALE = 26.0


@checked
@dataclass(eq=False)
class PickScore(CLIPReward):
    """CLIP similarity of image and prompt: ``exp(logit_scale) * cos / 26``, near 1 for a preferred image.

    Papers often report the cosine instead, about 0.2.

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

    checkpoint: str = HUB_CHECKPOINT

    def __post_init__(self) -> None:
        if self.processor is None and self.checkpoint == HUB_CHECKPOINT:
            self.processor = HUB_PROCESSOR
        super().__post_init__()

    def _scaled(self, cosines: Tensor) -> Tensor:
        scale: Tensor = self._encoder.model.logit_scale
        return scale.float().exp() * cosines / SCALE
