"""The base class of rewards, the calls of their code, their errors, images and scores."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.backends import cuda, cudnn, mkldnn

from lit_vgrpo.core.pictures import stacked_references
from lit_vgrpo.core.pixels import strips, to_uint8
from lit_vgrpo.errors import RewardError, error_in_user_code, one_line, place_of, shortened
from lit_vgrpo.system.signals import STOP_SIGNALS, guests


class RewardOutage(RewardError):
    """A reward cannot score any more. This ends a run that trains on it; other errors only fail their images."""


class Reward(ABC):
    """Scores images. Construction is cheap and loads nothing; no trainer is needed.

    A subclass sets ``name`` and defines ``__call__``.

    Attributes:
        name: Key of its score in the logs.
        concurrent: Call it in a thread while the next images are sampled, for rewards that wait for a server or compute
            on the CPU. It is then only called from that thread, batch after batch.
        differentiable: :meth:`with_gradient` gives scores with a gradient, for methods that train on it.
        compares: It compares the images of a group, so that scores of different groups are not comparable. It is
            called once per rollout with all of a rank's images, and never with held-out images.
        calls_at_once: Calls from as many threads, if ``concurrent``.
        takes_videos: It scores videos ``(B, F, 3, H, W)``. Other rewards score each frame, and the video's score is the
            mean; see :class:`~lit_vgrpo.rewards.Frames` for fewer frames.
        failure: One line on why images of the last call got NaN, if the reward knows.
        key: The reward's key in a recipe, such as ``model.reward``; empty if options are typed without a prefix.
        combined: The rewards that this one combines, which are checked, loaded and closed with it.
    """

    name: str
    concurrent: bool = False
    calls_at_once: int = 1
    differentiable: bool = False
    TO_PASS: ClassVar[str] = "Pass an instance such as PickScore(), or a function."
    compares: bool = False
    takes_videos: bool = False
    failure: str | None = None
    key: str | None = None
    combined: Sequence[Reward] = ()

    def option(self, name: str) -> str:
        """Return an option's name for messages: the key to type, or the class's attribute outside recipes."""
        return name if self.key == "" else f"{self.key or type(self).__name__}.{name}"

    def found_at(self, key: str) -> None:
        """Set the reward's key in the recipe, for its messages."""
        self.key = key

    @abstractmethod
    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        """Score a batch, loading what is needed first.

        A reward with a fourth argument ``references`` gets the pictures that the prompts edit, ``(B, 3, H, W)``, or
        ``(B, N, 3, H, W)`` if each prompt has several, float32 in [0, 1]; ``None`` if the rows have none.

        Args:
            images: Shape ``(B, 3, H, W)``, float32 in [0, 1].
            prompts: The B prompts.
            rows: The prompts' B rows with their extra fields.

        Returns:
            Shape ``(B,)``, float32, higher is better; NaN marks an image that could not be scored.
        """

    def with_gradient(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        """Score images that are not rounded to 8 bits, and keep the graph; only if :attr:`differentiable`.

        Override it if ``__call__`` rounds or detaches.

        Args:
            images: Shape ``(B, 3, H, W)``, float32 in [0, 1]; may carry grad.
            prompts: The B prompts.
            rows: The prompts' B rows.

        Returns:
            Shape ``(B,)``, float32; carries grad. Up to rounding, the scores of the ordinary call.
        """
        return self(images, prompts, rows)

    @property
    def loads_nothing(self) -> bool:
        """True if a call needs neither weights nor a server, so that ``lightning check`` can try it."""
        return type(self).load is Reward.load and not self.combined and not self.compares

    @property
    def takes_references(self) -> bool:
        """True if it is called with the pictures that the prompts edit."""
        return "references" in signature(type(self).__call__).parameters

    def check(self) -> list[str]:
        """Return errors that can be found without loading weights, one line each."""
        return [error for errors in self._ask_combined("check") for error in errors]

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        """Return why no image of this prompt can be scored, or None; called for every prompt before loading."""
        return None

    def load(self) -> None:
        """Load the weights, if any; a second call does nothing."""
        self._ask_combined("load")

    def leaves(self) -> list[Reward]:
        """Return the rewards that score images: those that this one combines, or itself."""
        return [leaf for reward in self.combined for leaf in reward.leaves()] or [self]

    def enter_run(self, folder: Path) -> None:
        """Open the reward's files in a run folder; called on every rank before training."""
        self._ask_combined("enter_run", folder)

    def take_counts(self) -> dict[str, float]:
        """Return counts of events since the last call, such as retries by cause."""
        return {}

    def close(self) -> None:
        """Cancel pending work and close connections; a later call may reopen them."""
        self._ask_combined("close")

    def _ask_combined(self, method: str, *args: Any) -> list[Any]:
        if not self.combined:
            return []
        with guest():
            return [getattr(reward, method)(*args) for reward in self.combined]


def _set_stop_handlers(handlers: Sequence[Any]) -> None:
    if threading.current_thread() is threading.main_thread():  # others cannot
        for number, handler in zip(STOP_SIGNALS, handlers, strict=True):
            signal.signal(number, handler or signal.SIG_DFL)


def _errors_of_warnings() -> list[Any]:
    return [one for one in warnings.filters if one[0] == "error"]


def _drop_errors_of_warnings(kept: Sequence[Any]) -> None:
    warnings.filters[:] = [one for one in warnings.filters if one[0] != "error" or one in kept]  # type: ignore[index]


Settings = Sequence[tuple[Callable[[], Any], Callable[[Any], Any]]]


def _attributes(owner: Any, *names: str) -> Settings:
    return [(partial(getattr, owner, name), partial(setattr, owner, name)) for name in names]


THREAD_SETTINGS: Settings = (
    # not "cpu", which would slow down every function of torch
    (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
)
PROCESS_SETTINGS: Settings = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *_attributes(cuda.matmul, "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
    *_attributes(cuda.matmul, "allow_fp16_accumulation"),
    *_attributes(cudnn, "enabled", "benchmark", "deterministic", "allow_tf32"),
    *_attributes(mkldnn, "enabled"),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_errors_of_warnings, _drop_errors_of_warnings),
    (lambda: [*map(signal.getsignal, STOP_SIGNALS)], _set_stop_handlers),
)
"""Settings that silently change a run's numbers or lose its work, with the functions that get and set them."""
_lock = threading.Lock()


def _values(settings: Settings) -> list[Any]:
    """Return the settings' values; ``None`` for a precision that only torch's newer options can show."""
    values: list[Any] = []
    for get, _ in settings:
        values.append(None)
        with suppress(RuntimeError):
            values[-1] = get()
    return values


@contextmanager
def guest() -> Iterator[None]:
    """Run a user's code, in any thread."""
    process, thread = os.getpid(), _values(THREAD_SETTINGS)
    with _lock:
        guests.append(guests[0] if guests else _values(PROCESS_SETTINGS))
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        if os.getpid() != process:  # a fork, which would continue as a second trainer
            _end(error)
        with _lock:
            settings, before = (*THREAD_SETTINGS, *PROCESS_SETTINGS), [*thread, *guests.pop()]
            for (_, put), value, now in zip(settings, before, _values(settings), strict=True):
                if value is not None and now != value:
                    put(value)


def _end(error: BaseException | None) -> None:
    """End the process as Python does after its last line, but run no code of others."""
    status = error.code if isinstance(error, SystemExit) else error
    if not isinstance(status, int | None):
        traceback.print_exception(error)
        status = 1
    sys.stdout.flush()
    os._exit(status or 0)


def called(
    reward: Reward,
    images: Tensor,
    prompts: list[str],
    rows: list[dict[str, Any]],
    method: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Call a reward, or a method such as its ``with_gradient``, and return its scores ``(B,)``, float32.

    It gets pictures if it takes them, and an autocast around the call has no effect on it. It may change its arguments
    and keep what it returns: both are copies.

    Raises:
        RewardOutage: It returned something else, or it scores videos ``(B, F, 3, H, W)`` and got images.
    """
    if reward.takes_videos and images.ndim == 4:
        raise RewardOutage(f'Reward "{reward.name}" scores videos, and the policy makes images. Use another reward.')
    if images.ndim == 5 and not reward.takes_videos:
        if reward.compares:
            return called(reward, strips(images), prompts, rows, method)
        number, frames = images.shape[1], images.flatten(0, 1)
        each = [index for index in range(len(images)) for _ in range(number)]
        scores = called(reward, frames, [prompts[i] for i in each], [rows[i] for i in each], method)
        return scores.unflatten(0, (-1, number)).mean(1)
    given = {"references": stacked_references(rows)} if reward.takes_references else {}
    with guest(), torch.autocast(images.device.type, enabled=False):
        # rows are copied one by one, since a group shares its row
        copies = images.clone(), list(prompts), [deepcopy(row) for row in rows]
        returned: Any = (method or reward)(*copies, **given)  # type: ignore[arg-type]
    shape = (len(images),)
    if not isinstance(returned, Tensor) or tuple(returned.shape) != shape or returned.dtype != torch.float32:
        wanted = f"Return a float32 tensor of shape {shape}."
        raise RewardOutage(f'{place_of(reward)}Reward "{reward.name}" returned {described(returned)}. {wanted}')
    return returned.clone()


def described(value: Any) -> str:
    """Describe what a user's code returned.

    >>> described(([1.0], {})), described({"scores": 1}), described(torch.ones(2, 1))
    ('tuple ([1.0], {})', "dict {'scores': 1}", 'a float32 tensor of shape (2, 1)')
    """
    if hasattr(value, "dtype"):
        kind = "tensor" if isinstance(value, Tensor) else "array"
        return f"a {str(value.dtype).removeprefix('torch.')} {kind} of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {shortened(repr(value), most=60)}"


def reason_of(error: BaseException) -> str:
    """Return the reason that a reward failed, in one line; for user code, with file and line."""
    if isinstance(error, RewardError):
        return str(error)
    return error_in_user_code(error) or one_line(f"{type(error).__name__}: {error}")


@dataclass
class Scores:
    """The scores of B images, by one reward or by a weighted sum.

    Args:
        total: Shape ``(B,)``, float32: the weighted sum; NaN if a reward of non-zero weight failed.
        parts: Scores of each reward by name, shape ``(B,)``, float32; NaN if it failed or does not apply.
        ok: Shape ``(B,)``, bool: True if ``total`` is a number.
        errors: By name, the last failure of each reward that failed on any image.
        applies: By name, shape ``(B,)``, bool: True if the reward applies; all True if a name is missing.
        seconds: By name, the reward's wall time.
        counts: By name, events that the reward counted, such as retries by cause.
    """

    total: Tensor
    parts: dict[str, Tensor]
    ok: Tensor
    errors: dict[str, str] = field(default_factory=dict)
    applies: dict[str, Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, dict[str, float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.total)

    def applies_to(self, name: str) -> Tensor:
        """Return a mask of the images that the reward applies to, ``(B,)``, bool."""
        return self.applies.get(name, torch.ones_like(self.ok))

    @classmethod
    def empty(cls, size: int) -> Scores:
        """Return a placeholder for images that are not scored."""
        return cls(torch.zeros(size), {}, torch.ones(size, dtype=torch.bool))

    @classmethod
    def joined(cls, batches: Sequence[Scores]) -> Scores:
        """Concatenate batches of the same rewards, on the CPU."""
        names = list(batches[0].parts)
        counts: dict[str, Counter[str]] = {}
        for batch in batches:
            for name, events in batch.counts.items():
                counts.setdefault(name, Counter()).update(events)
        return cls(
            total=torch.cat([batch.total.cpu() for batch in batches]),
            parts={name: torch.cat([batch.parts[name].cpu() for batch in batches]) for name in names},
            ok=torch.cat([batch.ok.cpu() for batch in batches]),
            errors={name: message for batch in batches for name, message in batch.errors.items()},
            applies={name: torch.cat([batch.applies_to(name).cpu() for batch in batches]) for name in names},
            seconds={name: sum(batch.seconds.get(name, 0.0) for batch in batches) for name in names},
            counts={name: dict(counted) for name, counted in counts.items()},
        )


@dataclass
class ImageBatch:
    """Images ready to be scored."""

    images: Tensor  # (B, 3, H, W), or (B, F, 3, H, W) for videos, float32 in [0, 1], rounded to what a file can store
    is_finite: Tensor  # (B,), bool: no pixel is NaN or infinite
    prompts: list[str]
    rows: list[dict[str, Any]]

    @classmethod
    def rounded(cls, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> ImageBatch:
        """Round images; raise ValueError if they have the wrong shape, or another number than prompts or rows."""
        if images.ndim not in (4, 5) or images.shape[-3] != 3 or not len(images) == len(prompts) == len(rows):
            raise ValueError(
                "Rewards take images (B, 3, H, W) or videos (B, F, 3, H, W) with B prompts and rows, not "
                f"{tuple(images.shape)}, {len(prompts)} prompts and {len(rows)} rows."
            )
        is_finite = images.isfinite().flatten(1).all(1)
        finite = images.detach().where(is_finite.view(-1, *[1] * (images.ndim - 1)), 0)
        return cls(to_uint8(finite).float() / 255, is_finite.cpu(), prompts, rows)
