"""The four numbers of an iteration, and what they make of a world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

DEVICE_COUNTS_NAMED = 8  # how far the list of world sizes that would work goes, at least


@dataclass(frozen=True)
class Plan:
    """What one iteration is on a given number of ranks. "Local" numbers are per rank."""

    prompts_per_iteration: int
    group_size: int
    updates_per_iteration: int
    micro_batch_size: int
    world_size: int
    images_per_iteration: int
    groups_per_rank: int
    images_per_rank: int
    images_per_update: int
    micro_batches_per_update: int
    steps_per_iteration: int  # = length of the training loader on every rank

    def table(self, passes_per_image: Mapping[str, int] | None = None) -> str:
        """The plan as aligned text.

        Args:
            passes_per_image: network passes an image by phase, such as ``{"rollout": 10, "train": 4}``; each phase adds
                a row with the passes of one iteration over all ranks.
        """
        rows = [
            ("prompts", str(self.prompts_per_iteration)),
            ("images", f"{self.images_per_iteration} ({self.group_size} a prompt)"),
            ("ranks", str(self.world_size)),
            ("groups a rank", str(self.groups_per_rank)),
            ("images a rank", str(self.images_per_rank)),
            ("micro-batches an update", f"{self.micro_batches_per_update} of {self.micro_batch_size} images"),
            ("updates", f"{self.updates_per_iteration} on {self.images_per_update} images each"),
            ("steps an iteration", str(self.steps_per_iteration)),
        ]
        for phase, passes in (passes_per_image or {}).items():
            total = passes * self.images_per_iteration
            rows.append((f"network passes, {phase}", f"{total:g} ({passes:g} an image)"))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


@dataclass(frozen=True)
class Sizes:
    """How much one iteration takes: global over all ranks, but for the micro-batch.

    Args:
        prompts_per_iteration: prompts, hence groups, of one iteration over all ranks.
        group_size: images per prompt, at least 2.
        updates_per_iteration: optimizer steps of one iteration.
        micro_batch_size: images one rank takes through one forward and backward pass.
        split_updates: every update takes its own share of the images, instead of all of them.
    """

    prompts_per_iteration: int
    group_size: int
    updates_per_iteration: int = 1
    micro_batch_size: int = 8
    split_updates: bool = False

    @property
    def uses_per_image(self) -> int:
        """How many updates of an iteration train on one image."""
        return self.updates_per_iteration // self._shares

    @property
    def _shares(self) -> int:
        """Into how many shares the images of an iteration are cut."""
        return self.updates_per_iteration if self.split_updates else 1

    def _numbers(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "split_updates"}

    def type_faults(self) -> list[str]:
        """The numbers that are not whole numbers, one line each."""
        return [
            f"{name}={value!r} is not a whole number. Use an integer such as {max(2, _as_int(value))}."
            for name, value in self._numbers().items()
            if not isinstance(value, int) or isinstance(value, bool)
        ]

    def value_faults(self) -> list[str]:
        """The faults that do not depend on the number of ranks, one line each."""
        faults = self.type_faults()
        if faults:
            return faults
        for name, value in self._numbers().items():
            if name == "group_size" and value < 2:
                faults.append(f"group_size={value} has no group to compare with. Use 2 or more images per prompt.")
            elif value < 1:
                faults.append(f"{name}={value} is too small. Use 1 or more.")
        return faults

    def faults(self, world_size: int) -> list[str]:
        """All faults of these sizes on ``world_size`` ranks, one line each; empty when they fit."""
        faults = self.value_faults()
        if world_size < 1:
            faults.append(f"world_size={world_size} is too small. Use 1 or more ranks.")
        if faults:
            return faults
        prompts, group = self.prompts_per_iteration, self.group_size
        if prompts % world_size:
            counts = _divisors(prompts, max(DEVICE_COUNTS_NAMED, world_size))
            return [
                f"prompts_per_iteration={prompts} cannot be split over {world_size} ranks. "
                f"Use a multiple of {world_size}, or trainer.devices {_either(counts)}."
            ]
        images = prompts // world_size * group
        if self.split_updates and images % self.updates_per_iteration:
            working = _nearest_divisors(images, self.updates_per_iteration)
            return [
                f"updates_per_iteration={self.updates_per_iteration} cannot share out the {images} images of a rank. "
                f"Use {_either(working)}, or split_updates=false."
            ]
        share = images // self._shares
        if share % self.micro_batch_size:
            working = _nearest_divisors(share, self.micro_batch_size)
            whose = "one update on a rank" if self.split_updates else "a rank"
            return [
                f"micro_batch_size={self.micro_batch_size} cannot split the {share} images of {whose}. "
                f"Use {_either(working)}."
            ]
        return []

    def plan(self, world_size: int) -> Plan:
        """What one iteration is on ``world_size`` ranks.

        Raises:
            ValueError: the sizes do not fit this world size (the first of :meth:`faults`).
        """
        faults = self.faults(world_size)
        if faults:
            raise ValueError(faults[0])
        groups = self.prompts_per_iteration // world_size
        images = groups * self.group_size
        micro_batches = images // self._shares // self.micro_batch_size
        return Plan(
            prompts_per_iteration=self.prompts_per_iteration,
            group_size=self.group_size,
            updates_per_iteration=self.updates_per_iteration,
            micro_batch_size=self.micro_batch_size,
            world_size=world_size,
            images_per_iteration=self.prompts_per_iteration * self.group_size,
            groups_per_rank=groups,
            images_per_rank=images,
            images_per_update=self.prompts_per_iteration * self.group_size // self._shares,
            micro_batches_per_update=micro_batches,
            steps_per_iteration=micro_batches * self.updates_per_iteration,
        )


def _as_int(value: object) -> int:
    try:
        return int(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 8


def _divisors(number: int, up_to: int) -> list[int]:
    return [d for d in range(1, min(number, up_to) + 1) if number % d == 0]


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    divisors = _divisors(number, number)
    below = [d for d in divisors if d < wanted]
    above = [d for d in divisors if d > wanted]
    return below[-1:] + above[:1]


def _either(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    return ", ".join(str(n) for n in numbers[:-1]) + f" or {numbers[-1]}"
