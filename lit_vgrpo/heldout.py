"""The scores of an evaluation on held-out prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.metrics.ranks import rows_of_all_ranks
from lit_vgrpo.rewards import ScoreQueue, Weighted

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule


class HeldOutObserver(Protocol):
    """What looks at held-out images beside the reward, such as FID; on every rank, at every evaluation."""

    def update(self, images: Tensor, batch: PromptBatch) -> None:
        """Take a batch of this rank's images, ``(B, 3, H, W)`` in [0, 1]."""

    def compute(self, module: VGRPOModule) -> dict[str, float]:
        """Metrics over all ranks' images since the last call, the same on every rank; starts over."""


class HeldOutScores:
    """Collects the scores of one evaluation, batch by batch.

    Args:
        observed: what is trained on, and beside it what is not.
        untrained: the latter alone.
        beside: the queue of the training images, whose threads are used.
    """

    def __init__(self, observed: Weighted, untrained: Weighted | None, beside: ScoreQueue) -> None:
        self.untrained = untrained
        self.queue = ScoreQueue(observed, beside=beside)
        self._of_images: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return len(self.queue) > 0

    def add(self, images: Tensor, batch: PromptBatch) -> None:
        """Score this rank's images ``(B, 3, H, W)`` of a batch."""
        self.queue.put(images, batch.prompts, batch.rows)

    def get(self, name: str) -> Tensor | None:
        """A metric of the last evaluation image by image, ``(N,)`` in the order of their numbers, over all ranks.

        NaN where an image has none; ``None`` where the metric is not of single images.
        """
        return self._of_images.get(name)

    def means(self) -> dict[str, float]:
        """Means over the images of all ranks that did not fail, the same on every rank; starts over.

        ``heldout/reward`` is what is trained on, ``heldout/untrained_reward`` what is not, ``heldout/<part>`` each
        reward alone, and ``heldout/failed`` the number of images that one of them could not score.
        """
        scores = self.queue.take()
        values = {"heldout/reward": scores.total}
        if self.untrained is not None:
            values["heldout/untrained_reward"] = self.untrained.total(scores.parts, scores.applies)
        values |= {f"heldout/{name}": part for name, part in scores.parts.items()}
        failed = [part.isnan() & scores.applies_to(name) for name, part in scores.parts.items()]
        values["heldout/failed"] = torch.stack(failed).any(dim=0)
        # a rank's share of the images is a stretch of them, in the order of the ranks
        table = rows_of_all_ranks(torch.stack(list(values.values()), dim=1).double())
        self._of_images = dict(zip(values, table.unbind(dim=1), strict=True))
        means = {name: float(own.nanmean()) for name, own in self._of_images.items()}
        return {**means, "heldout/failed": float(self._of_images.pop("heldout/failed").sum())}
