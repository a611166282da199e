"""``metrics.csv``: Lightning's table, which a resumed run goes on with and a killed one cannot lose."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lit_vgrpo.runs.folder import candidates
from lit_vgrpo.runs.resume import Progress

Keep = Callable[[dict[str, str]], bool]


class MetricsTable(CSVLogger):
    """Writes ``FOLDER/metrics.csv``, every row at once.

    Args:
        folder: the run folder.
        keep: which rows of the table that is there stay; ``None`` starts a new table.
    """

    def __init__(self, folder: Path, keep: Keep | None = None) -> None:
        # name and version empty: the table lies in the run folder itself
        super().__init__(folder, name="", version="", flush_logs_every_n_steps=1)
        self._keep = keep

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        if not isinstance(self._experiment, _Writer):
            os.makedirs(self.root_dir, exist_ok=True)
            self._experiment = _Writer(self.log_dir, self._keep)
        return self._experiment


class _Writer(ExperimentWriter):
    """Lightning's writer, but that it replaces the file in one step where it must, and keeps rows a full disk refuses.

    Attributes:
        waits: rows could not be written and wait for the next time.
    """

    def __init__(self, folder: str, keep: Keep | None) -> None:
        self._keep = keep
        self._columns: list[str] = []  # in the file
        self.waits = False
        super().__init__(log_dir=folder)
        if keep is not None:
            self.metrics_keys, rows = self._table_there()
            if self.metrics_keys:
                self._write([row for row in rows if keep(row)])

    @override
    def _check_log_dir_exists(self) -> None:
        if self._keep is None:
            super()._check_log_dir_exists()

    @override
    def save(self) -> None:
        if not self.metrics:
            return
        self._record_new_keys()
        try:
            if self._columns == self.metrics_keys:
                self._append(self.metrics)
            else:
                columns, rows = self._table_there()
                self.metrics_keys = sorted({*self.metrics_keys, *columns})
                self._write([*rows, *self.metrics])
        except OSError as error:
            if not self.waits:
                what = f"Cannot write {self.metrics_file_path}: {error.strerror}."
                rank_zero_warn(f"{what} Training goes on, and the rows are written once there is room.")
            self.waits, self._columns = True, []
            return
        self.metrics, self.waits = [], False

    def _table_there(self) -> tuple[list[str], list[dict[str, str]]]:
        """Columns and rows of the file; what is no table of a run is moved aside, and the table begins anew."""
        path = Path(self.metrics_file_path)
        try:
            return read_table(path)
        except FileNotFoundError:
            return [], []
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            aside = next(p for p in candidates(path.with_name(f"{path.name}.foreign")) if not os.path.lexists(p))
            path.rename(aside)
            rank_zero_warn(f"{path} is not the table of a run ({why}): it is {aside.name} now, and a new one begins.")
            return [], []

    def _append(self, rows: list[dict[str, Any]]) -> None:
        size = os.stat(self.metrics_file_path).st_size
        try:
            with open(self.metrics_file_path, "a", newline="") as file:
                csv.DictWriter(file, fieldnames=self.metrics_keys).writerows(rows)
        except OSError:
            os.truncate(self.metrics_file_path, size)
            raise

    def _write(self, rows: list[dict[str, Any]]) -> None:
        draft = Path(f"{self.metrics_file_path}.tmp")
        try:
            with draft.open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=self.metrics_keys)
                writer.writeheader()
                writer.writerows(rows)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self.metrics_file_path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._columns = list(self.metrics_keys)


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows; a line that was being written when the run was killed is left out.

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
    """Whether a row has a cell for each column, and says when it was logged."""
    if None in row or None in row.values():
        return False
    try:
        return math.isfinite(float(row["step"])) and math.isfinite(float(row.get("epoch") or 0))
    except ValueError:
        return False


def rows_up_to(progress: Progress | None) -> Keep:
    """Keep the rows logged before a checkpoint; a run that continues from there logs the rest again.

    >>> keep = rows_up_to(Progress(iterations=3, optimizer_steps=6, images=0, batches=0))
    >>> [keep({"step": step, "epoch": epoch}) for step, epoch in [("0", ""), ("5", "2"), ("7", "3"), ("8", "")]]
    [True, True, False, False]
    """

    def keep(row: dict[str, Any]) -> bool:
        if progress is None:
            return False
        if row.get("epoch"):
            return float(row["epoch"]) < progress.iterations
        return float(row.get("step") or 0) <= progress.optimizer_steps

    return keep
