"""The data module: prompts in, prompt batches out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from operator import itemgetter
from typing import Annotated, Any, Literal

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lit_vgrpo.core.gather import image_ranks
from lit_vgrpo.core.noise import seed_of_run
from lit_vgrpo.core.ranges import Count, GroupSize, PositiveInt, Range, Seed, checked
from lit_vgrpo.core.sizes import MICRO_BATCH_SIZE, Sizes
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.data.datasets import GroupSampler, HeldOutDataset, IterationDataset, LocalSampler, held_out_error
from lit_vgrpo.data.prompt_sets import PromptChoice, PromptSets, read_heldout
from lit_vgrpo.data.prompts import Row, Rows, text_of
from lit_vgrpo.data.source import Sources, as_sources
from lit_vgrpo.errors import setting
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.system.paths import resolve_path


@checked
class PromptDataModule(L.LightningDataModule):
    """Prompts for training and held-out prompts for evaluation, from files, folders and datasets.

    One epoch of the training loader is one iteration, a single :class:`PromptBatch`.

    Args:
        train: Prompt file, folder or dataset, or a mapping of the options of
            :class:`~lit_vgrpo.data.source.PromptSource`, or a list of these. Several are mixed by weight, and each is
            shuffled and repeated independently. A list of texts that name no files, one or more with a space, is the
            prompts themselves.
        prompts_per_iteration: Prompts of one iteration over all ranks.
        group_size: Images per prompt, at least 2.
        heldout: Prompts for evaluation, likewise; null for no evaluation, unless ``heldout_fraction`` is given.
        updates_per_iteration: Optimizer steps of one iteration.
        micro_batch_size: Maximum number of images in a rank's forward and backward pass; it must divide the images of
            an update on a rank, unless they are fewer. ``auto`` finds the largest that fits into memory.
        split_updates: Every update uses a different share of the images, instead of all of them.
        heldout_images_per_prompt: Images per held-out prompt.
        heldout_limit: Use only the first N held-out prompts.
        eval_batch_size: Maximum number of held-out images in a rank's batch.
        seed: Seed of the order of the training prompts; null uses that of ``seed_everything``, or 0.
        heldout_fraction: Hold out this share of the training prompts for evaluation instead, chosen by hash.
        deduplicate: Keep only the first of equal prompts, and do not train on held-out prompts; prompts that differ
            only in case or white space are equal.
        exclude: Prompts, likewise, that are left out of the training prompts, before a share is held out.

    Raises:
        TypeError: An option of a source is wrong.
        ValueError: Held-out prompts are given twice.
    """

    def __init__(
        self,
        train: Sources,
        prompts_per_iteration: Count,
        group_size: GroupSize,
        heldout: Sources | None = None,
        updates_per_iteration: Count = 1,
        micro_batch_size: Count | Literal["auto"] = MICRO_BATCH_SIZE,
        split_updates: bool = False,
        heldout_images_per_prompt: Count = 1,
        heldout_limit: PositiveInt | None = None,
        eval_batch_size: Count = 32,
        seed: Seed | None = None,
        heldout_fraction: Annotated[float, Range(above=0, below=1)] | None = None,
        deduplicate: bool = False,
        exclude: Sources | None = None,
    ) -> None:
        super().__init__()
        self._sizes = Sizes(prompts_per_iteration, group_size, updates_per_iteration, micro_batch_size, split_updates)
        if heldout_fraction is not None and heldout is not None:
            raise ValueError(f"heldout_fraction={heldout_fraction} and heldout are both given. Set one to null.")
        held_out, left_out = ([] if given is None else as_sources(given) for given in (heldout, exclude))
        options: dict[str, Any] = {"deduplicate": deduplicate, "exclude": left_out}
        self.choice = PromptChoice(as_sources(train), held_out, heldout_fraction, heldout_limit, **options)
        self.heldout_images_per_prompt = heldout_images_per_prompt
        self.eval_batch_size = eval_batch_size
        self.seed = seed_of_run(seed)
        self.found_micro_batch_size: int | None = None
        """Replaces ``micro_batch_size="auto"``, once found."""
        self._sets: PromptSets | None = None

    @property
    def sizes(self) -> Sizes:
        """The sizes of an iteration, with as few prompts as possible under a trainer's ``fast_dev_run``."""
        is_tried = self.trainer is not None and bool(self.trainer.fast_dev_run)  # type: ignore[attr-defined]
        sizes = self._sizes.smallest(self._world_size) if is_tried else self._sizes
        found = self.found_micro_batch_size
        return sizes if found is None else replace(sizes, micro_batch_size=found)

    def read_for(self, policy: Policy) -> None:
        """Require readable pictures in the rows only if a policy edits them."""
        self.choice = replace(self.choice, edits=policy.edits)

    @property
    def has_heldout(self) -> bool:
        """True if there are held-out prompts."""
        return bool(self.choice.heldout) or self.choice.heldout_fraction is not None

    def check(self, world_size: int = 1) -> list[str]:
        """Read the prompts, and return the errors in the sizes and files for ``world_size`` ranks, one line each."""
        errors = self.sizes.errors(world_size)
        try:
            sets = PromptSets(self.choice)
        except (ValueError, OSError, ModuleNotFoundError) as error:
            return [*errors, str(error)]
        images = len(sets.heldout or ()) * self.heldout_images_per_prompt
        if images and world_size >= 1 and (message := held_out_error(images, self.eval_batch_size, world_size)):
            errors.append(message)
        if not errors:
            self._sets = sets
        return errors

    def setup(self, stage: str | None = None) -> None:
        """Read the prompts; raise ValueError with the first error of :meth:`check`."""
        if isinstance(policy := getattr(getattr(self.trainer, "lightning_module", None), "policy", None), Policy):
            self.read_for(policy)
        if (self._sets is None or self.sizes.errors(self._world_size)) and (found := self.check(self._world_size)):
            raise ValueError(found[0])

    def train_dataloader(self) -> DataLoader[PromptBatch]:
        """Return the batch of one iteration on this rank; ``sampler.set_epoch`` sets the iteration."""
        dataset = IterationDataset(self.sets.training, self.sizes, self._world_size, self._rank, self.seed)
        return _loader(dataset, GroupSampler(dataset, self._world_size, self._rank))

    def val_dataloader(self) -> DataLoader[PromptBatch] | list[Any]:
        """Return this rank's share of the held-out images, each once; an empty list in ``fit`` without such prompts.

        Raises:
            ValueError: There are no held-out prompts to validate, test or predict.
        """
        sets = self.sets
        if sets.heldout is None:
            verb = None if self.trainer is None else self.trainer.state.fn
            if verb is None or verb == "fit":
                return []
            example = setting("data", heldout="prompts.txt")
            raise ValueError(f"trainer.{verb.value} needs held-out prompts. Set {example}.")
        sizes = self.heldout_images_per_prompt, self.eval_batch_size, self._world_size, self._rank
        dataset = HeldOutDataset(sets.heldout, *sizes, sets.heldout_sources)
        return _loader(dataset, LocalSampler(dataset, self._world_size, self._rank))

    test_dataloader = predict_dataloader = val_dataloader

    def transfer_batch_to_device(self, batch: PromptBatch, device: torch.device, dataloader_idx: int) -> PromptBatch:
        """Return the batch unchanged: it holds no tensors, and Lightning would walk through every prompt and row."""
        return batch

    def heldout_samples(self, number: int) -> Rows:
        """Return the first held-out rows that differ in prompt or picture, the same on every rank."""
        found: dict[str, Row] = {}
        for row in self.sets.heldout or []:
            found.setdefault(text_of(row), row)
        return list(found.values())[:number]

    def heldout_rows(self) -> Rows:
        """Return the held-out prompts; reads the training prompts only if the held-out ones are split off from them."""
        if self._sets is None and self.choice.heldout:
            return read_heldout(self.choice)[0]
        return self.sets.heldout or [] if self.has_heldout else []

    def heldout_origin(self) -> dict[str, str]:
        """Return the held-out prompts' origin for a report: ``file``, and the ``sha256`` of it or of the prompts."""
        fraction, files = self.choice.heldout_fraction, [source.path for source in self.choice.heldout]
        if len(files) == 1 and resolve_path(files[0]).is_file():
            return {"file": files[0], "sha256": sha256(resolve_path(files[0]).read_bytes()).hexdigest()}
        prompts = "\n".join(row["prompt"] for row in self.heldout_rows())
        names = ", ".join(files or (train.path for train in self.choice.train))
        name = names if files else f"{fraction:.3g} of {names}, by hash"
        return {"file": name, "sha256": sha256(prompts.encode()).hexdigest()}

    def training_rows(self) -> Iterator[Row]:
        """Return the rows of all training sources to check before a run."""
        return (row for _, rows in self.sets.rows_by_source() for row in rows)

    @property
    def _world_size(self) -> int:
        return image_ranks(self.trainer)[1] if self.trainer is not None else 1

    @property
    def _rank(self) -> int:
        return image_ranks(self.trainer)[0] if self.trainer is not None else 0

    @property
    def sets(self) -> PromptSets:
        """The prompts, which are read if they were not yet; raise ValueError as :meth:`setup`."""
        self.setup()
        assert self._sets is not None
        return self._sets


def _loader(dataset: Dataset[PromptBatch], sampler: GroupSampler) -> DataLoader[PromptBatch]:
    # with a generator, since a loader otherwise draws a seed from the global one at each iteration
    return DataLoader(
        dataset, batch_size=1, sampler=sampler, num_workers=0, collate_fn=itemgetter(0), generator=torch.Generator()
    )
