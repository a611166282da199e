"""The data module: prompts in, prompt batches out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from typing import Annotated, Any, Literal

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lit_vgrpo.core.ranges import Count, GroupSize, NonNegativeInt, PositiveInt, Range, Seed, checked
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.data.datasets import HeldOutDataset, IterationDataset, held_out_error
from lit_vgrpo.data.description import describe, prompts_fingerprint
from lit_vgrpo.data.prompt_sets import PromptChoice, PromptSets, limited_heldout
from lit_vgrpo.data.prompts import read_prompts, text_of
from lit_vgrpo.data.rows import Row, Rows
from lit_vgrpo.data.sampler import GroupSampler, LocalSampler
from lit_vgrpo.data.source import Source, Sources, as_source, as_sources
from lit_vgrpo.system.paths import resolve_path


@checked
class PromptDataModule(L.LightningDataModule):
    """Prompts for training and held-out prompts for evaluation, from files, folders and datasets.

    One epoch of the training loader is one iteration: its length is the number of steps of an iteration, and every item
    is a :class:`PromptBatch` with the same prompts and the next step.

    Args:
        train: prompt file, folder or dataset, or a mapping of the options of
            :class:`~lit_vgrpo.data.source.PromptSource`, or a list of these. Several are mixed by weight, and each is
            shuffled and repeated on its own.
        prompts_per_iteration: prompts of one iteration over all ranks.
        group_size: images per prompt, at least 2.
        heldout: prompts for evaluation; null for no evaluation, unless ``heldout_fraction`` is given.
        updates_per_iteration: optimizer steps of one iteration.
        micro_batch_size: maximum number of images in a rank's forward and backward pass; ``auto`` finds the largest
            that fits into memory before training.
        split_updates: every update uses its own share of the images, instead of all of them.
        heldout_images_per_prompt: images per held-out prompt.
        heldout_limit: use only the first N held-out prompts.
        eval_batch_size: maximum number of held-out images in a rank's batch.
        seed: seed of the order of the training prompts.
        heldout_fraction: hold out this share of the training prompts for evaluation instead, chosen by hash.
        deduplicate: keep only the first of equal prompts, and do not train on held-out prompts; prompts that differ
            only in case or white space are equal.
        streaming: leave the training prompts on disk; by default only large files. See
            :func:`~lit_vgrpo.data.prompts.open_prompts`.
        num_workers: must be 0; accepted for configurations that set it.
        pin_memory: must be false, likewise: prompts are text.

    Raises:
        TypeError: a number is not a whole number, or an option of a source is wrong.
        ValueError: a number is too small, a fraction is invalid, no source is given, or held-out prompts are given
            twice.
    """

    def __init__(
        self,
        train: Sources,
        prompts_per_iteration: Count,
        group_size: GroupSize,
        heldout: Source | None = None,
        updates_per_iteration: Count = 1,
        micro_batch_size: Count | Literal["auto"] = 8,
        split_updates: bool = False,
        heldout_images_per_prompt: Count = 1,
        heldout_limit: PositiveInt | None = None,
        eval_batch_size: Count = 32,
        seed: Seed = 0,
        heldout_fraction: Annotated[float, Range(above=0, below=1, example=0.05)] | None = None,
        deduplicate: bool = False,
        streaming: bool | None = None,
        num_workers: NonNegativeInt = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        if num_workers:
            raise ValueError(
                f"num_workers={num_workers} has no use: a batch is a few prompts, already in memory, and prefetching "
                "would break resuming. Use 0, or leave it out."
            )
        if pin_memory:
            raise ValueError("pin_memory=true has no use: a batch is text. Use false, or leave it out.")
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self._sizes = Sizes(prompts_per_iteration, group_size, updates_per_iteration, micro_batch_size, split_updates)
        if heldout_fraction is not None and heldout is not None:
            raise ValueError(
                f"heldout_fraction={heldout_fraction} and heldout are both given. Set one of them to null."
            )
        self.train = train
        self.heldout = heldout
        self.choice = PromptChoice(
            as_sources(train),
            as_source(heldout, "heldout") if heldout is not None else None,
            heldout_fraction,
            heldout_limit,
            deduplicate,
            streaming,
            seed,
        )
        self.heldout_images_per_prompt = heldout_images_per_prompt
        self.heldout_limit = heldout_limit
        self.eval_batch_size = eval_batch_size
        self.seed = seed
        self._first_step = 0
        self._small_sizes: Sizes | None = None
        self._sets: PromptSets | None = None

    @property
    def sizes(self) -> Sizes:
        """The sizes of an iteration, with as few prompts as possible under a trainer's ``fast_dev_run``."""
        if not self._is_tried:
            return self._sizes
        return self._small_sizes or self._sizes.smallest(self._world_size)

    def settle(self, micro_batch_size: int) -> None:
        """Replace ``micro_batch_size="auto"`` by a number."""
        sizes = replace(self.sizes, micro_batch_size=micro_batch_size)
        if self._is_tried:
            self._small_sizes = sizes
        else:
            self._sizes = sizes

    def start_at(self, step: int) -> None:
        """Let the next training loader, and no later one, start at a step of its iteration."""
        self._first_step = step

    @property
    def _is_tried(self) -> bool:
        return self.trainer is not None and bool(self.trainer.fast_dev_run)  # type: ignore[attr-defined]

    @property
    def has_heldout(self) -> bool:
        """True if there are held-out prompts."""
        return self.heldout is not None or self.choice.heldout_fraction is not None

    def check(self, world_size: int = 1) -> list[str]:
        """Return all errors in the sizes and files for ``world_size`` ranks, one line each."""
        return self._load(world_size)

    def setup(self, stage: str | None = None) -> None:
        """Read the prompts.

        Raises:
            ValueError: the first error of :meth:`check`.
        """
        if self._sets is None or self.sizes.errors(self._world_size):
            for error in self._load(self._world_size):
                raise ValueError(error)

    def train_dataloader(self) -> DataLoader[PromptBatch]:
        """Return the steps of one iteration on this rank; ``sampler.set_epoch`` sets the iteration."""
        dataset = IterationDataset(self._loaded().training, self.sizes, self._world_size, self._rank, self.seed)
        first_step, self._first_step = self._first_step, 0
        sampler = GroupSampler(dataset, len(dataset), self._world_size, self._rank, self.seed, first_step)
        return _loader(dataset, sampler)

    def val_dataloader(self) -> DataLoader[PromptBatch] | list[Any]:
        """Return this rank's share of the held-out images, each once; an empty list without held-out prompts."""
        rows = self._loaded().heldout
        if rows is None:
            return []
        dataset = HeldOutDataset(
            rows, self.heldout_images_per_prompt, self.eval_batch_size, self._world_size, self._rank
        )
        return _loader(dataset, LocalSampler(dataset, self._world_size, self._rank))

    def test_dataloader(self) -> DataLoader[PromptBatch]:
        """Return this rank's share of the held-out images, as for validation.

        Raises:
            ValueError: there are no held-out prompts.
        """
        loader = self.val_dataloader()
        if isinstance(loader, list):
            raise ValueError("There are no held-out prompts to test on or to predict. Set data.heldout.")
        return loader

    def predict_dataloader(self) -> DataLoader[PromptBatch]:
        """Return the held-out prompts; raises as in :meth:`test_dataloader`."""
        return self.test_dataloader()

    def transfer_batch_to_device(self, batch: PromptBatch, device: torch.device, dataloader_idx: int) -> PromptBatch:
        """Return the batch as it is: it holds no tensors, and Lightning would walk through every prompt and row."""
        return batch

    def heldout_prompts(self) -> list[str]:
        """Return the distinct held-out prompts in order, the same on every rank."""
        return list(dict.fromkeys(row["prompt"] for row in self._loaded().heldout or []))

    def heldout_samples(self, number: int) -> Rows:
        """Return the first held-out rows that differ in prompt or picture, the same on every rank."""
        found: dict[str, Row] = {}
        for row in self._loaded().heldout or []:
            found.setdefault(text_of(row), row)
        return list(found.values())[:number]

    def heldout_rows(self) -> Rows:
        """Return the held-out prompts; reads the training prompts only if the held-out ones are split off from them.

        Raises:
            ValueError: they cannot be read.
            ModuleNotFoundError: a source needs the extra ``data``.
        """
        if self._sets is None and self.choice.heldout is not None:
            return limited_heldout(read_prompts(self.choice.heldout), self.choice)
        if self._sets is None and not self.has_heldout:
            return []
        sets = self._sets or PromptSets(self.choice)
        for error in sets.errors:
            raise ValueError(error)
        return sets.heldout or []

    def heldout_origin(self) -> dict[str, str]:
        """Return the held-out prompts' origin for a report: ``file``, and the ``sha256`` of it or of the prompts."""
        source, fraction = self.choice.heldout, self.choice.heldout_fraction
        if source is not None and resolve_path(source.path).is_file():
            return {"file": source.path, "sha256": sha256(resolve_path(source.path).read_bytes()).hexdigest()}
        prompts = "\n".join(row["prompt"] for row in self.heldout_rows())
        names = ", ".join(train.path for train in self.choice.train)
        name = source.path if source is not None else f"{fraction:.3g} of {names}, by hash"
        return {"file": name, "sha256": sha256(prompts.encode()).hexdigest()}

    def describe(self) -> list[str]:
        """Return a line about what was read, and one per warning, to print before a run."""
        lines = describe(self._loaded())
        if self.heldout_limit is not None and not self.has_heldout:
            lines.append(f"data.heldout_limit={self.heldout_limit} has no effect: there are no held-out prompts.")
        return lines

    def fingerprint(self) -> str:
        """Return a fingerprint of the training prompts and their order.

        Raises:
            ValueError: they cannot be read.
        """
        return prompts_fingerprint(self._loaded())

    def training_rows(self) -> Iterator[Row]:
        """Return the training rows to check before a run: all in memory, and the first ones of other sources."""
        return self._loaded().training_rows()

    @property
    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    @property
    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    def _loaded(self) -> PromptSets:
        self.setup()
        assert self._sets is not None
        return self._sets

    def _load(self, world_size: int) -> list[str]:
        sets = PromptSets(self.choice)
        errors = [*self.sizes.errors(world_size), *sets.errors]
        if sets.heldout and world_size >= 1:
            images = len(sets.heldout) * self.heldout_images_per_prompt
            error = held_out_error(images, self.eval_batch_size, world_size)
            errors += [error] if error else []
        if not errors:
            self._sets = sets
        return errors


def take_item(items: list[PromptBatch]) -> PromptBatch:
    """Collate a batch of one item into the item."""
    return items[0]


def _loader(dataset: Dataset[PromptBatch], sampler: GroupSampler | LocalSampler) -> DataLoader[PromptBatch]:
    # its own generator, since a loader otherwise draws a seed from the global one at each iteration
    return DataLoader(
        dataset, batch_size=1, sampler=sampler, num_workers=0, collate_fn=take_item, generator=torch.Generator()
    )
