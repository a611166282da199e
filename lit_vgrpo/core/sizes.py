"""The sizes of an iteration, the plan for a number of ranks, and the images of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt, lcm
from typing import Literal

import torch
from torch import Tensor

MICRO_BATCH_SIZE = 8
"""The default."""


@dataclass(frozen=True)
class Plan:
    """The numbers of an iteration on a given number of ranks. "Local" numbers are per rank."""

    prompts_per_iteration: int
    group_size: int
    updates_per_iteration: int
    micro_batch_size: int  # no more than one update's images on a rank
    world_size: int
    images_per_iteration: int
    groups_per_rank: int
    ranks_per_group: int  # more than 1 if groups are split over ranks
    images_per_rank: int
    images_per_update: int
    micro_batches_per_update: int
    is_settled: bool = True  # False until a micro-batch size of "auto" is chosen

    def line(self) -> str:
        """Return the images of an iteration in a line."""
        ranks = f", on {self.world_size} ranks" if self.world_size > 1 else ""
        each = f"{self.group_size} for each of {self.prompts_per_iteration} prompts"
        return f"Each iteration: {self.images_per_iteration} images, {each}{ranks}."

    def table(self, passes_per_image: Mapping[str, float] | None = None, decodes_per_image: float = 0) -> str:
        """Return the plan as aligned text.

        Args:
            passes_per_image: Network passes per image by phase, such as ``{"rollout": 10, "train": 4}``; each phase
                adds a row with the passes of one iteration over all ranks.
            decodes_per_image: VAE passes with gradient per image; 0 adds no row.
        """
        groups = str(self.groups_per_rank) if self.ranks_per_group == 1 else f"1/{self.ranks_per_group}"
        micro_batches = f"{self.micro_batches_per_update} of {self.micro_batch_size} images"
        rows = [
            ("prompts", str(self.prompts_per_iteration)),
            ("images", f"{self.images_per_iteration} ({self.group_size} per prompt)"),
            ("ranks", str(self.world_size)),
            ("groups per rank", groups),
            ("images per rank", str(self.images_per_rank)),
            ("micro-batches per update", micro_batches if self.is_settled else "auto: as few as memory allows"),
            ("updates", f"{self.updates_per_iteration} on {self.images_per_update} images each"),
        ]
        for phase, passes in (passes_per_image or {}).items():
            total = passes * self.images_per_iteration
            rows.append((f"network passes, {phase}", f"{total:g} ({passes:g} per image)"))
        if decodes := decodes_per_image * self.images_per_iteration:
            rows.append(("VAE and reward, backward", f"{decodes:g} ({decodes_per_image:g} per image)"))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


@dataclass(frozen=True)
class Sizes:
    """The sizes of one iteration: global over all ranks, except for the micro-batch.

    :class:`~lit_vgrpo.data.module.PromptDataModule` checks their ranges.

    Args:
        prompts_per_iteration: Prompts, hence groups, of one iteration over all ranks.
        group_size: Images per prompt, at least 2.
        updates_per_iteration: Optimizer steps of one iteration.
        micro_batch_size: Maximum number of images in a rank's forward and backward pass; ``"auto"`` until a size is
            chosen.
        split_updates: Every update uses a different share of the images, instead of all of them.
        ranks: Number of ranks that share the iteration; only :attr:`shared_passes` uses it.
    """

    prompts_per_iteration: int
    group_size: int
    updates_per_iteration: int = 1
    micro_batch_size: int | Literal["auto"] = MICRO_BATCH_SIZE
    split_updates: bool = False
    ranks: int = 1

    @property
    def uses_per_image(self) -> int:
        """Number of updates of an iteration that train on one image."""
        return self.updates_per_iteration // self._shares

    @property
    def _shares(self) -> int:
        """Number of shares that the images of an iteration are divided into."""
        return self.updates_per_iteration if self.split_updates else 1

    @property
    def holds_whole_groups(self) -> bool:
        """True if every micro-batch is known to consist of whole groups."""
        return self.micro_batch_size != "auto" and self.micro_batch_size % self.group_size == 0

    @property
    def splits_groups(self) -> bool:
        """True if an update trains on only part of a group."""
        return self.split_updates and self.prompts_per_iteration % self.updates_per_iteration != 0

    @property
    def shared_passes(self) -> float:
        """Passes per image for a pair that a group shares: one for each part of a group in a micro-batch.

        >>> [Sizes(6, 4, micro_batch_size=size).shared_passes for size in (4, 12, 2)]
        [0.25, 0.25, 0.5]
        >>> round(Sizes(3, 4, updates_per_iteration=2, micro_batch_size=3, split_updates=True).shared_passes, 3)
        0.667
        """
        group = self.group_size // max(1, self.ranks // self.prompts_per_iteration)
        if self.splits_groups and self.group_size % self.updates_per_iteration == 0:  # each update has a part of it
            group //= self.updates_per_iteration
        share = self.images_per_share(self.ranks)
        micro = share if self.micro_batch_size == "auto" else min(self.micro_batch_size, share)
        period = lcm(group, micro)
        return 1 / group + 1 / micro - 1 / period

    @property
    def later_share(self) -> float:
        """Share of the images that an iteration's first update does not train on, in [0, 1]; 1 if all updates do."""
        return (self._shares - 1) / self._shares if self._shares > 1 else 1.0

    def images_per_share(self, world_size: int) -> int:
        """Return the images of one update on a rank, of which a micro-batch is a part."""
        return self.prompts_per_iteration * self.group_size // world_size // self._shares

    def smallest(self, world_size: int) -> Sizes:
        """Return the sizes with the fewest prompts that divide over ranks, and the same memory per micro-batch."""
        prompts, updates = self.prompts_per_iteration, self.updates_per_iteration
        for fewer in range(1, prompts):
            smaller = replace(self, prompts_per_iteration=fewer)
            # keep whether whole groups or the images of each group are divided among updates
            is_alike = not self.split_updates or bool(fewer % updates) == bool(prompts % updates)
            if is_alike and not smaller.errors(world_size):
                return smaller
        return self

    def update_of(self, slot: int, member: int) -> int:
        """Return the update that trains on image ``member`` of group ``slot``, if every update uses a different share.

        Whole groups are assigned in turn if there are enough of them, else the images of each group, so that an update
        trains on the same images on any number of ranks.
        """
        updates = self.updates_per_iteration
        if self.prompts_per_iteration % updates == 0:
            return slot % updates
        if self.group_size % updates == 0:
            return member % updates
        return (slot * self.group_size + member) * updates // (self.prompts_per_iteration * self.group_size)

    def rank_share(self, world_size: int, rank: int) -> tuple[range, range]:
        """Return a rank's group slots, and the images of each that it samples: all, unless groups are split."""
        plan = self.plan(world_size)
        if plan.ranks_per_group == 1:
            first = rank * plan.groups_per_rank
            return range(first, first + plan.groups_per_rank), range(self.group_size)
        slot, part = divmod(rank, plan.ranks_per_group)
        return range(slot, slot + 1), range(part * plan.images_per_rank, (part + 1) * plan.images_per_rank)

    def _divides_over(self, world_size: int) -> bool:
        """Return whether every rank gets the same number of whole groups, or an equal part of one."""
        prompts = self.prompts_per_iteration
        if world_size <= prompts:
            return prompts % world_size == 0
        return world_size % prompts == 0 and self.group_size % (world_size // prompts) == 0

    def _shares_out_over(self, world_size: int) -> bool:
        """Return whether every rank has the same number of images for each update."""
        prompts, updates = self.prompts_per_iteration, self.updates_per_iteration
        if not self.split_updates:
            return True
        if prompts % updates == 0:
            return prompts % (world_size * updates) == 0
        if self.group_size % updates == 0:
            return self.group_size // max(1, world_size // prompts) % updates == 0
        return world_size == 1 and prompts * self.group_size % updates == 0

    def errors(self, world_size: int) -> list[str]:
        """Return the first error of these sizes on ``world_size`` ranks, in one line, or nothing."""
        prompts, updates = self.prompts_per_iteration, self.updates_per_iteration
        images = prompts * self.group_size
        if self.split_updates and images % updates:
            return [
                f"updates_per_iteration={updates} cannot divide {images} images. "
                f"Use a divisor of {images}, or split_updates=false."
            ]
        if not self._divides_over(world_size):
            return [
                f"prompts_per_iteration={prompts} cannot be split over {world_size} ranks. "
                f"Use a multiple of {world_size}."
            ]
        if not self._shares_out_over(world_size):
            return [
                f"updates_per_iteration={updates} cannot divide the images equally on {world_size} ranks. "
                "Use split_updates=false, or another number of trainer.devices."
            ]
        share = self.images_per_share(world_size)
        if self.micro_batch_size != "auto" and share % min(self.micro_batch_size, share):
            whose = "one update on a rank" if self.split_updates else "a rank"
            wanted = self.micro_batch_size
            fitting = min(divisors(share), key=lambda divisor: abs(divisor - wanted))
            given = f"{wanted}{' (the default)' * (wanted == MICRO_BATCH_SIZE)}"
            return [
                f"micro_batch_size={given} cannot split the {share} images of {whose}. "
                f"Use a divisor of {share}, such as {fitting}."
            ]
        return []

    def plan(self, world_size: int) -> Plan:
        """Return the plan of an iteration on ``world_size`` ranks; ValueError with the first of :meth:`errors`."""
        if errors := self.errors(world_size):
            raise ValueError(errors[0])
        images = self.prompts_per_iteration * self.group_size
        share = self.images_per_share(world_size)
        size = 1 if self.micro_batch_size == "auto" else min(self.micro_batch_size, share)
        micro_batches = share // size
        return Plan(
            prompts_per_iteration=self.prompts_per_iteration,
            group_size=self.group_size,
            updates_per_iteration=self.updates_per_iteration,
            micro_batch_size=size,
            world_size=world_size,
            images_per_iteration=images,
            groups_per_rank=max(1, self.prompts_per_iteration // world_size),
            ranks_per_group=max(1, world_size // self.prompts_per_iteration),
            images_per_rank=images // world_size,
            images_per_update=images // self._shares,
            micro_batches_per_update=micro_batches,
            is_settled=self.micro_batch_size != "auto",
        )


def divisors(number: int) -> list[int]:
    """Return all divisors, smallest first."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def group_layout(slots: Sequence[int], group_size: int, members: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Return each image's row among the groups and its global index, both ``(B,)``, group by group.

    >>> group_layout([3], group_size=4, members=range(2, 4))
    (tensor([0, 0]), tensor([14, 15]))
    """
    local = torch.arange(group_size) if members is None else torch.tensor(members, dtype=torch.int64)
    rows = torch.arange(len(slots)).repeat_interleave(len(local))
    return rows, torch.tensor(slots, dtype=torch.int64)[rows] * group_size + local.repeat(len(slots))
