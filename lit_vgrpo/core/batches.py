"""Batches of a fixed size, so that a network's output for a row does not depend on its batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BATCH_SIZE = 8
"""Default images per batch: few enough for a large model, and little padding."""


def at_most(rows: int, batch_size: int | None) -> int | None:
    """Return ``batch_size``, or ``rows`` if all ranks together have fewer; 0 rows means unknown."""
    return min(batch_size, rows) if batch_size and rows else batch_size


def filled(rows: Tensor, size: int) -> Tensor:
    """Pad to at least ``size`` rows by repeating the last one.

    >>> filled(torch.tensor([1, 2]), 4).tolist()
    [1, 2, 2, 2]
    """
    missing = size - len(rows)
    return rows if missing <= 0 else torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])])


def in_batches(function: Callable[..., Tensor], size: int, *columns: Tensor) -> Tensor:
    """Return a function of all rows, computed with exactly ``size`` rows at a time.

    A different number of rows may use another kernel and round differently: with a smaller last batch, the last bits of
    a row would depend on how rows are distributed over calls and ranks. So it is padded.

    Args:
        function: Takes ``size`` rows of each column and returns as many rows.
        columns: Tensors with the same number of rows, at least one.
    """
    results = []
    for start in range(0, len(columns[0]), size):
        own = [column[start : start + size] for column in columns]
        results.append(function(*(filled(rows, size) for rows in own))[: len(own[0])])
    return torch.cat(results)
