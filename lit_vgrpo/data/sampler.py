"""The order of prompts and steps: pure functions of (seed, iteration, rank)."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from lit_vgrpo.data.prompts import TableRows
from lit_vgrpo.data.rows import Rows


@lru_cache(maxsize=64)
def _shuffled_pass(key: str, dataset_size: int) -> Sequence[int]:
    order = array("q", range(dataset_size))
    # random.Random seeded with text gives the same order on every Python and platform
    random.Random(key).shuffle(order)
    return order


def prompt_index(seed: int, position: int, dataset_size: int, source: int = 0) -> int:
    """Return the prompt at a position in consecutive shuffled passes over a dataset, in [0, dataset_size).

    No prompt occurs twice within a pass, and the result does not depend on the number of ranks.

    Args:
        seed: seed of the order.
        position: from 0, without end.
        dataset_size: number of prompts.
        source: number of the dataset among several, so that each has a different order.
    """
    pass_index, offset = divmod(position, dataset_size)
    key = f"prompts {seed} {pass_index}" + (f" source {source}" if source else "")
    return _shuffled_pass(key, dataset_size)[offset]


def place_in_mixture(position: int, weights: Sequence[int]) -> tuple[int, int]:
    """Return the source for a position in the endless prompt sequence, and how many earlier positions it had.

    Sources are split in halves recursively; each half gets its rounded share of the positions. Any prefix is therefore
    within half a position per split of the exact shares, without keeping state.

    >>> [place_in_mixture(position, [3, 1])[0] for position in range(8)]
    [0, 0, 1, 0, 0, 0, 1, 0]

    Args:
        position: from 0.
        weights: shares as whole numbers, see :func:`whole_weights`.
    """
    first, last = 0, len(weights)
    while last - first > 1:
        middle = (first + last) // 2
        part, whole = sum(weights[first:middle]), sum(weights[first:last])
        before, after = ((2 * n * part + whole) // (2 * whole) for n in (position, position + 1))
        if after > before:
            position, last = before, middle
        else:
            position, first = position - before, middle
    return first, position


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Convert the weights to whole numbers in exactly the same ratio.

    >>> whole_weights([0.1, 1, 2.5])
    [1, 10, 25]
    """
    shares = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * common) for share in shares]
    return [share // math.gcd(*whole) for share in whole]


class PromptMixture:
    """A mixture of training prompt sources, each shuffled and repeated independently.

    Args:
        sources: their rows.
        weights: their shares; equal by default.
    """

    def __init__(self, sources: Sequence[Rows | TableRows], weights: Sequence[float] | None = None) -> None:
        self.sources = sources
        self.weights = whole_weights(weights if weights is not None else [1.0] * len(sources))

    def rows(self, seed: int, positions: Sequence[int]) -> Rows:
        """Return the rows at positions of the endless prompt sequence: a pure function of seed and position."""
        places = [place_in_mixture(position, self.weights) for position in positions]
        return [
            self.sources[number][prompt_index(seed, position, len(self.sources[number]), number)]
            for number, position in places
        ]


class GroupSampler(DistributedSampler[Any]):
    """Sampler of the steps of one iteration in order: ``iteration * steps + step``.

    A ``DistributedSampler``, so that Lightning keeps it and sets its epoch, which is the iteration. Every rank goes
    through the same steps; the dataset maps them to the rank's prompts.

    Args:
        dataset: the training dataset, whose length is the number of steps.
        num_replicas: ranks.
        rank: this rank.
        first_step: where the first iteration continues if it was interrupted; later ones start at 0.
    """

    def __init__(self, dataset: Dataset[Any], num_replicas: int = 1, rank: int = 0, first_step: int = 0) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False)
        self.first_step = first_step

    def __iter__(self) -> Iterator[int]:
        first, self.first_step = self.first_step, 0
        return iter(range(self.epoch * len(self) + first, (self.epoch + 1) * len(self)))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


class LocalSampler(GroupSampler):
    """Sampler of every item, for a dataset that already has only this rank's share."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: every epoch has the same items."""
