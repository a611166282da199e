"""On which device modules are, of which type, and in which precision they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import chain
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")
Slot = tuple[dict[str, Any], str, Tensor]
"""Where a module keeps a tensor: the table, the name in it, the tensor."""


def with_cpu_default(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function make its tensors on the CPU, where everything is loaded and every initial weight is drawn.

    Lightning configures a model with the GPU as the default device, under some strategies: the same seed would draw
    another adapter there, and what diffusers makes would be on another device than what is loaded.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return call


def place(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Move what is elsewhere, to stay."""
    for module in modules:
        if any(tensor.device != device for tensor in chain(module.parameters(), module.buffers())):
            module.to(device)


@contextmanager
def placed(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Frozen modules on a device for a while; then their own tensors are back, and nothing had to be copied back."""
    own = [slot for module in modules for slot in _slots(module) if slot[2].device != device]
    with _replaced(own, lambda tensor: tensor.to(device)):
        yield


@contextmanager
def written_in(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Modules with all floating-point tensors in one type, on the CPU where that takes a copy, while they are saved."""
    slots = [slot for module in modules for slot in _slots(module)]
    own = [slot for slot in slots if slot[2].is_floating_point() and slot[2].dtype != dtype]
    with _replaced(own, lambda tensor: tensor.to("cpu", dtype)):
        yield


@contextmanager
def _replaced(own: Sequence[Slot], replacement: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Other tensors in place of a module's own for a while."""
    made: dict[int, Tensor] = {}  # a tensor may stand under several names
    try:
        for tensors, name, tensor in own:
            if id(tensor) not in made:
                there = replacement(tensor.detach())
                made[id(tensor)] = nn.Parameter(there, False) if isinstance(tensor, nn.Parameter) else there
            tensors[name] = made[id(tensor)]
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


def _slots(module: nn.Module) -> Iterator[Slot]:
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield tensors, name, tensor


def in_own_precision(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let a method compute in the types of what it is given: an autocast around the call does not reach inside.

    For methods of a policy or of a module, which say on which ``device`` they are.
    """

    @wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        kind = self.device.type
        known = torch.amp.is_autocast_available(kind)  # not that of the meta device
        with torch.autocast(kind, enabled=False) if known else nullcontext():
            return method(self, *args, **kwargs)

    return call
