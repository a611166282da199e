"""CLIPScore: how well an image matches its prompt, by a pre-trained CLIP model."""

from __future__ import annotations

from torch import Tensor

from lit_vgrpo.core.batches import BATCH_SIZE
from lit_vgrpo.core.ranges import BatchSize, checked
from lit_vgrpo.rewards.clip import CLIPReward
from lit_vgrpo.rewards.model import Dtype

HUB_CHECKPOINT = "openai/clip-vit-large-patch14"


@checked
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

    def __init__(
        self,
        checkpoint: str = HUB_CHECKPOINT,
        processor: str | None = None,
        batch_size: BatchSize = BATCH_SIZE,
        dtype: Dtype = "float32",
        device: str = "auto",
    ) -> None:
        super().__init__(checkpoint, processor, batch_size, dtype, device)

    def _scaled(self, cosines: Tensor) -> Tensor:
        return 100 * cosines.clamp(min=0)
