"""Records of a run's results and its cost: forward passes by phase, images, time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator
from torch import Tensor, nn

from lit_vgrpo.core.gather import rank_and_world_size
from lit_vgrpo.system.memory import PeakMemory

BACKWARD = 2
"""Cost of a pass's backward in forward passes: gradients of the activations and of the weights."""

FINGERPRINT = "fingerprint"  # the metric that is equal for evaluations that can be compared
SAVED = (
    *("iteration", "rewards", "group_ids", "parts", "errors", "images"),
    *("seconds", "has_advantage", "updates", "edits", "sources", "diagnostics", "logged"),
)
"""What a checkpoint keeps of the record of an iteration that has not ended, in addition to its metrics."""
NOT_TRAINING = ("evaluation", "samples", "diagnostics")
"""Phases that training does not need."""


@dataclass
class IterationRecord:
    """One iteration, from its rollout to its last update.

    Attributes:
        iteration: Number, from 0.
        rewards: Total reward of every image over all ranks, NaN = failed, ``(B_global,)``.
        group_ids: ``(B_global,)``.
        parts: By reward, over all ranks: ``mean`` and ``std`` of its scores, ``no_spread``, ``failed``,
            ``seconds_per_image``, and the reward's counts.
        sources: By the source of the prompts, over all ranks: ``mean``, ``std``, ``no_spread`` and ``failed`` of the
            total reward; empty with one source.
        errors: Reward name to its last failure message.
        local_group_ids: Groups of this rank's images, ``(B_local,)``.
        images: Number of images, over all ranks.
        unmoved: This rank's images passed before the first optimizer step.
        metrics: For each loss metric the per-image values of every step, this rank's. The loss is the same for all
            images of a micro-batch, ``grad_norm`` for all images of an update.
        seconds: Wall time by phase (rollout, decode, reward, prepare); ``reward_overlapped`` is scoring in threads
            during these phases.
        has_advantage: Some image is better or worse than its group; otherwise no step is taken.
        updates: Optimizer steps taken so far, without skipped ones.
        edits: By name, each image's similarity to the picture it edits and to its group, over all ranks,
            ``(B_global,)``; empty without pictures.
        diagnostics: Metrics that callbacks computed before an update, over all ranks.
        logged: The row of metrics that was logged after the last update; empty before.
    """

    iteration: int
    rewards: Tensor
    group_ids: Tensor
    parts: dict[str, dict[str, float]]
    errors: dict[str, str]
    local_group_ids: Tensor
    images: int
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    has_advantage: bool = True
    updates: int = 0
    edits: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    diagnostics: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    unmoved: int = 0

    def add(self, loss: Tensor, metrics: dict[str, Tensor], images: int) -> None:
        """Add one step on a number of images."""
        self.unmoved += 0 if self.updates else images
        for name, values in {"loss": loss.detach().expand(images), **metrics}.items():
            self.metrics.setdefault(name, []).append(values)

    def joined(self, name: str) -> Tensor:
        """Return a metric of all steps, on the device of the last one."""
        values = self.metrics[name]
        return torch.cat([one.to(values[-1].device) for one in values])  # a checkpoint's are elsewhere

    def first_update(self, name: str) -> Tensor | None:
        """Return a metric of all this rank's images when first trained on, in the order of ``local_group_ids``."""
        is_known = name in self.metrics and self.unmoved  # else resumed from an earlier version's checkpoint
        return self.joined(name)[: len(self.local_group_ids)] if is_known else None

    def before_first_step(self, name: str) -> Tensor | None:
        """Return a metric of this rank's images that were passed before the policy moved."""
        return self.joined(name)[: self.unmoved] if name in self.metrics and self.unmoved else None

    def means(self) -> dict[str, Tensor]:
        """Return the loss's and every metric's mean over all steps, without NaN, on the network's device."""
        return {name: self.joined(name).double().nanmean() for name in self.metrics}  # exact for equal values

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SAVED}


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of the block, including GPU work, to ``seconds[name]``."""
    start = _wall_s()
    yield
    seconds[name] = seconds.get(name, 0.0) + _wall_s() - start


def _wall_s() -> float:
    """Return the time in seconds after synchronising the GPU, which only queues work when a call returns."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Stopwatch:
    """Wall and CPU time of this process in training steps, kept in checkpoints."""

    def __init__(self) -> None:
        self._total = (0.0, 0.0)
        self._started: tuple[float, float] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the block after waiting for the GPU, so that earlier work does not count."""
        self._started = _wall_s(), time.process_time()
        try:
            yield
        finally:
            self._total, self._started = self._read(), None

    def _read(self) -> tuple[float, float]:
        now = _wall_s(), time.process_time()
        began = self._started or now
        return self._total[0] + now[0] - began[0], self._total[1] + now[1] - began[1]

    @property
    def wall_s(self) -> float:
        return self._read()[0]

    @property
    def cpu_s(self) -> float:
        return self._read()[1]

    def state_dict(self) -> dict[str, float]:
        return {"wall_s": self.wall_s, "cpu_s": self.cpu_s}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._total = (state["wall_s"], state["cpu_s"])


class PassLedger:
    """Counter of the images that pass through a network, by a hook; classifier-free guidance counts twice.

    Backward passes and recomputation by activation checkpointing are not counted.

    Attributes:
        ranks: Number of ranks doing the same work; this rank's passes are multiplied by it.
        current_phase: Name under which passes are counted now.
        images: Images rolled out for training, over all ranks.
        unscored: Those of them that a reward failed to score.
        decoded: Images decoded with gradient, over all ranks, forward and backward through VAE and reward.
        stopwatch: Time of the training steps.
        memory: Peak memory by phase.
    """

    def __init__(self) -> None:
        self.ranks = 1
        self.images = self.decoded = self.unscored = 0
        self.stopwatch, self.memory = Stopwatch(), PeakMemory()
        self.counts: dict[str, dict[str, int]] = {}
        self.current_phase = "update"

    def attach(self, network: nn.Module) -> None:
        """Count a network's passes, each for all ranks."""
        self.ranks = rank_and_world_size()[1]
        network.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # the latents come first: a batch, or a list of one image's latents each
        sample = next(
            v for v in (*args, *kwargs.values()) if isinstance(v, list) or (isinstance(v, Tensor) and v.ndim > 1)
        )
        phase = self.counts.setdefault(self.current_phase, {"with_grad": 0, "without_grad": 0})
        phase["with_grad" if torch.is_grad_enabled() else "without_grad"] += len(sample) * self.ranks

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Measure the time of a training step, and its peak memory under ``update``."""
        with self.stopwatch.running(), self.memory.during("update"):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count passes in the context under ``name``: rollout, old, reference, update, a copy's name, or evaluation."""
        before, self.current_phase = self.current_phase, name
        try:
            with self.memory.during(name):
                yield
        finally:
            self.current_phase = before

    def training_counts(self) -> dict[str, dict[str, int]]:
        """Return the counts of all phases except evaluation, sample grids and diagnostics."""
        return {name: count for name, count in self.counts.items() if name not in NOT_TRAINING}

    def training_passes(self) -> int:
        """Return all passes except those of evaluation, sample grids and diagnostics."""
        return sum(sum(count.values()) for count in self.training_counts().values())

    def training_equivalents(self) -> int:
        """Return the cost of all these passes in forward passes: a pass with gradient counts three times.

        Its backward takes twice the multiplications of its forward. The machine does not matter, unlike for CPU time.
        """
        return self.training_passes() + BACKWARD * sum(c["with_grad"] for c in self.training_counts().values())

    def state_dict(self) -> dict[str, Any]:
        counts = {name: dict(count) for name, count in self.counts.items()}
        images = {"images": self.images, "decoded": self.decoded, "unscored": self.unscored}
        return {"passes": counts, **images, "stopwatch": self.stopwatch.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = {name: dict(count) for name, count in state["passes"].items()}
        self.images, self.decoded = state["images"], state["decoded"]
        self.unscored = state.get("unscored", 0)  # of an earlier version
        self.stopwatch.load_state_dict(state["stopwatch"])


@dataclass(frozen=True)
class Evaluation:
    """The held-out reward at one evaluation, and the cost of training until then, over all ranks.

    Attributes:
        iteration: Iterations done; 0 is the start.
        reward: Mean held-out reward; NaN, null in ``summary.json``, if no image could be scored.
        images: Images rolled out for training.
        passes: Network passes of training, in images; a backward is not counted.
        forward_equivalents: The same with each backward counted as two passes.
        phases: Those passes by phase, with and without gradient, see :class:`PassLedger`.
        train_seconds: Wall time of the training steps.
        cpu_seconds: CPU time of this process in the training steps.
        fingerprint: Equal for evaluations of the same images by the same rewards; 0 if unknown.
        metrics: All finite metrics, without ``heldout/``, and ``reward_std`` over the images.
    """

    iteration: int
    reward: Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
    images: int
    passes: int
    train_seconds: float
    cpu_seconds: float
    forward_equivalents: int
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    fingerprint: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
