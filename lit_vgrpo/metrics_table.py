"""``metrics.csv``: Lightning's table, which a resumed run goes on with and a killed one cannot lose."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lit_vgrpo.resume import Progress

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
        if keep is not None and os.path.isfile(self.metrics_file_path):
            self.metrics_keys, rows = read_table(Path(self.metrics_file_path))
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
                path = Path(self.metrics_file_path)
                self._write([*(read_table(path)[1] if path.is_file() else []), *self.metrics])
        except OSError as error:
            if not self.waits:
                what = f"Cannot write {self.metrics_file_path}: {error.strerror}."
                rank_zero_warn(f"{what} Training goes on, and the rows are written once there is room.")
            self.waits, self._columns = True, []
            return
        self.metrics, self.waits = [], False

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
    """Columns and rows; a last line that was being written when the run was killed is left out."""
    text = path.read_text()
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()
    reader: csv.DictReader[str] = csv.DictReader(lines)
    columns = list(reader.fieldnames or [])
    return columns, [row for row in reader if None not in row.values()]


def rows_up_to(progress: Progress | None) -> Keep:
    """Keeps what was logged before a checkpoint; a run that goes on from there logs the rest again.

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
