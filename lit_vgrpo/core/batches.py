"""Batches of one size, so that what a network makes of a row does not depend on how many rows came with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BATCH_SIZE = 8
"""Images in a batch unless a recipe says otherwise: few enough for a large model, and little to fill up."""


def at_most(rows: int, batch_size: int | None) -> int | None:
    """``batch_size``, or ``rows`` where there are fewer on all ranks together; 0 rows are not known."""
    return min(batch_size, rows) if batch_size and rows else batch_size


def filled(rows: Tensor, size: int) -> Tensor:
    """At least ``size`` rows: the last one is repeated.

    >>> filled(torch.tensor([1, 2]), 4).tolist()
    [1, 2, 2, 2]
    """
    missing = size - len(rows)
    return rows if missing <= 0 else torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])


def in_batches(of_batch: Callable[..., Tensor], size: int, *columns: Tensor) -> Tensor:
    """Return ``of_batch`` of all rows, computed with exactly ``size`` rows at a time.

    A matrix product or a convolution of another number of rows may take another kernel, which rounds otherwise. With
    a last smaller batch, the last bits of a row would depend on how rows are spread over calls and ranks.

    Args:
        of_batch: takes ``size`` rows of each column, and gives one row for each.
        size: rows of a batch; the last one is filled up.
        columns: at least one row of each; as many of all.
    """
    results = []
    for start in range(0, len(columns[0]), size):
        own = [column[start : start + size] for column in columns]
        results.append(of_batch(*(filled(rows, size) for rows in own))[: len(own[0])])
    return torch.cat(results)
