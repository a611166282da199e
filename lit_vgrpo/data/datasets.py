"""The two datasets of prompt batches, iterations and held-out images, and their samplers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.data.prompt_sets import PromptMixture
from lit_vgrpo.data.prompts import Rows


class IterationDataset(Dataset[PromptBatch]):
    """One rank's batches: item i is iteration i, a pure function of the index, without end.

    Its length is 1, since an iteration is an epoch.
    """

    def __init__(
        self, prompts: PromptMixture, sizes: Sizes, num_replicas: int = 1, rank: int = 0, seed: int = 0
    ) -> None:
        self.prompts = prompts
        self.plan = sizes.plan(num_replicas)
        self.slots, self.members = sizes.rank_share(num_replicas, rank)
        self.order: list[int] | None = None
        if sizes.split_updates:
            update_of = [sizes.update_of(slot, member) for slot in self.slots for member in self.members]
            self.order = sorted(range(len(update_of)), key=update_of.__getitem__)
        self.seed = seed

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> PromptBatch:
        start = index * self.plan.prompts_per_iteration
        positions = [start + slot for slot in self.slots]
        rows = self.prompts.rows(self.seed, positions)
        return PromptBatch(
            iteration=index,
            prompts=[row["prompt"] for row in rows],
            rows=rows,
            sources=self.prompts.names_at(positions),
            slots=list(self.slots),
            group_size=self.plan.group_size,
            images=self.plan.images_per_iteration,
            members=list(self.members),
            updates=self.plan.updates_per_iteration,
            order=self.order,
            micro_batch_size=self.plan.micro_batch_size,
        )


class HeldOutDataset(Dataset[PromptBatch]):
    """One rank's share of the held-out images in batches, prompt by prompt, every image exactly once.

    Image j of prompt i has the number ``i * images_per_prompt + j`` over all ranks. Every rank gets a contiguous share
    and the same number of batches, because all ranks take part in a sharded network's forward pass.
    """

    def __init__(
        self,
        rows: Rows,
        images_per_prompt: int,
        batch_size: int,
        num_replicas: int = 1,
        rank: int = 0,
        sources: Sequence[str] = (),
    ) -> None:
        self.rows, self.sources = rows, sources
        self.images_per_prompt = images_per_prompt
        self.images = len(rows) * images_per_prompt
        if error := held_out_error(self.images, batch_size, num_replicas):
            raise ValueError(error)
        shares = np.array_split(np.arange(self.images), num_replicas)  # sizes differ by at most one, larger first
        of_ranks = [np.array_split(share, -(-len(shares[0]) // batch_size)) for share in shares]
        self.parts = [part.tolist() for part in of_ranks[rank]]
        self.largest = [max(map(len, parts)) for parts in zip(*of_ranks, strict=True)]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> PromptBatch:
        part = self.parts[index]
        rows = [self.rows[image // self.images_per_prompt] for image in part]
        return PromptBatch(
            iteration=-1,
            prompts=[row["prompt"] for row in rows],
            rows=rows,
            sources=[self.sources[image // self.images_per_prompt] for image in part if self.sources],
            slots=part,
            images_per_prompt=self.images_per_prompt,
            images=self.images,
            micro_batch_size=self.largest[index],
        )


def held_out_error(images: int, batch_size: int, world_size: int) -> str | None:
    """Return why ``images`` held-out images cannot be split into equally many batches per rank, or None."""
    if images < world_size:
        return (
            f"{images} held-out images cannot be split over {world_size} ranks. "
            f"Use heldout_images_per_prompt={-(-world_size // max(images, 1))} or more, or fewer ranks."
        )
    if batch_size == 1 and images % world_size:
        return f"eval_batch_size=1 cannot split {images} held-out images over {world_size} ranks. Use 2 or more."
    return None


class GroupSampler(DistributedSampler[Any]):
    """Sampler of one epoch's items in order: the epoch itself from the training dataset.

    A ``DistributedSampler``, so that Lightning keeps it and sets its epoch, which is the iteration. Every rank gets the
    same items; the dataset maps them to the rank's prompts.
    """

    def __init__(self, dataset: Dataset[Any], num_replicas: int = 1, rank: int = 0) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * len(self), (self.epoch + 1) * len(self)))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


class LocalSampler(GroupSampler):
    """Sampler of every item, for a dataset that already has only this rank's share."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: every epoch has the same items."""
