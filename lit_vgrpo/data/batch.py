"""The batches that the data loaders yield."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.core.pictures import references_of
from lit_vgrpo.core.types import RolloutRequest


@dataclass
class PromptBatch:
    """The prompts of one rank's share of an iteration, or a batch of held-out images to sample.

    Every step of a training iteration has the same prompts; step 0 collects experience, and all steps train on
    micro-batches of it.

    Args:
        iteration: Number of the iteration, from 0; -1 for held-out batches.
        step: Position in the iteration; -1 for held-out batches.
        num_steps: Steps of the iteration; 0 for held-out batches.
        prompts: Training: one per group of this rank; held-out: one per image.
        rows: The prompts' rows with their extra fields, as long as ``prompts``.
        sources: Names of the prompts' sources, as long as ``prompts``; empty if there is only one.
        slots: Training: the group's number over all ranks, 0..P-1 (the group id); held-out: the image's number over
            all ranks.
        group_size: Images of a group over all ranks; 1 for held-out batches.
        images: Number in the whole iteration or held-out set, over all ranks; 0 if unknown.
        members: Images of each group that this rank samples: all of them, unless groups are split over ranks.
        updates: Optimizer steps of the iteration; 0 for held-out batches.
        order: Order in which this rank's images are divided among optimizer steps; None if each step uses all.
        micro_batches_per_update: Micro-batches of one optimizer step; 0 for held-out batches.
        micro_batch_size: Images of one forward and backward pass; for held-out batches the largest number on any rank.
    """

    iteration: int
    step: int
    num_steps: int
    prompts: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    group_size: int = 1
    images: int = 0
    members: list[int] = field(default_factory=lambda: [0])
    updates: int = 0
    order: list[int] | None = None
    micro_batches_per_update: int = 0
    micro_batch_size: int = 1

    def request(self, seed: int, batch_size: int | None) -> RolloutRequest:
        """Return the request for this rank's images of a training iteration, ``batch_size`` per forward pass."""
        return RolloutRequest(
            self.prompts, self.rows, self.slots, self.group_size, self.iteration, seed, self.members, batch_size
        )

    def padded(self) -> tuple[list[str], list[int]]:
        """Return prompts and numbers of a held-out batch, padded with the last one to the largest size on any rank.

        The passes of a sharded network need all ranks, so a rank with fewer images must repeat one.
        """
        missing = self.micro_batch_size - len(self.slots)
        return [*self.prompts, *self.prompts[-1:] * missing], [*self.slots, *self.slots[-1:] * missing]

    def references(self) -> list[Tensor] | None:
        """Return the pictures that the prompts of :meth:`padded` edit, as in ``references_of``, if they have any."""
        found = references_of(self.rows)
        missing = self.micro_batch_size - len(self.slots)
        return None if found is None else [*found, *found[-1:] * missing]

    @property
    def update(self) -> int:
        """The optimizer step that this step belongs to, from 0 in every iteration."""
        return self.step // self.micro_batches_per_update

    @property
    def later(self) -> Tensor | None:
        """This rank's images that the first update does not train on, ``(K,)``; ``None`` if each update uses all."""
        return None if self.order is None else torch.tensor(self.order[len(self.order) // self.updates :])

    @property
    def starts_update(self) -> bool:
        return self.step % self.micro_batches_per_update == 0

    @property
    def is_first(self) -> bool:
        """True if this step collects the iteration's images."""
        return self.step == 0

    @property
    def is_last(self) -> bool:
        """True if this step ends the iteration."""
        return self.step == self.num_steps - 1 and self.step >= 0
