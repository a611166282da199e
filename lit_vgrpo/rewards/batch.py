"""The scores of a batch of images."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class RewardBatch:
    """The scores of a batch.

    Args:
        total: shape ``(B,)``, float32: the weighted sum; NaN where a reward of non-zero weight failed.
        parts: each reward's own scores by name, shape ``(B,)``, float32; NaN where it failed or does not apply.
        ok: shape ``(B,)``, bool: where ``total`` is a number.
        errors: the last failure of each reward that failed on any image.
        applies: by name, shape ``(B,)``, bool: where the reward applies; everywhere if a name is missing.
        seconds: by name, the reward's wall time.
        counts: by name, events that the reward counted, such as retries by cause.
    """

    total: Tensor
    parts: dict[str, Tensor]
    ok: Tensor
    errors: dict[str, str] = field(default_factory=dict)
    applies: dict[str, Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.total)

    def applies_to(self, name: str) -> Tensor:
        """Return where the reward applies, ``(B,)``, bool."""
        return self.applies.get(name, torch.ones_like(self.ok))

    @classmethod
    def empty(cls, size: int) -> RewardBatch:
        """Return a placeholder for images that are not scored."""
        return cls(torch.zeros(size), {}, torch.ones(size, dtype=torch.bool))

    @classmethod
    def joined(cls, batches: list[RewardBatch]) -> RewardBatch:
        """Concatenate batches of the same rewards, on the CPU."""
        names = list(batches[0].parts)
        counts = {name: Counter[str]() for batch in batches for name in batch.counts}
        for batch in batches:
            for name, own in batch.counts.items():
                counts[name].update(own)
        return cls(
            total=torch.cat([batch.total.cpu() for batch in batches]),
            parts={name: torch.cat([batch.parts[name].cpu() for batch in batches]) for name in names},
            ok=torch.cat([batch.ok.cpu() for batch in batches]),
            errors={name: message for batch in batches for name, message in batch.errors.items()},
            applies={name: torch.cat([batch.applies_to(name).cpu() for batch in batches]) for name in names},
            seconds={name: sum(batch.seconds.get(name, 0.0) for batch in batches) for name in names},
            counts={name: dict(own) for name, own in counts.items()},
        )
