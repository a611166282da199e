"""PickScore: a CLIP model trained on human preferences between two images."""

from __future__ import annotations

from torch import Tensor

from lit_vgrpo.core.batches import BATCH_SIZE
from lit_vgrpo.core.ranges import BatchSize, checked
from lit_vgrpo.rewards.clip import CLIPReward
from lit_vgrpo.rewards.model import Dtype

HUB_CHECKPOINT = "yuvalkirstain/PickScore_v1"
HUB_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # the PickScore repository has no processor
SCALE = 26.0


@checked
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

    def __init__(
        self,
        checkpoint: str = HUB_CHECKPOINT,
        processor: str | None = None,
        batch_size: BatchSize = BATCH_SIZE,
        dtype: Dtype = "float32",
        device: str = "auto",
    ) -> None:
        if processor is None and checkpoint == HUB_CHECKPOINT:
            processor = HUB_PROCESSOR
        super().__init__(checkpoint, processor, batch_size, dtype, device)

    def _scaled(self, cosines: Tensor) -> Tensor:
        scale: Tensor = self._clip.logit_scale
        return scale.float().exp() * cosines / SCALE
