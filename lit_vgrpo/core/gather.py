"""Collectives over all ranks; without a process group every function is the identity."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor

# If torch.distributed.nn is first imported while a group exists, for example by a library, it keeps that group in
# default arguments. The group's threads then outlive destroy_process_group and abort the process at exit.

T = TypeVar("T")


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the world size."""
    return (dist.get_rank(), dist.get_world_size()) if _is_group() else (0, 1)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors, of equal shape, on the CPU."""
    if not _is_group():
        return values
    total = values.to(_device(), copy=True)
    dist.all_reduce(total)
    return total.cpu()


def of_all_ranks(values: Tensor) -> Tensor:
    """Return every rank's ``(B, ...)``, of equal shapes, concatenated in rank order, on the CPU."""
    if not _is_group():
        return values.cpu()
    local = values.detach().to(_device()).contiguous()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    return torch.cat(parts).cpu()


def rows_of_all_ranks(values: Tensor) -> Tensor:
    """Return all ranks' rows ``(n, ...)`` in rank order, on the CPU; ``n`` may differ between ranks."""
    counts = of_all_ranks(torch.tensor([len(values)])).tolist()
    padded = values.new_zeros((max(counts), *values.shape[1:]))
    padded[: len(values)] = values
    parts = of_all_ranks(padded).chunk(len(counts))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def objects_of_all_ranks(value: T) -> list[T]:
    """Return all ranks' objects, which must be small, in rank order."""
    if not _is_group():
        return [value]
    gathered: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def raise_together(error: Exception | None) -> None:
    """Raise any rank's error on every rank, so that none hangs in the next collective."""
    failed = [other for other in objects_of_all_ranks(error) if other is not None]
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
