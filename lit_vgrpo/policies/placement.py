"""Of which type modules are, and on which device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


def place(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Move what is elsewhere, to stay."""
    for module in modules:
        if any(tensor.device != device for tensor in chain(module.parameters(), module.buffers())):
            module.to(device)


@contextmanager
def placed(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Frozen modules on a device for a while; then their own tensors are back, and nothing had to be copied back."""
    own = [slot for module in modules for slot in _slots(module) if slot[2].device != device]
    moved: dict[int, Tensor] = {}  # a tensor may stand under several names
    try:
        for tensors, name, tensor in own:
            if id(tensor) not in moved:
                there = tensor.detach().to(device)
                moved[id(tensor)] = nn.Parameter(there, False) if isinstance(tensor, nn.Parameter) else there
            tensors[name] = moved[id(tensor)]
        yield
    finally:
        for tensors, name, tensor in own:
            tensors[name] = tensor


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Change a module's floating-point type, where it is another (diffusers warns of every cast that it is told of).

    In float16, layers that would overflow (T5's ``wo``) are of float32, as ``from_pretrained`` leaves them.
    """
    wide = set(getattr(module, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else set()
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        wanted = torch.float32 if wide.intersection(name.split(".")) else dtype
        if tensor.is_floating_point() and tensor.dtype != wanted:
            tensor.data = tensor.data.to(wanted)


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Where a module keeps its tensors: the table, the name in it, the tensor."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield tensors, name, tensor
