"""Exponential moving average of the trainable weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from lit_vgrpo.core.ranges import Count, HalfOpenUnitInterval, checked
from lit_vgrpo.core.snapshots import Snapshot

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule


@checked
class EMA(L.Callback):
    """Averages the trainable weights over optimizer steps; evaluation and export use the average.

    The average is float32 and part of the checkpoint; training always continues from the weights themselves. If a
    strategy shards the weights, the average is sharded in the same way.

    Args:
        decay: Share of the old average that is kept each time it moves.
        warmup: Increase the decay to ``decay`` as ``(1 + n) / (10 + n)`` with n optimizer steps done, to forget the
            initial weights sooner.
        every_n_steps: Optimizer steps from one move to the next.
    """

    def __init__(self, decay: HalfOpenUnitInterval = 0.99, warmup: bool = True, every_n_steps: Count = 1) -> None:
        self.decay, self.warmup, self.every_n_steps = decay, warmup, every_n_steps
        self.average: Snapshot | None = None
        self.num_updates = 0
        self._last_step = 0
        self._restored: dict[str, Tensor] | None = None
        self._module: VGRPOModule | None = None  # the trainer's
        self._source: object = None  # of the weights that the average is of
        self._swap = ExitStack()
        self._swapped = False

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        self._module, self._restored = pl_module, None  # nothing is left of a run that failed before its first batch

    def on_fit_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        average = self._average_of(pl_module)
        if self._restored is None and average is not None and trainer.global_step > 0:
            average.follow()  # the trainer continues
            return
        if self._restored is None:
            self.num_updates = 0  # of an earlier fit
        self._start(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._last_step = pl_module.objective.num_updates

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: VGRPOModule, optimizer: torch.optim.Optimizer) -> None:
        # The trainer also counts steps that a gradient scaler skips; the objective's count does not.
        steps = pl_module.objective.num_updates
        if steps == self._last_step:
            return
        self._last_step = steps
        self.num_updates += 1
        if self.num_updates % self.every_n_steps:
            return
        warm = (1 + self.num_updates) / (10 + self.num_updates)
        assert self.average is not None
        self.average.move_towards(pl_module, min(self.decay, warm) if self.warmup else self.decay)

    def on_validation_start(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        if self._restored is not None:  # from a checkpoint that is only evaluated
            self._start(pl_module)
        self._swap.enter_context(self.applied(pl_module))

    def on_validation_end(self, trainer: L.Trainer, pl_module: VGRPOModule) -> None:
        self._swap.close()

    on_test_start = on_predict_start = on_validation_start  # type: ignore[assignment]
    on_test_end = on_predict_end = on_validation_end  # type: ignore[assignment]

    def on_exception(self, trainer: L.Trainer, pl_module: VGRPOModule, exception: BaseException) -> None:
        self._swap.close()

    @contextmanager
    def applied(self, pl_module: VGRPOModule) -> Iterator[None]:
        """Use the averaged weights within the context.

        No effect when nested, before training, or if the average is of another module or of weights since replaced.
        """
        average = self._average_of(pl_module)
        if average is None or self._swapped:
            yield
            return
        self._swapped = True
        try:
            with average.swapped_into(pl_module):
                yield
        finally:
            self._swapped = False

    def state_dict(self) -> dict[str, Any]:
        """Return the full average, on rank 0 if it is sharded; all ranks must call this."""
        average = None if self._module is None else self._average_of(self._module)
        return {} if average is None else {"num_updates": self.num_updates, "average": average.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self.num_updates = state_dict["num_updates"]
            self._restored = dict(state_dict["average"])

    def _average_of(self, module: VGRPOModule) -> Snapshot | None:
        """Return the average if it is of the module's weights, and not of those that a checkpoint has replaced."""
        return self.average if self._source is module.weights_source else None

    def _start(self, module: VGRPOModule) -> None:
        """Start an average of the module's weights, or continue the one of the checkpoint."""
        self.average, self._source = Snapshot(module), module.weights_source
        if self._restored is not None:
            self.average.load_state_dict(self._restored)
            self._restored = None
