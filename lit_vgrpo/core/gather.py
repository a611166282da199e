"""Collectives over all ranks; without a process group every function is the identity.

Processes that share the tokens of their images (context parallelism) have the same images and count as one rank. A
rank's values are those of its first process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor

# If torch.distributed.nn is first imported while a group exists, for example by a library, it keeps that group in
# default arguments. The group's threads then outlive destroy_process_group and abort the process at exit.

T = TypeVar("T")
AT_ONCE = 2**24
_per_rank = 1  # processes


class RanksOfTrainer(Protocol):
    """What the number of ranks depends on in a Lightning Trainer, which this package does not import."""

    @property
    def strategy(self) -> Any: ...
    @property
    def global_rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...


def image_ranks(trainer: RanksOfTrainer) -> tuple[int, int]:
    """Return this process's rank and the number of ranks; processes that share images count as one rank."""
    processes = _processes_per_rank(trainer)
    return trainer.global_rank // processes, max(1, trainer.world_size // processes)


def count_ranks_of(trainer: RanksOfTrainer) -> None:
    """From now on, count processes that share images under a trainer's strategy as one rank."""
    global _per_rank
    _per_rank = _processes_per_rank(trainer)


def _processes_per_rank(trainer: RanksOfTrainer) -> int:
    return getattr(trainer.strategy, "context_parallel", 1)


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return (dist.get_rank() // _per_rank, dist.get_world_size() // _per_rank) if _is_group() else (0, 1)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors, of equal shape, on the CPU."""
    if not _is_group():
        return values
    total = values.to(_device(), copy=True)
    if dist.get_rank() % _per_rank:
        total.zero_()
    dist.all_reduce(total)
    return total.cpu()


def all_gather(values: Tensor, every_process: bool = False) -> Tensor:
    """Return every rank's ``(B, ...)``, of equal shapes, concatenated in rank order, on the CPU.

    Args:
        every_process: Return every process's, also of those that count as one rank.
    """
    if not _is_group():
        return values.cpu()
    local = values.detach().to(_device()).contiguous()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    return torch.cat(parts[:: 1 if every_process else _per_rank]).cpu()


def gather_to_first(values: Tensor) -> Tensor:
    """Return what :func:`all_gather` does in the first process, and no rows in others, which keep no memory for it.

    A GPU holds parts of at most :data:`AT_ONCE` bytes per rank, or one row per rank if a row is larger.
    """
    if not _is_group():
        return values.cpu()
    world, is_first = dist.get_world_size(), dist.get_rank() == 0
    total = torch.empty(world if is_first else 0, *values.shape, dtype=values.dtype)
    rows = max(1, AT_ONCE * len(values) // max(1, values.nbytes))
    for first in range(0, len(values), rows):
        local = values[first : first + rows].detach().to(_device()).contiguous()
        parts = [torch.empty_like(local) for _ in range(world)] if is_first else None
        dist.gather(local, parts)
        for rank, part in enumerate(parts or ()):
            total[rank, first : first + rows] = part
    return total[::_per_rank].flatten(0, 1)


def all_gather_rows(values: Tensor, gather: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return all ranks' rows ``(n, ...)`` in rank order, on the CPU; with :func:`gather_to_first`, in the first alone.

    ``n`` may differ between ranks. So may the other sides, as of embeddings of prompts: the ends are padded with zeros.
    """
    shapes = all_gather(torch.tensor([values.shape]))
    padded = values.new_zeros(shapes.amax(dim=0).tolist())
    padded[tuple(map(slice, values.shape))] = values
    whole = (gather or all_gather)(padded)
    parts = whole.split(len(padded)) if len(whole) else [whole]
    return torch.cat([part[:count] for part, count in zip(parts, shapes[:, 0].tolist(), strict=False)])


def all_gather_objects(value: T) -> list[T]:
    """Return all ranks' objects, which must be small, in rank order."""
    return _objects(value)[::_per_rank]


def _objects(value: T) -> list[T]:
    if not _is_group():
        return [value]
    gathered: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def raise_together(error: Exception | None) -> None:
    """Raise any process's error in every process, so that none hangs in the next collective."""
    failed = [other for other in _objects(error) if other is not None]
    if error is not None:
        raise error
    if failed:
        raise failed[0]


def _is_group() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _device() -> torch.device:
    # A process group with only NCCL takes no CPU tensors.
    is_cpu_able = "gloo" in str(dist.get_backend_config())
    return torch.device("cpu") if is_cpu_able else torch.device("cuda", torch.cuda.current_device())
