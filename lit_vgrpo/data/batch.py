"""The batches that the data loaders yield."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lit_vgrpo.core.pictures import references_of
from lit_vgrpo.core.types import RolloutRequest


@dataclass
class PromptBatch:
    """The prompts of one rank's share of an iteration, or a batch of held-out images to sample."""

    iteration: int  # from 0; -1 for held-out batches
    prompts: list[str] = field(default_factory=list)  # training: one per group of this rank; held-out: one per image
    rows: list[dict[str, Any]] = field(default_factory=list)  # the prompts' rows with their extra fields
    sources: list[str] = field(default_factory=list)  # names of the prompts' sources; empty if there is only one
    slots: list[int] = field(default_factory=list)  # over all ranks: the group's number 0..P-1, or the held-out image's
    group_size: int = 1  # images of a group over all ranks; 1 for held-out batches
    images_per_prompt: int = 0  # of held-out batches; 0 if unknown
    images: int = 0  # of the whole iteration or held-out set, over all ranks; 0 if unknown
    members: list[int] = field(default_factory=lambda: [0])  # images of each group that this rank samples
    updates: int = 0  # optimizer steps of the iteration; 0 for held-out batches
    order: list[int] | None = None  # in which the optimizer steps divide this rank's images; None if each uses all
    micro_batch_size: int = 1  # images per pass; for held-out batches the largest number on any rank

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
        pictures = references_of(self.rows)
        missing = self.micro_batch_size - len(self.slots)
        return None if pictures is None else [*pictures, *pictures[-1:] * missing]
