"""Writes a run's HTML report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lit_vgrpo.apps.report.kept import REPORT_NAME
from lit_vgrpo.apps.report.page import write_report
from lit_vgrpo.callbacks.kept_images import KeptImages
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.errors import one_line
from lit_vgrpo.module import VGRPOModule

When = Literal["evaluations", "end", "never"]
MOST_SHARE = 0.05
"""Share of the time since the last report that the next one may take; sooner, a refresh is left out."""


@checked
class Report(L.Callback):
    """Writes ``RUN/report.html``, a page that needs no other file, and keeps its images in ``RUN/report/``.

    ``lightning run`` adds it, after all other callbacks, since it shows what they have written.

    Args:
        when: write it at every held-out evaluation and at the end, only at the end, or never.
        kept_images: best held-out images to keep of an evaluation; as many worst ones, and as many on which two rewards
            disagree; 0 keeps none.

    Raises:
        ValueError: a number or ``when`` is invalid.
    """

    def __init__(self, when: When = "evaluations", kept_images: Annotated[int, Range(0, 100, example=6)] = 6) -> None:
        self.when = when
        self.kept_images = kept_images
        self._kept = KeptImages(kept_images)
        self._evaluations_shown = 0
        self._written_at = -float("inf")
        self._took_s = 0.0
        self._is_final = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, VGRPOModule)
        if stage == "fit" and self.when != "never" and self._kept not in pl_module.heldout_observers:
            pl_module.heldout_observers.append(self._kept)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._kept.start_over()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refresh the report; only now are the rows of the iteration before in ``metrics.csv``."""
        assert isinstance(pl_module, VGRPOModule)
        self._is_final = False
        is_new = len(pl_module.evaluations) != self._evaluations_shown
        is_due = time.monotonic() - self._written_at > self._took_s / MOST_SHARE
        if self.when == "evaluations" and is_new and is_due and trainer.is_global_zero:
            self._evaluations_shown = len(pl_module.evaluations)
            _save_tables(trainer)
            self._write(Path(trainer.default_root_dir), is_running=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            _save_tables(trainer)
            self.finish_run(trainer, pl_module)

    def finish_run(self, trainer: L.Trainer, pl_module: L.LightningModule, completed: bool = True) -> None:
        """Write the report of a run that has ended, unless that is done; ``lightning run`` calls it on rank 0."""
        if self.when != "never" and not self._is_final:
            self._is_final = True
            self._write(Path(trainer.default_root_dir), is_running=False)

    def _write(self, folder: Path, is_running: bool) -> None:
        started = time.monotonic()
        try:
            write_report([folder], folder / REPORT_NAME, is_running)
        except Exception as error:  # whatever it is, a page is no reason to end a training run
            rank_zero_warn(
                f"No report: {type(error).__name__}: {one_line(error).rstrip('.')}. Training is not affected. "
                f"Try: lightning report {folder}"
            )
        self._written_at = time.monotonic()
        self._took_s = self._written_at - started


def _save_tables(trainer: L.Trainer) -> None:
    """Write what loggers hold back; Lightning's own CSVLogger writes every hundredth row only."""
    for logger in trainer.loggers:
        logger.save()
