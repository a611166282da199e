"""Noise of the surrogate."""

from __future__ import annotations

from typing import Any

import lightning as L

from lit_vgrpo.core.ranges import PositiveInt, checked
from lit_vgrpo.core.surrogate import coefficient_of_variation
from lit_vgrpo.module import VGRPOModule


@checked
class SurrogateDiagnostics(L.Callback):
    """Logs the surrogate's coefficient of variation over all images and within groups.

    The metric of arXiv 2604.23380: variation within a group beyond that of the images is noise in the ratio.

    Args:
        every_n_iterations: log every N iterations.
    """

    def __init__(self, every_n_iterations: PositiveInt = 1) -> None:
        self.every_n_iterations = every_n_iterations

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not batch.is_last or batch.iteration % self.every_n_iterations:
            return
        assert isinstance(pl_module, VGRPOModule)
        record = pl_module.record
        assert record is not None
        values = record.first_update("surrogate")
        if values is None:
            return
        values, groups = pl_module.all_ranks(values), pl_module.all_ranks(record.local_group_ids)
        metrics = {
            "surrogate/cv": coefficient_of_variation(values),
            "surrogate/cv_within": coefficient_of_variation(values, groups.to(values.device)),
        }
        pl_module.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1)
