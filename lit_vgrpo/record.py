"""What one iteration did, for callbacks to read."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class IterationRecord:
    """One iteration, from its rollout to its last update.

    Attributes:
        iteration: number, from 0.
        rewards: total reward of every image over all ranks, NaN = failed, ``(B_global,)``.
        group_ids: ``(B_global,)``.
        parts: each reward's mean over the images it scored, over all ranks.
        errors: reward name to its last failure message.
        local_group_ids: groups of this rank's images, ``(B_local,)``.
        images: number of images, over all ranks.
        metrics: for each loss metric the per-image values of every step, this rank's.
        losses: loss of every step, this rank's.
        seconds: wall time by phase (rollout, decode, reward, prepare).
    """

    iteration: int
    rewards: Tensor
    group_ids: Tensor
    parts: dict[str, float]
    errors: dict[str, str]
    local_group_ids: Tensor
    images: int
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Book one step."""
        self.losses.append(loss.detach())
        for name, values in metrics.items():
            self.metrics.setdefault(name, []).append(values)

    def first_update(self, name: str) -> Tensor | None:
        """A metric's values for all of this rank's images in the first update, in the rollout's order."""
        if name not in self.metrics:
            return None
        return torch.cat(self.metrics[name])[: len(self.local_group_ids)]

    def mean(self, name: str) -> float | None:
        """A metric's mean over all steps."""
        return float(torch.cat(self.metrics[name]).mean()) if name in self.metrics else None
