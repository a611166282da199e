"""Scores of a few images by every reward of a recipe, and warnings before a long run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_vgrpo.cli.score.images import batches_of
from lit_vgrpo.cli.score.report import aligned
from lit_vgrpo.core.advantages import no_spread_share
from lit_vgrpo.rewards import Scores, Weighted
from lit_vgrpo.rewards.scores import image_batch
from lit_vgrpo.system.memory import MemoryUse, measured_memory

TOTAL = "total"
HEADER = ("reward", "weight", "mean", "std", "min", "max", "failed", "no spread", "s/image", "memory")


@dataclass
class PartTrial:
    """Result of one reward.

    Attributes:
        weight: ``None`` for the sum.
        scores: ``(n,)``, of the images that the reward applies to; NaN where it failed.
        groups: ``(n,)``, index of each image's prompt.
        seconds: Wall time for all images, after a warm-up.
        error: The last failure, if any.
        memory: Memory that loading and scoring took.
    """

    name: str
    weight: float | None
    scores: Tensor
    groups: Tensor
    seconds: float
    error: str | None = None
    memory: MemoryUse | None = None

    @property
    def finite(self) -> Tensor:
        return self.scores[self.scores.isfinite()]

    @property
    def failed(self) -> int:
        return len(self.scores) - len(self.finite)

    @property
    def seconds_per_image(self) -> float:
        return self.seconds / max(1, len(self.scores))

    @property
    def flat_share(self) -> float | None:
        """Share of the prompts whose images all score the same; ``None`` where none has two scored images."""
        sound = self.scores.isfinite()
        prompts, counts = self.groups[sound].unique(return_counts=True)
        kept = sound & torch.isin(self.groups, prompts[counts > 1])
        return no_spread_share(self.scores[kept], self.groups[kept]) if kept.any() else None

    @property
    def is_constant(self) -> bool:
        return len(self.finite) > 1 and float(self.finite.max() - self.finite.min()) == 0

    def row(self) -> list[str]:
        values, flat = self.finite.double(), self.flat_share
        numbers = [values.mean(), values.std(correction=0), values.min(), values.max()] if len(values) else []
        return [
            self.name,
            "" if self.weight is None else f"{self.weight:.3g}",
            *([f"{float(number):.4f}" for number in numbers] or ["-"] * 4),
            str(self.failed),
            "-" if flat is None else f"{flat:.0%}",
            f"{self.seconds_per_image:.4f}",
            "" if self.memory is None else str(self.memory),
        ]


def trials(
    reward: Weighted, images: Iterable[Tensor], rows: Sequence[Mapping[str, Any]], groups: Tensor, batch_size: int
) -> list[PartTrial]:
    """Score images with each reward in turn, then as a sum.

    Args:
        images: Each ``(1, 3, H, W)``.
        rows: The prompt's row of each image.
        groups: ``(N,)``, index of each image's prompt.
        batch_size: Images per call of a reward, at most.
    """
    batches = list(batches_of(images, rows, batch_size))
    prepared = [image_batch(batch.images, batch.prompts, batch.rows) for batch in batches]
    found: dict[str, list[Scores]] = {}
    memory: dict[str, MemoryUse] = {}
    for part in reward.parts:
        with measured_memory() as memory[part.name]:
            part.reward.load()
            reward.score_part(part, prepared[0])  # the first call of a model takes longer
            found[part.name] = [reward.score_part(part, batch) for batch in prepared]
    whole = Scores.joined(
        [
            reward.summed({name: scores[index] for name, scores in found.items()}, batch.rows)
            for index, batch in enumerate(batches)
        ]
    )
    parts = []
    for part in reward.parts:
        applies = whole.applies_to(part.name)
        scores, seconds = whole.parts[part.name][applies], whole.seconds[part.name]
        error, used = whole.errors.get(part.name), memory[part.name]
        parts.append(PartTrial(part.name, part.weight, scores, groups[applies], seconds, error, used))
    return [*parts, PartTrial(TOTAL, None, whole.total, groups, sum(whole.seconds.values()))]


def trial_table(parts: Sequence[PartTrial]) -> str:
    """Return a table with a row per reward, the sum last."""
    return aligned([HEADER, *(part.row() for part in parts)])


def findings(parts: Sequence[PartTrial]) -> list[str]:
    """Return the warnings before a long run; ``parts`` are those of :func:`trials`."""
    found = [
        f"{part.name} failed for {part.failed} of {len(part.scores)} images: {part.error}"
        for part in parts
        if part.failed and part.name != TOTAL
    ]
    constant = [part for part in parts if part.is_constant]
    for part in [part for part in constant if part.name != TOTAL] or constant:
        value = f"{part.name} is constant ({float(part.finite[0]):.4g}) on {len(part.finite)} images"
        found.append(f"{value}, so nothing is learned from it. Check the prompts, or try more with --num-prompts.")
    total = parts[-1]
    if not constant and total.flat_share == 1.0:
        found.append("No prompt has images that differ in reward, so there is no gradient. Try --images-per-prompt 8.")
    return found
