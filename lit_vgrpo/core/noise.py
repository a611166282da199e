"""Seeded random streams, and unit Gaussian noise drawn from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

# A new use gets a new number, so that runs stay reproducible.
STREAM_ROLLOUT, STREAM_PAIRS, STREAM_HELDOUT, STREAM_DATA = 1, 2, 3, 4
STREAM_GROUP_NOISE, STREAM_SDE, STREAM_TIMES, STREAM_STEPS = 5, 6, 7, 8
STREAM_BASES = 9
STREAM_ACTIVE, STREAM_RENOISED, STREAM_CROPS = 12, 13, 14

WORTH_A_THREAD = 2**18
"""Number of values below which one thread is faster than several: about 1 ms of work."""


def seed_of_run(seed: int | None) -> int:
    """Return the seed, or for ``None`` that of Lightning's ``seed_everything``, or 0 if it was not called."""
    return int(os.environ.get("PL_GLOBAL_SEED") or 0) if seed is None else seed


def seeded_generator(*key: int) -> torch.Generator:
    """Return a CPU generator whose stream depends only on ``key``, not on rank or history."""
    seed = np.random.SeedSequence([k & 0xFFFFFFFF for k in key]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed) & 0x7FFFFFFFFFFFFFFF)


def image_generators(stream: int, seed: int, iteration: int, image_ids: Sequence[int]) -> list[torch.Generator]:
    """Return one generator per image, seeded from (seed, stream, iteration, global image index)."""
    return [seeded_generator(seed, stream, iteration, index) for index in image_ids]


def unit_noise(generators: Sequence[torch.Generator], shape: Sequence[int]) -> Tensor:
    """Return unit Gaussian noise ``(K, *shape)`` on the CPU, one row per generator.

    The GPU waits for the rows, so they are drawn on torch's number of threads, which does not affect their values.
    torch itself uses one thread.
    """
    with torch.inference_mode(False):  # other threads do not inherit the mode
        noise = torch.empty(len(generators), *shape, device="cpu")

    def draw(row: Tensor, generator: torch.Generator) -> None:
        row.normal_(generator=generator)

    if noise.numel() < WORTH_A_THREAD or torch.get_num_threads() == 1:
        list(map(draw, noise, generators))
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(draw, noise, generators))
    return noise
