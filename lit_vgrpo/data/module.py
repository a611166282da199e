"""The data module: prompt files in, prompt batches out."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.data.datasets import HeldOutDataset, IterationDataset, Rows, held_out_fault
from lit_vgrpo.data.prompts import read_prompts
from lit_vgrpo.data.sampler import GroupSampler, LocalSampler
from lit_vgrpo.sizes import Sizes


class PromptDataModule(L.LightningDataModule):
    """Prompts for training and held-out prompts for evaluation, from txt or jsonl files.

    One epoch of the training loader is one iteration: the loader's length is the number of steps of an iteration and
    every item is a :class:`PromptBatch` with the same prompts and the next step.

    Args:
        train: prompt file; ``shipped:`` paths point into the installed recipes.
        prompts_per_iteration: prompts of one iteration over all ranks.
        group_size: images per prompt, at least 2.
        heldout: prompt file of the evaluation; None for no evaluation.
        updates_per_iteration: optimizer steps of one iteration.
        micro_batch_size: most images a rank takes through one forward and backward pass.
        split_updates: every update takes its own share of the images, instead of all of them.
        heldout_images_per_prompt: images made for each held-out prompt.
        heldout_limit: take only the first so many held-out prompts.
        eval_batch_size: most held-out images in one batch of a rank.
        seed: seed of the order of the training prompts.

    Raises:
        TypeError: a number that is not a whole number.
        ValueError: a number that is too small.
    """

    def __init__(
        self,
        train: str,
        prompts_per_iteration: int,
        group_size: int,
        heldout: str | None = None,
        updates_per_iteration: int = 1,
        micro_batch_size: int = 8,
        split_updates: bool = False,
        heldout_images_per_prompt: int = 1,
        heldout_limit: int | None = None,
        eval_batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.sizes = Sizes(prompts_per_iteration, group_size, updates_per_iteration, micro_batch_size, split_updates)
        for fault in self.sizes.type_faults():
            raise TypeError(fault)
        for fault in self.sizes.value_faults():
            raise ValueError(fault)
        at_least_one = {"heldout_images_per_prompt": heldout_images_per_prompt, "eval_batch_size": eval_batch_size}
        if heldout_limit is not None:
            at_least_one["heldout_limit"] = heldout_limit
        for name, value in {**at_least_one, "seed": seed}.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} is not a whole number. Use an integer.")
        for name, value in at_least_one.items():
            if value < 1:
                raise ValueError(f"{name}={value} is too small. Use 1 or more.")
        self.train = train
        self.heldout = heldout
        self.heldout_images_per_prompt = heldout_images_per_prompt
        self.heldout_limit = heldout_limit
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self.first_step = 0  # where the first iteration goes on, when a run continues in the middle of one
        self._train_rows: Rows | None = None
        self._heldout_rows: Rows | None = None

    def check(self, world_size: int = 1) -> list[str]:
        """All faults of the sizes and the files on ``world_size`` ranks, one line each; empty when all is well."""
        return self._load(world_size)

    def setup(self, stage: str | None = None) -> None:
        """Read the files.

        Raises:
            ValueError: the first fault of :meth:`check`.
        """
        if self._train_rows is None or self.sizes.faults(self._world_size):
            for fault in self._load(self._world_size):
                raise ValueError(fault)

    def train_dataloader(self) -> DataLoader[PromptBatch]:
        """The steps of one iteration on this rank; ``sampler.set_epoch`` names the iteration."""
        self.setup()
        assert self._train_rows is not None
        dataset = IterationDataset(self._train_rows, self.sizes, self._world_size, self._rank, self.seed)
        first_step, self.first_step = self.first_step, 0  # of one iteration only
        sampler = GroupSampler(dataset, len(dataset), self._world_size, self._rank, self.seed, first_step)
        return _loader(dataset, sampler)

    def val_dataloader(self) -> DataLoader[PromptBatch] | list[Any]:
        """This rank's share of the held-out images, each exactly once; an empty list without held-out prompts."""
        self.setup()
        if self._heldout_rows is None:
            return []
        dataset = HeldOutDataset(
            self._heldout_rows, self.heldout_images_per_prompt, self.eval_batch_size, self._world_size, self._rank
        )
        return _loader(dataset, LocalSampler(dataset, self._world_size, self._rank))

    def heldout_prompts(self) -> list[str]:
        """The different held-out prompts, in the file's order; the same on every rank."""
        self.setup()
        return list(dict.fromkeys(row["prompt"] for row in self._heldout_rows or []))

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    def _load(self, world_size: int) -> list[str]:
        faults = self.sizes.faults(world_size)
        train_rows, heldout_rows = None, None
        try:
            train_rows = read_prompts(self.train)
        except ValueError as error:
            faults.append(str(error))
        try:
            heldout_rows = read_prompts(self.heldout)[: self.heldout_limit] if self.heldout is not None else None
        except ValueError as error:
            faults.append(str(error))
        if heldout_rows is not None and world_size >= 1:
            images = len(heldout_rows) * self.heldout_images_per_prompt
            fault = held_out_fault(images, self.eval_batch_size, world_size)
            faults += [fault] if fault else []
        if not faults:
            self._train_rows, self._heldout_rows = train_rows, heldout_rows
        return faults


def take_item(items: list[PromptBatch]) -> PromptBatch:
    """Collate a batch of one item into the item."""
    return items[0]


def _loader(dataset: Dataset[PromptBatch], sampler: GroupSampler | LocalSampler) -> DataLoader[PromptBatch]:
    # its own generator: a loader otherwise draws a seed from the global one each time it is iterated
    return DataLoader(
        dataset, batch_size=1, sampler=sampler, num_workers=0, collate_fn=take_item, generator=torch.Generator()
    )
