"""Access to parameters stored whole, as shards of a DTensor (FSDP2), or as partitions of DeepSpeed's ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def _is_zero3(parameter: Any) -> bool:
    return hasattr(parameter, "ds_tensor")


def is_sharded(parameter: Tensor) -> bool:
    """Return whether this rank holds only a part of the parameter."""
    return isinstance(parameter, DTensor) or _is_zero3(parameter)


def shape_of(parameter: Any) -> torch.Size:
    """Return the shape of the full parameter."""
    return torch.Size(parameter.ds_shape) if _is_zero3(parameter) else parameter.shape


def local(parameter: Any) -> Tensor:
    """Return this rank's values, detached; write them only with :func:`write`."""
    if isinstance(parameter, DTensor):
        with torch.no_grad():
            return parameter.to_local()
    if _is_zero3(parameter):
        return parameter.ds_tensor.detach()
    return parameter.detach()


@torch.no_grad()
def write(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write local values to parameters, converting type and device."""
    targets, sources = [local(parameter) for parameter in parameters.values()], [values[name] for name in parameters]
    if all(target.device == source.device for target, source in zip(targets, sources, strict=True)):
        torch._foreach_copy_(targets, sources)
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
    _forget_gathered(parameters.values())


def _forget_gathered(parameters: Iterable[Any]) -> None:
    """Make ZeRO-3 gather again: it keeps small parameters gathered and prefetches others, both with old values.

    DeepSpeed gathers on a separate stream, without waiting for writes on the default stream.
    """
    for parameter in parameters:
        if _is_zero3(parameter):
            from deepspeed.accelerator import get_accelerator

            get_accelerator().synchronize()
            parameter.forget_gathered()  # of the whole model; training/sharded.py sets it
            return


@torch.no_grad()
def cut(parameter: Any, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor of the parameter's shape, as long as :func:`local`."""
    if isinstance(parameter, DTensor):
        return laid_out_as(parameter, whole).to_local()
    if _is_zero3(parameter):
        size, rank = parameter.ds_tensor.numel(), dist.get_rank(parameter.ds_process_group)
        part = whole.flatten()[rank * size : (rank + 1) * size]
        return F.pad(part, (0, size - part.numel()))  # the last partition is padded
    return whole


def laid_out_as(parameter: DTensor, whole: Tensor) -> DTensor:
    """Return a whole tensor, which every rank has, sharded as the parameter is."""
    mesh = parameter.device_mesh
    # None: every rank takes its part, without communication.
    return distribute_tensor(whole.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)


@torch.no_grad()
def full(parameter: Any, values: Tensor) -> Tensor:
    """Gather the full tensor of which each rank has ``values``, laid out as by :func:`local`; all ranks must call it.

    If gathered, it is on the CPU on rank 0, and on the meta device, which saves memory, on ranks that do not need it.
    """
    if not is_sharded(parameter):
        return values
    whole = _gather_dtensor(parameter, values) if isinstance(parameter, DTensor) else _gather_zero3(parameter, values)
    return whole.to("cpu" if dist.get_rank() == 0 else "meta")


def _gather_dtensor(parameter: DTensor, values: Tensor) -> Tensor:
    mesh = parameter.device_mesh
    shards = DTensor.from_local(
        values.to(mesh.device_type),
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return shards.full_tensor()


def _gather_zero3(parameter: Any, values: Tensor) -> Tensor:
    from deepspeed.accelerator import get_accelerator

    group = parameter.ds_process_group
    values = values.to(get_accelerator().current_device_name()).contiguous()
    whole = values.new_empty(values.numel() * dist.get_world_size(group))
    dist.all_gather_into_tensor(whole, values, group=group)
    return whole[: parameter.ds_numel].view(parameter.ds_shape)
