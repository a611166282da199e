"""Device, type and compute precision of modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import wraps
from itertools import chain
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from lit_vgrpo.core.sharding import is_sharded

P = ParamSpec("P")
R = TypeVar("R")
Slot = tuple[dict[str, Any], str, Tensor]
"""A tensor's place in a module: the dict, its key, the tensor."""


def with_cpu_default(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function create its tensors on the CPU, where weights are loaded and initialised.

    Under some strategies Lightning configures a model with the GPU as the default device: the same seed would give a
    different adapter there, and diffusers would create tensors on another device than the loaded ones.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.get_default_device().type == "cpu":
            return function(*args, **kwargs)  # a context would intercept every torch function, which is slow
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return call


def place(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Move modules to a device permanently."""
    for module in modules:
        if any(tensor.device != device for tensor in chain(module.parameters(), module.buffers())):
            module.to(device)


@contextmanager
def placed(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Place frozen modules on a device within the context, then restore their tensors without copying back."""
    moved = [slot for module in modules for slot in _slots(module) if slot[2].device != device]
    with _replaced(moved, lambda tensor: tensor.to(device)):
        yield


@contextmanager
def waiting(module: nn.Module) -> Iterator[None]:
    """Keep a module's frozen tensors in CPU memory within the context, if they are on a GPU and not sharded.

    Only their storages are emptied, as FSDP does, so all views of them are valid again afterwards.
    """
    frozen = [tensor for tensor in (*module.parameters(), *module.buffers()) if not tensor.requires_grad]
    on_gpu = [tensor.untyped_storage() for tensor in frozen if tensor.device.type == "cuda" and not is_sharded(tensor)]
    kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
    try:
        for storage in {storage._cdata: storage for storage in on_gpu}.values():
            kept.append((storage, torch.UntypedStorage(storage.nbytes()).copy_(storage)))
            storage.resize_(0)
        yield
    finally:
        for storage, values in kept:
            storage.resize_(values.nbytes())
            storage.copy_(values)


@contextmanager
def written_in(modules: Sequence[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Convert all floating-point tensors of modules within the context, copying to the CPU, to save them."""
    slots = [slot for module in modules for slot in _slots(module)]
    converted = [slot for slot in slots if slot[2].is_floating_point() and slot[2].dtype != dtype]
    with _replaced(converted, lambda tensor: tensor.to("cpu", dtype)):
        yield


@contextmanager
def _replaced(slots: Sequence[Slot], replacement: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace a module's tensors within the context."""
    made: dict[int, Tensor] = {}  # a tensor may have several names
    try:
        for tensors, name, tensor in slots:
            if id(tensor) not in made:
                there = replacement(tensor.detach())
                made[id(tensor)] = nn.Parameter(there, False) if isinstance(tensor, nn.Parameter) else there
            tensors[name] = made[id(tensor)]
        yield
    finally:
        for tensors, name, tensor in slots:
            tensors[name] = tensor


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Change a module's floating-point type if it differs (diffusers warns of every cast through it).

    As in ``from_pretrained``, parameters and stored buffers are cast, and buffers that the module computes keep their
    type, such as rotary frequencies in float32. In float16, layers that would overflow (T5's ``wo``) stay float32.
    """
    wide = set(getattr(module, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else set()
    stored = module.state_dict().keys()
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        wanted = torch.float32 if wide.intersection(name.split(".")) else dtype
        if name in stored and tensor.is_floating_point() and tensor.dtype != wanted:
            tensor.data = tensor.data.to(wanted)


@contextmanager
def restored_on_error(pipeline: Any) -> Iterator[None]:
    """Restore a pipeline in memory, ``None`` for no pipeline, if the context ends with an error.

    That includes its networks' parts, hooks and other attributes, and their weights. Until it ends, weights that were
    cast inside exist twice.
    """
    networks = [] if pipeline is None else [p for p in pipeline.components.values() if isinstance(p, nn.Module)]
    modules = {module for network in networks for module in network.modules()}
    processors = [module.processor for module in modules if hasattr(module, "processor")]  # of attention
    kept = [
        (one, {name: _shallow(value) for name, value in vars(one).items()})
        for one in ([pipeline, *modules, *processors] if networks else [])
    ]
    tensors = [tensor for network in networks for tensor in chain(network.parameters(), network.buffers())]
    values = [(tensor, tensor.data, tensor.requires_grad) for tensor in tensors]
    try:
        yield
    except BaseException:
        for one, attributes in kept:
            vars(one).clear()
            vars(one).update(attributes)
        for tensor, value, is_trained in values:
            tensor.data = value
            tensor.requires_grad_(is_trained)
        raise


def _shallow(value: Any) -> Any:
    return copy(value) if type(value) in (dict, OrderedDict, list, set) else value


def unmasked_on_meta(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Drop arguments whose values an encoder would read, on the meta device; a pre-hook of its forward pass."""
    is_on_meta = next(module.parameters()).is_meta
    if is_on_meta and kwargs.get("attention_mask") is not None:
        read = ("attention_mask", "position_ids", "use_cache")  # without a cache, it looks for packed prompts
        kwargs = {name: value for name, value in kwargs.items() if name not in read}
    return args[:1] if is_on_meta else args, kwargs  # Wan passes the mask by position


def _slots(module: nn.Module) -> Iterator[Slot]:
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield tensors, name, tensor


def in_own_precision(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Make a method compute in its arguments' types, unaffected by an autocast around the call.

    For methods of an object with a ``device``, such as a policy or module.
    """

    @wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        kind = self.device.type
        known = torch.amp.is_autocast_available(kind)  # false for the meta device
        with torch.autocast(kind, enabled=False) if known else nullcontext():
            return method(self, *args, **kwargs)

    return call
