"""Noise of the surrogate and of its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import lightning as L
import torch

from lit_vgrpo.core.gather import all_gather
from lit_vgrpo.core.ranges import Count, PositiveInt, Range, checked
from lit_vgrpo.core.records import IterationRecord
from lit_vgrpo.core.sampling import schedule_of
from lit_vgrpo.core.surrogate import coefficient_of_variation
from lit_vgrpo.objectives.gradient_noise import snr_by_time
from lit_vgrpo.objectives.pairs import PairObjective
from lit_vgrpo.training.sharded import FSDP2, ZeRO

if TYPE_CHECKING:
    from lit_vgrpo.module import VGRPOModule

MOST_TIMES = 10
"""Times at which the gradient is measured, spread over the sampler's times."""


@checked
@dataclass(eq=False)
class SurrogateDiagnostics(L.Callback):
    """Logs the surrogate's coefficient of variation, and optionally its gradient's signal-to-noise ratio by time.

    The variation over all images and within groups is the metric of arXiv 2604.23380: variation within a group beyond
    that of the images is noise in the ratio. ``surrogate/snr_t0.89`` is that of
    :func:`~lit_vgrpo.objectives.gradient_noise.snr_by_time` at ``t = 0.89``, before the iteration's first update.

    Args:
        every_n_iterations: Log every N iterations.
        snr_every_n_iterations: Measure the gradient every N iterations; null for never. It costs ``snr_draws`` groups
            with one pair per image, forward and backward, at each of at most ten times.
        snr_draws: Groups per rank on which the gradient is measured; more give a more precise ratio.
    """

    every_n_iterations: PositiveInt = 1
    snr_every_n_iterations: Count | None = None
    snr_draws: Annotated[int, Range(2, 1000)] = 16

    def setup(self, trainer: L.Trainer, pl_module: VGRPOModule, stage: str) -> None:
        if self.snr_every_n_iterations is None:
            return
        name = f"SurrogateDiagnostics.snr_every_n_iterations={self.snr_every_n_iterations}"
        method, strategy = type(pl_module.objective).__name__, type(trainer.strategy).__name__
        if not isinstance(pl_module.objective, PairObjective):
            raise ValueError(f"{name} needs a method that trains on pairs, which {method} does not. Set it to null.")
        if isinstance(trainer.strategy, FSDP2 | ZeRO):
            raise ValueError(f"{name} does not work with trainer.strategy={strategy}. Set it to null, or use ddp.")

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: VGRPOModule, optimizer: torch.optim.Optimizer
    ) -> None:
        record, snr_every = pl_module.record, self.snr_every_n_iterations
        if record is None:
            return
        values = record.first_update("surrogate")
        is_due = record.iteration % self.every_n_iterations == 0 and "surrogate/cv" not in record.diagnostics
        # With split updates, only the last one completes the images.
        if is_due and values is not None and len(values) == len(record.local_group_ids):
            values, groups = all_gather(values), all_gather(record.local_group_ids)
            record.diagnostics["surrogate/cv"] = coefficient_of_variation(values)
            record.diagnostics["surrogate/cv_within"] = coefficient_of_variation(values, groups.to(values.device))
        if snr_every is not None and not record.updates and record.iteration % snr_every == 0:
            record.diagnostics.update(self._snr(pl_module, record))

    def _snr(self, module: VGRPOModule, record: IterationRecord) -> dict[str, float]:
        policy, objective = module.policy, module.objective
        assert isinstance(objective, PairObjective)
        spec = objective.rollout_spec(record.iteration)
        _, schedule = schedule_of(policy, spec)
        times = schedule[torch.linspace(0, len(schedule) - 1, min(MOST_TIMES, len(schedule))).round().long()]
        seed = (module.seed, record.iteration, module.global_rank)
        assert module.iteration is not None
        micros, groups = module.iteration.micros, record.local_group_ids
        with module.ledger.phase("diagnostics"):
            ratios = snr_by_time(objective, policy, micros, groups, times, self.snr_draws, seed)
        if not ratios:
            return {}
        # Each rank's ratio is that of its images.
        mean = all_gather(torch.tensor([ratios])).double().mean(dim=0) * module.trainer.world_size**0.5
        return dict(zip((f"surrogate/snr_t{time:.2f}" for time in times.tolist()), mean.tolist(), strict=True))
