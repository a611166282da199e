"""The scores of an evaluation on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.rewards import RewardBatch

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule


class HeldOutObserver(Protocol):
    """What looks at held-out images beside the reward, such as FID; on every rank, at every evaluation."""

    def update(self, images: Tensor, batch: PromptBatch) -> None:
        """Take a batch of this rank's images, ``(B, 3, H, W)`` in [0, 1]."""

    def compute(self, module: VGRPOModule) -> dict[str, float]:
        """Metrics over all ranks' images since the last call, the same on every rank; starts over."""


class HeldOutScores:
    """Collects the scores of one evaluation, batch by batch."""

    def __init__(self) -> None:
        self._batches: list[RewardBatch] = []

    def __bool__(self) -> bool:
        return bool(self._batches)

    def add(self, scores: RewardBatch) -> None:
        self._batches.append(scores)

    def means(self, all_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """``heldout/reward`` and ``heldout/<part>`` over the images of all ranks that did not fail; starts over.

        Args:
            all_ranks: concatenates every rank's ``(B, ...)`` in rank order.
        """
        scores = RewardBatch.joined(self._batches)
        self._batches = []
        totals = {"heldout/reward": scores.total, **{f"heldout/{name}": part for name, part in scores.parts.items()}}
        sums = torch.stack([torch.stack([v.nansum(), (~v.isnan()).sum()]) for v in totals.values()]).double()
        sums = all_ranks(sums[None]).sum(dim=0)
        return dict(zip(totals, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))
