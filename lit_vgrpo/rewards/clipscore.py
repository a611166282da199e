"""CLIPScore: how well a picture fits its prompt, for a CLIP model as it was pre-trained."""

from __future__ import annotations

from torch import Tensor

from lit_vgrpo.core.batches import BATCH_SIZE
from lit_vgrpo.core.ranges import BatchSize, checked
from lit_vgrpo.rewards.clip import CLIPReward
from lit_vgrpo.rewards.model import Dtype

HUB_CHECKPOINT = "openai/clip-vit-large-patch14"


@checked
class CLIPScore(CLIPReward):
    """``100 * max(cos, 0)`` of picture and prompt, 0 to 100; about 20 to 35 for pictures that fit their prompts.

    The score of ``torchmetrics.functional.multimodal.clip_score``, which only gives the mean over its images. A prompt
    longer than the context keeps its end token here, without which CLIP would embed the start token alone.

    Args:
        checkpoint: hub name or local folder of a ``CLIPModel``; torchmetrics' default.
        processor: hub name or local folder of its ``CLIPProcessor``; None takes ``checkpoint``.
        batch_size: images of every forward pass; fewer are filled up.
        dtype: of the weights; scores are float32.
        device: where the model runs; ``"auto"`` follows the images.

    Source:
        arXiv 2104.08718, whose factor is 2.5 where torchmetrics and most tables have 100.
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
