"""``metrics.csv``: Lightning's table, continued by a resumed run and safe when a run is killed."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lit_vgrpo.training.folder import candidates
from lit_vgrpo.training.resume import Progress

Keep = Callable[[dict[str, str]], bool]


class MetricsTable(CSVLogger):
    """Writes ``FOLDER/metrics.csv``, every row at once.

    Args:
        folder: the run folder.
        keep: predicate for the existing rows to keep; ``None`` starts a new table.
    """

    def __init__(self, folder: Path, keep: Keep | None = None) -> None:
        # name and version empty: the table lies in the run folder itself
        super().__init__(folder, name="", version="", flush_logs_every_n_steps=1)
        self._keep = keep
        self._table: _Table | None = None

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._table is None:
            self._table = _Table(Path(self.log_dir), self._keep)
        return self._table

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._table is not None:
            self._table.save()


class _Table:
    """A CSV file that is replaced atomically when its columns change; rows wait while the disk is full.

    Attributes:
        metrics: rows that are not in the file yet.
        waits: writing them has failed.
    """

    def __init__(self, folder: Path, keep: Keep | None) -> None:
        self.metrics: list[dict[str, Any]] = []
        self.waits = False
        self._hparams: dict[str, Any] = {}
        self._file = folder / "metrics.csv"
        self._columns: list[str] = []
        self._columns_in_file: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        if keep is None:
            self._file.unlink(missing_ok=True)
            return
        self._columns, rows = self._read()
        if self._columns:
            self._write([row for row in rows if keep(row)])

    def log_hparams(self, params: dict[str, Any]) -> None:
        """Write hyperparameters to ``hparams.yaml``."""
        self._hparams |= params
        save_hparams_to_yaml(self._file.with_name("hparams.yaml"), self._hparams)

    def log_metrics(self, metrics: dict[str, Tensor | float], step: int) -> None:
        """Add a row, which :meth:`save` writes."""
        row = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        self.metrics.append({**row, "step": step})

    def save(self) -> None:
        """Write the rows that are not in the file yet; warn where that fails."""
        if not self.metrics:
            return
        self._columns = sorted({*self._columns, *(name for row in self.metrics for name in row)})
        try:
            if self._columns_in_file == self._columns:
                self._append(self.metrics)
            else:
                columns, rows = self._read()
                self._columns = sorted({*self._columns, *columns})
                self._write([*rows, *self.metrics])
        except OSError as error:
            if not self.waits:
                what = f"Cannot write {self._file}: {error.strerror}."
                rank_zero_warn(f"{what} Training continues; the rows are written once there is space.")
            self.waits, self._columns_in_file = True, []
            return
        self.metrics, self.waits = [], False

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Return the file's columns and rows; a file that is not the table of a run is moved aside."""
        path = self._file
        try:
            return read_table(path)
        except FileNotFoundError:
            return [], []
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            aside = next(p for p in candidates(path.with_name(f"{path.name}.foreign")) if not os.path.lexists(p))
            path.rename(aside)
            rank_zero_warn(
                f"{path} is not a metrics table ({why}). It was renamed to {aside.name}, and a new one was started."
            )
            return [], []

    def _append(self, rows: list[dict[str, Any]]) -> None:
        size = os.stat(self._file).st_size
        try:
            with self._file.open("a", newline="") as file:
                csv.DictWriter(file, fieldnames=self._columns).writerows(rows)
        except OSError:
            os.truncate(self._file, size)
            raise

    def _write(self, rows: list[dict[str, Any]]) -> None:
        draft = self._file.with_name(f"{self._file.name}.tmp")
        try:
            with draft.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=self._columns)
                writer.writeheader()
                writer.writerows(rows)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self._file)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._columns_in_file = list(self._columns)


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return a file's columns and rows, without a line that was cut off when a run was killed.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not the table of a run.
    """
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    lines = text.splitlines(keepends=True)
    if len(lines) > 1 and not lines[-1].endswith("\n"):
        lines.pop()
    reader: csv.DictReader[str] = csv.DictReader(lines)
    try:
        columns = list(reader.fieldnames or [])
        rows = list(reader)
    except csv.Error as error:
        raise ValueError(str(error)) from error
    if columns and "step" not in columns:
        raise ValueError("it has no column step")
    whole = [row for row in rows if _is_whole(row)]
    if rows and not whole:
        raise ValueError(f"none of its {len(rows)} rows has a number of a step")
    return columns, whole


def _is_whole(row: dict[Any, Any]) -> bool:
    """Return ``True`` if a row has a cell for each column and numbers for its step and epoch."""
    if None in row or None in row.values():
        return False
    try:
        return math.isfinite(float(row["step"])) and math.isfinite(float(row.get("epoch") or 0))
    except ValueError:
        return False


def rows_up_to(progress: Progress | None) -> Keep:
    """Keep the rows logged before a checkpoint; a run that continues from there logs the rest again.

    >>> keep = rows_up_to(Progress(iterations=3, optimizer_steps=6, images=0, batches=0, logged=3))
    >>> [keep({"step": step, "epoch": epoch}) for step, epoch in [("0", ""), ("5", "2"), ("7", "3"), ("8", "")]]
    [True, True, False, False]
    """

    def keep(row: dict[str, Any]) -> bool:
        if progress is None:
            return False
        if row.get("epoch"):
            return float(row["epoch"]) < progress.logged
        return float(row.get("step") or 0) <= progress.optimizer_steps

    return keep
