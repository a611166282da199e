"""A GPU for machines that have none: tensors of ``cuda:0`` with real values, which refuse what CUDA refuses.

    with pretended_gpu():
        policy.to("cuda")                           # also Trainer(accelerator="gpu")
    PRETEND_GPU=1 python -m pytest tests/test_resume.py   # a whole file on it; see tests/conftest.py

Every tensor stays in the CPU's memory. One on the GPU has a mark on its storage, so that its views, its detached self
and what autograd saves of it are there too. A mode around every call into torch reads the marks: it answers questions
for the device, refuses tensors of two devices in one operation, and marks what comes out.

It shows: mixed devices, ``with torch.device("cuda"):`` around code that builds models, a GPU's own random numbers,
autocast that reaches only what is on the GPU, and what libraries do for CUDA alone. It does not show: rounding and
nondeterminism of CUDA's kernels, streams, memory, NCCL, torch.compile, and mixed devices inside a backward
pass or a TorchScript module.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _device

IS_REAL = torch.cuda.is_available()
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CREATES = _device._device_constructors()
"""The functions that ``with torch.device(...):`` is about."""

MOVES = {"to", "cuda", "cpu", "type_as"}
TAKES_ANY = {"copy_", "set_", "__set__", "_has_compatible_shallow_copy_type", "is_set_to", "__repr__", "__format__"}
NO_SCALARS = {"cat", "concat", "concatenate", "stack", "hstack", "vstack", "dot", "mv", "mm", "equal"}
"""CUDA takes a number that is on the CPU nearly everywhere, but not here."""

PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, slice}
"""Most of the arguments that are no tensors, told at once."""

DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal", "bernoulli", "multinomial"}
DRAWS |= {"normal_", "uniform_", "exponential_", "bernoulli_", "random_", "trunc_normal_", "kaiming_uniform_"}

# https://docs.pytorch.org/docs/stable/amp.html: what CUDA's autocast computes in float32, where the CPU's does not
WIDE = {"softmax", "log_softmax", "layer_norm", "group_norm", "rms_norm", "norm", "sum", "prod", "cumsum", "cumprod"}
WIDE |= {"exp", "log", "pow", "__pow__", "rsqrt", "reciprocal", "__rdiv__", "mse_loss", "l1_loss", "nll_loss", "cdist"}
WIDE |= {"cosine_similarity", "cross_entropy", "kl_div", "softplus", "acos", "asin", "tan", "sinh", "cosh", "erfinv"}


class Generator(torch.Generator):
    """Draws on the CPU, for the device that it was made for."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu") -> None:
        self._device = _pretended(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device


def is_on_gpu(tensor: Tensor) -> bool:
    """Return True if a tensor pretends to be on the GPU."""
    with torch._C.DisableTorchFunction():
        return _is_marked(tensor)


def _is_marked(tensor: Tensor) -> bool:
    try:
        return hasattr(tensor.untyped_storage(), "is_on_gpu")
    except NotImplementedError:  # a sparse tensor has none
        return False


def _mark(tensor: Tensor) -> Tensor:
    if tensor.device == CPU:  # not one on the meta device
        tensor.untyped_storage().is_on_gpu = True
    return tensor


def _pretended(device: Any) -> torch.device:
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return GPU if device.type == "cuda" else device


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[Tensor]) -> None:
    if isinstance(values, Tensor):
        found.append(values)
    elif isinstance(values, list | tuple):
        for value in values:
            if type(value) not in PLAIN:
                _collect(value, found)
    elif isinstance(values, dict):
        for value in values.values():
            if type(value) not in PLAIN:
                _collect(value, found)


def _widened(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


def _each(function: Any, values: Any) -> Any:
    """The same structure with every tensor replaced."""
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, list | tuple) and _tensors(values):
        new = [_each(function, value) for value in values]
        return type(values)(*new) if hasattr(values, "_fields") else type(values)(new)
    return values


class PretendedGPU(TorchFunctionMode):
    """Stands between Python and torch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Generator("cuda")
        self.is_in_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        if name in MOVES and isinstance(args[0], Tensor):
            return self._moved(name, *args, **kwargs)
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        given = list(_tensors((args, kwargs)))
        marked = [tensor for tensor in given if _is_marked(tensor)]
        if name in ("numpy", "__array__") and marked and not kwargs.get("force"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if name == "get_device" and marked:
            return 0
        if name == "pin_memory":
            return args[0]
        asked = kwargs.get("device")
        if asked is None and func in CREATES and not marked:
            asked = _device.CURRENT_DEVICE
        home = GPU if marked else CPU
        if asked is not None:
            home = _pretended(asked)
            kwargs["device"] = CPU if home == GPU else home
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if 0 < len(marked) < len(given) and not self.is_in_backward:
            _refuse_mixed(func, name, args, given)
        self._choose_generator(name, kwargs, home)
        result = self._autocast(func, name, args, kwargs) if marked else func(*args, **kwargs)
        if name in TAKES_ANY or (name in ("__setitem__", "__getitem__") and not _is_marked(args[0])):
            return result
        if home == GPU or marked:
            return _each(lambda out: _placed(out, home, given), result)
        return result

    def _attribute(self, func: Any, args: Any) -> Any:
        tensor = args[0]
        if tensor is None or not isinstance(tensor, Tensor) or not _is_marked(tensor):
            return func(*args)
        attribute = func.__self__.__name__
        if attribute in ("device", "is_cuda", "is_cpu"):
            return {"device": GPU, "is_cuda": True, "is_cpu": False}[attribute]
        value = func(*args)
        return _mark(value) if attribute == "grad" and value is not None else value

    def _moved(self, name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``to`` and its kin: a copy wherever the device changes, as it is nowhere between two names of the CPU."""
        target = {"cuda": GPU, "cpu": CPU}.get(name)
        if name == "cuda":
            args = args[1:]
        for word in (*args, *(kwargs.pop(key) for key in ("device", "other") if key in kwargs)):
            if isinstance(word, Tensor):
                target, kwargs["dtype"] = GPU if _is_marked(word) else word.device, word.dtype
            elif isinstance(word, torch.dtype):
                kwargs["dtype"] = word
            elif isinstance(word, str | torch.device) or type(word) is int:
                target = _pretended(word)
        target = target or (GPU if _is_marked(tensor) else tensor.device)
        result = tensor.to(CPU if target == GPU else target, **kwargs)
        return _placed(result, target, [tensor])

    def _backward(
        self,
        loss: Tensor,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Python that runs within a backward pass is under the mode too, such as what checkpointing computes again."""
        was, self.is_in_backward = self.is_in_backward, True
        try:
            with self:
                torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)
        finally:
            self.is_in_backward = was

    def _choose_generator(self, name: str, kwargs: Any, home: torch.device) -> None:
        own = kwargs.get("generator")  # nothing in torch takes one by its place
        if own is not None and home.type != "meta" and own.device != home:
            raise RuntimeError(f"Expected a {home.type!r} device type for generator but found {own.device.type!r}")
        if own is None and home == GPU and name in DRAWS:
            kwargs["generator"] = self.generator  # with the same seed, a GPU draws other numbers than the CPU

    @staticmethod
    def _autocast(func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call with the autocast that is on for CUDA, which CPU tensors do not see by themselves."""
        if not torch.is_autocast_enabled("cuda"):
            return func(*args, **kwargs)
        if name in WIDE:
            return func(*map(_widened, args), **{key: _widened(value) for key, value in kwargs.items()})
        before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
        torch.set_autocast_enabled("cpu", True)
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_autocast_enabled("cpu", before[0])
            torch.set_autocast_dtype("cpu", before[1])


def _refuse_mixed(func: Any, name: str, args: Any, given: list[Tensor]) -> None:
    """Raise what CUDA raises of operations with tensors on two devices."""
    if name in TAKES_ANY and getattr(func, "__self__", None) is not Tensor.grad:
        return
    is_in_place = (name[-1:] == "_" and name[-2:] != "__") or name[:3] == "__i" or name in ("__setitem__", "__set__")
    writes_cpu = is_in_place and isinstance(args[0], Tensor) and not _is_marked(args[0])
    if name == "__getitem__":
        if not _is_marked(args[0]) and any(i.ndim for i in given[1:]):  # a single number is read off
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        return
    if name in ("__setitem__", "index_put_"):
        target, index, value = args[:3]
        if not _tensors(index):
            return  # a slice: copied into
        strays = [v for v in _tensors(value) if v.ndim and _is_marked(v) != _is_marked(target)]
        strays += [] if _is_marked(target) else [i for i in _tensors(index) if _is_marked(i)]
    else:
        strays = [t for t in given if not _is_marked(t) and (t.ndim or writes_cpu or name in NO_SCALARS)]
    if strays:
        kinds = ", ".join(f"{tuple(t.shape)} on {'cuda:0' if _is_marked(t) else 'cpu'}" for t in given)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
            f"(pretended GPU: {name} of {kinds})"
        )


def _placed(out: Tensor, home: torch.device, given: list[Tensor]) -> Tensor:
    """A result on its device: a copy where it shares the memory of an argument on another one."""
    if out.device != CPU or _is_marked(out) == (home == GPU):
        return out
    storage = out.untyped_storage()._cdata
    if any(out.device == own.device and own.untyped_storage()._cdata == storage for own in given):
        out = out.clone()
    return _mark(out) if home == GPU else out


def _tag(storage: Any) -> str | None:
    return "cuda:0" if hasattr(storage, "is_on_gpu") else None


def _restore(storage: Any, location: str) -> Any:
    """A saved storage where it was, as ``torch.load`` does on a machine with a GPU."""
    if not location.startswith("cuda") or not torch.cuda.is_available():
        return None
    storage.is_on_gpu = True
    return storage


if not IS_REAL:
    torch.serialization.register_package(5, _tag, _restore)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Provide one GPU inside the context: the real one if available, otherwise a pretended one."""
    if IS_REAL:
        yield
        return
    mode = PretendedGPU()

    def answer(value: Any) -> Any:  # a new function each: dynamo wants no two names for one
        return lambda *args, **kwargs: value

    def seed(value: int) -> None:
        mode.generator.manual_seed(value ^ 0x5EED)

    seed(torch.initial_seed() & 0xFFFFFFFF)
    gib = 2**30
    properties = mock.Mock(spec_set=["name", "major", "minor", "total_memory", "multi_processor_count"])
    properties.configure_mock(name="Pretended GPU", major=9, minor=0, total_memory=16 * gib, multi_processor_count=1)
    answers = {
        **{name: answer(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
        **{name: answer(0) for name in ("current_device", "_exchange_device", "_maybe_exchange_device")},
        **{name: answer(0) for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")},
        **{name: answer(None) for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")},
        "device_count": answer(1),
        "get_device_name": answer("Pretended GPU"),
        "get_device_capability": answer((9, 0)),
        "get_device_properties": answer(properties),
        "mem_get_info": answer((8 * gib, 16 * gib)),
        "memory_stats": answer({}),
        "is_current_stream_capturing": answer(False),
        "manual_seed": lambda value: seed(value),
        "manual_seed_all": seed,
        "get_rng_state": lambda device=None: mode.generator.get_state(),
        "get_rng_state_all": lambda: [mode.generator.get_state()],
        "set_rng_state": lambda state, device=None: mode.generator.set_state(state),
        "set_rng_state_all": lambda states: mode.generator.set_state(states[0]),
    }
    run = threading.Thread.run

    def run_with_gpu(thread: threading.Thread) -> None:
        with mode:
            run(thread)

    with (
        mock.patch.object(threading.Thread, "run", run_with_gpu),  # modes are a thread's own
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch.object(torch, "Generator", Generator),
        mock.patch.object(torch.accelerator, "current_stream", answer(mock.Mock(is_capturing=answer(False)))),
        mock.patch.object(torch._C, "_cuda_clearCublasWorkspaces", answer(None), create=True),
        mode,
    ):
        yield
