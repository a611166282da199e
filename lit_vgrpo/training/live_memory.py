"""Count the bytes of live tensors on any device, including the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveMemory(TorchDispatchMode):
    """Mode that counts every storage an operation allocates until it is freed, including those of a backward pass.

    An operation's temporary workspace is not counted.

    Attributes:
        live: Bytes alive now.
        peak: Largest number of bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {_place(value) for value in _held((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for value in _held(result):
            # A view of an outer tensor, or one changed in place, allocates nothing.
            if _place(value) not in known:
                self._add(value.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self._storages:
            return
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed(_: object) -> None:
            self.live -= size
            self._storages.pop(place, None)

        self._storages[place] = weakref.ref(storage, freed)


def _held(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts; for a sharded tensor, the rank's shard.

    A ``DTensor`` reports the size of the whole. ``tree_leaves`` would add a fifth to the time of a pass.
    """
    if isinstance(values, Tensor):
        yield values._local_tensor if isinstance(values, DTensor) else values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _held(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _held(value)


def _place(value: Tensor) -> int:
    return value.untyped_storage()._cdata
