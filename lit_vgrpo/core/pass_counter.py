"""The cost of a run: forward passes by phase, images, time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_vgrpo.core.records import Stopwatch

BACKWARD = 2
"""Cost of a pass's backward in forward passes: gradients of the activations and of the weights."""

BESIDE_TRAINING = ("evaluation", "samples", "diagnostics")
"""Phases that training does not need."""


class PassLedger:
    """Counter of the images that pass through a network, by a hook; classifier-free guidance counts twice.

    Backward passes and recomputation by activation checkpointing are not counted.

    Attributes:
        ranks: number of ranks doing the same work; this rank's passes are multiplied by it.
        current_phase: name under which passes are counted now.
        images: images rolled out for training, over all ranks.
        stopwatch: time of the training steps.
    """

    def __init__(self) -> None:
        self.ranks = 1
        self.images = 0
        self.stopwatch = Stopwatch()
        self.counts: dict[str, dict[str, int]] = {}
        self.current_phase = "update"

    def attach(self, network: nn.Module, ranks: int = 1) -> None:
        """Count a network's passes, each for all ranks."""
        self.ranks = ranks
        network.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # the latents come first: a batch, or a list of one image's latents each
        sample = next(
            v for v in (*args, *kwargs.values()) if isinstance(v, list) or (isinstance(v, Tensor) and v.ndim > 1)
        )
        phase = self.counts.setdefault(self.current_phase, {"with_grad": 0, "without_grad": 0})
        phase["with_grad" if torch.is_grad_enabled() else "without_grad"] += len(sample) * self.ranks

    def count_images(self, number: int) -> None:
        """Count images rolled out for training."""
        self.images += number

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count passes in the context under ``name``: rollout, old, reference, update, a copy's name, or evaluation."""
        before, self.current_phase = self.current_phase, name
        try:
            yield
        finally:
            self.current_phase = before

    def training_counts(self) -> dict[str, dict[str, int]]:
        """Return the counts of all phases except evaluation, sample grids and diagnostics."""
        return {name: count for name, count in self.counts.items() if name not in BESIDE_TRAINING}

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
        return {"passes": counts, "images": self.images, "stopwatch": self.stopwatch.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = {name: dict(count) for name, count in state["passes"].items()}
        self.images = state["images"]
        self.stopwatch.load_state_dict(state["stopwatch"])
