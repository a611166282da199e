"""The order of prompts and steps: pure functions of (seed, iteration, rank)."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

ROUNDS = 6
"""Of the Feistel network."""
LARGEST_IN_MEMORY = 1_000_000
"""Datasets up to this size are shuffled in a list, larger ones by a permutation that needs no memory."""


def shuffled_index(key: str, index: int, size: int) -> int:
    """Return entry ``index`` of a permutation of ``range(size)`` determined by the key.

    A Feistel network over the next even number of bits, applied until the result is in range: at most four times on
    average.

    >>> sorted(shuffled_index("any key", index, 10) for index in range(10)) == list(range(10))
    True

    Args:
        key: the same key gives the same order, on every platform.
        index: 0 to ``size - 1``.
        size: length of the range.

    Source:
        Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002): cycle walking over a Feistel network.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        index = _encrypted(key, index, half)
        if index < size:
            return index


def _encrypted(key: str, value: int, half: int) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for number in range(ROUNDS):
        digest = blake2b(f"{key} {number} {right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
    return left << half | right


@lru_cache(maxsize=16)
def _shuffled_pass(key: str, dataset_size: int) -> Sequence[int]:
    order = list(range(dataset_size))
    # random.Random seeded with text gives the same order on every Python and platform
    random.Random(key).shuffle(order)
    return array("q", order)


def prompt_index(seed: int, position: int, dataset_size: int, source: int = 0) -> int:
    """Return the prompt at a position in consecutive shuffled passes over a dataset.

    Args:
        seed: seed of the order.
        position: from 0, without end.
        dataset_size: number of prompts.
        source: number of the dataset among several, so that each has its own order.

    Returns:
        An index into the dataset.
    """
    pass_index, offset = divmod(position, dataset_size)
    key = f"prompts {seed} {pass_index}" + (f" source {source}" if source else "")
    if dataset_size > LARGEST_IN_MEMORY:
        return shuffled_index(key, offset, dataset_size)
    return _shuffled_pass(key, dataset_size)[offset]


def prompt_indices(seed: int, iteration: int, prompts_per_iteration: int, dataset_size: int) -> list[int]:
    """Return the prompts of one iteration, the next slice of consecutive shuffled passes over the dataset.

    No prompt occurs twice within a pass; an iteration that needs more prompts than remain continues with the next
    pass. The result does not depend on the number of ranks.

    Returns:
        ``prompts_per_iteration`` indices into the dataset; entry k is the prompt of group slot k.
    """
    start = iteration * prompts_per_iteration
    return [prompt_index(seed, position, dataset_size) for position in range(start, start + prompts_per_iteration)]


class GroupSampler(DistributedSampler[Any]):
    """Sampler of the steps of one iteration in order: ``iteration * steps + step``.

    A ``DistributedSampler``, so that Lightning keeps it and sets its epoch, which is the iteration. Every rank goes
    through the same steps; the dataset maps them to the rank's prompts.

    Args:
        dataset: the training dataset.
        steps_per_iteration: steps of one iteration, the same on every rank.
        num_replicas: ranks.
        rank: this rank.
        seed: unused; the order of prompts comes from :func:`prompt_indices`.
        first_step: where the first iteration continues if it was interrupted; later ones start at 0.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        steps_per_iteration: int,
        num_replicas: int = 1,
        rank: int = 0,
        seed: int = 0,
        first_step: int = 0,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False, seed=seed)
        self.steps_per_iteration = steps_per_iteration
        self.first_step = first_step

    def __iter__(self) -> Iterator[int]:
        start = self.epoch * self.steps_per_iteration
        first, self.first_step = self.first_step, 0
        return iter(range(start + first, start + self.steps_per_iteration))

    def __len__(self) -> int:
        return self.steps_per_iteration


class LocalSampler(DistributedSampler[Any]):
    """Sampler of every item, for a dataset that already has only this rank's share."""

    def __init__(self, dataset: Dataset[Any], num_replicas: int = 1, rank: int = 0) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]
