"""Loggers of a run: ``metrics.csv``, which a resumed run continues, and TensorBoard, neither of which ends a run.

Also what a run gives to loggers in addition to its metrics: the recipe and images.
"""

from __future__ import annotations

import csv
import inspect
import json
import math
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import loggers
from lightning.pytorch.loggers import CometLogger, Logger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from PIL import Image
from pydantic import TypeAdapter
from torch import Tensor
from typing_extensions import override

from lit_vgrpo.core.records import FINGERPRINT
from lit_vgrpo.errors import UserError, one_line, shell_line
from lit_vgrpo.system.paths import new_file, read_regular, write_atomically
from lit_vgrpo.training.resume import Progress, checked_json

RUN_OPTIONS = {"WandbLogger": "version", "MLFlowLogger": "run_id", "CometLogger": "experiment_key"}
"""By tracker, the option of its logger that names a run to continue; the logger's ``version`` is the run."""
TRACKERS = "trackers.json"
NOT_LOGGED = {"connection", "key", "token", "url"}
MARK = f"heldout/{FINGERPRINT}"
FIRST_COLUMNS = ("iteration", "step", "reward/mean", "heldout/reward", "heldout/untrained_reward")


class MetricsTable(Logger):
    """Writes ``FOLDER/metrics.csv``, every row at once; rows wait in memory while the disk is full.

    All metrics of an iteration are in one row, unless one would replace another, as an evaluation of other held-out
    prompts does. The evaluation at the start is iteration 0. Lightning's CSVLogger deletes the file on a resume.

    Args:
        folder: The run folder.
        keep: Predicate for the existing rows to keep; ``None`` starts a new table.
    """

    name = version = ""

    def __init__(self, folder: Path, keep: Callable[[dict[str, str]], bool] | None = None) -> None:
        super().__init__()
        self._file = folder / "metrics.csv"
        has_rows = keep is not None and self._file.exists()
        kept = filter(keep, read_table(self._file)[1]) if has_rows else ()
        self._rows: list[Mapping[str, Any]] = [*map(_numbered, kept)]
        self._columns: list[str] = []
        self._num_written = self._last_row = self._end = 0  # the others are places in the file
        self._has_failed = False

    @property
    @override
    def save_dir(self) -> str:
        return str(self._file.parent)

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``config.yaml`` has the hyperparameters."""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Tensor | float], step: int | None = None) -> None:
        row = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        row = _numbered({**row, "step": step})
        if self._rows and _is_same_iteration(self._rows[-1], row):
            row = {**self._rows.pop(), **row}
            if self._num_written > len(self._rows):
                self._num_written, self._end = len(self._rows), self._last_row
        self._rows.append(row)
        self._write()

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._write()

    def _write(self) -> None:
        """Append the new rows, or replace the file if there are new columns."""
        if not (new := self._rows[self._num_written :]):
            return
        names = {*self._columns, *(name for row in new for name in row)}
        columns = [*(name for name in FIRST_COLUMNS if name in names), *sorted(names.difference(FIRST_COLUMNS))]
        replaces = columns != self._columns or not self._file.exists()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with new_file(self._file, "x", newline="") if replaces else self._file.open("r+", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=columns)
                if replaces:
                    writer.writeheader()
                else:
                    file.seek(self._end)
                for row in self._rows if replaces else new:
                    self._last_row = file.tell()
                    writer.writerow(row)
                self._end = file.tell()
        except OSError as error:
            if not self._has_failed:
                reason = f"Cannot write {self._file}: {error.strerror}."
                rank_zero_warn(f"{reason} Training continues; the rows are written once there is space.")
            self._columns, self._num_written, self._has_failed = [], 0, True  # the next attempt replaces the file
            return
        self._columns, self._num_written, self._has_failed = columns, len(self._rows), False


def _numbered(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its iteration, if that is known, and an evaluation's fingerprint as an integer."""
    number = {} if row.get(MARK) in (None, "") else {MARK: int(float(row[MARK])), "iteration": 0}
    number |= {} if row.get("epoch") in (None, "") else {"iteration": int(float(row["epoch"])) + 1}
    return {**row, **number}


def _is_same_iteration(last: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Return True if a row of metrics belongs to the last one; one without an iteration precedes or follows its row."""
    known = [f"{one['iteration']}" for one in (last, row) if one.get("iteration") not in (None, "")]
    follows = row.get("iteration") is None and len(known) == 1
    if len({*known}) > 1 or (follows and (known == ["0"] or f"{last['step']}" != f"{row['step']}")):
        return False
    shared = [name for name in row if name not in ("step", "epoch", "iteration") and last.get(name) not in (None, "")]
    return all(f"{last[name]}" == f"{row[name]}" for name in shared)


WATCHED = {
    "Reward": ("heldout/reward", "reward/mean"),
    "Untrained reward": ("heldout/untrained_reward",),
    "Groups without spread": ("reward/no_spread",),
    "Distance to the anchor, and KL": ("policy/anchor_distance", "policy/kl"),
    "Variation of the surrogate": ("surrogate/cv", "surrogate/cv_within"),
    "Seconds per iteration": ("time/iteration_s", "time/rollout_s", "time/reward_s"),
}
"""The metrics to look at first, by the titles of their charts in TensorBoard."""


class TensorBoard(TensorBoardLogger):
    """Lightning's logger, which stops with a warning when its files cannot be written, instead of ending the run.

    A row's step is the number of optimizer steps done, as an image's: 0 is before training. Lightning's is one less.
    The epoch and the fingerprint of the evaluation get no curves.
    Under Custom Scalars are the charts of ``WATCHED``.
    """

    _has_failed = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        report = threading.excepthook

        def report_others(args: threading.ExceptHookArgs) -> None:
            if getattr(args.thread, "exception", None) is not args.exc_value:  # which the writer raises in this thread
                report(args)

        threading.excepthook = report_others

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        is_start = _numbered(metrics).get("iteration") == 0
        curves = {name: value for name, value in metrics.items() if name not in ("epoch", MARK)}
        self._attempt(super().log_metrics, curves, step if step is None or is_start else step + 1)

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write the recipe as text; the tab of hyperparameters would show each key as a column."""
        self.hparams.update(params)  # for hparams.yaml
        text = yaml.safe_dump(params, sort_keys=False, allow_unicode=True)
        self._attempt(lambda: self.experiment.add_text("recipe", f"```yaml\n{text}```"))
        charts = {title: ["Multiline", [f"{tag}$" for tag in tags]] for title, tags in WATCHED.items()}  # as patterns
        self._attempt(lambda: self.experiment.add_custom_scalars({"What to look at": charts}))

    def log_image(
        self, key: str, images: list[Image.Image], step: int | None = None, caption: Sequence[str] = ()
    ) -> None:
        """Write images, as W&B's logger does, and their captions as texts ``KEY/caption``."""
        for image in images:
            self._attempt(lambda image=image: _add_image(self, key, image, step))
        for text in caption:
            self._attempt(lambda text=text: self.experiment.add_text(f"{key}/caption", text, step))

    @override
    def save(self) -> None:
        self._attempt(super().save)

    @override
    def finalize(self, status: str) -> None:
        self._attempt(super().finalize, status)

    def _attempt(self, write: Callable[..., None], *args: Any) -> None:
        if self._has_failed:
            return
        try:
            write(*args)
        except (OSError, ValueError) as error:
            cause = error.__cause__ if isinstance(error, ValueError) else error  # Lightning wraps errors in log_metrics
            if not isinstance(cause, OSError):
                raise
            self._has_failed = True
            rank_zero_warn(f"TensorBoard logging has stopped: {cause.strerror}. metrics.csv continues.")


class LitLogger(loggers.LitLogger, Logger):
    """Lightning's logger for lightning.ai, as a subclass of the Trainer's ``Logger``, with images.

    Lightning's class derives only from Fabric's ``Logger``. ``save_logs`` would run the command again to record it.
    """

    def __init__(self, name: str | None = None, teamspace: str | None = None, root_dir: str | None = None) -> None:
        super().__init__(root_dir, name, teamspace, save_logs=False)

    @override
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Log the recipe; without a login, raise RuntimeError instead of waiting for one in a browser."""
        from lightning_sdk.lightning_cloud.login import Auth

        login = Auth()
        if not (login.api_key or login.auth_token or login.load()):
            raise RuntimeError("not logged in. Run lightning-sdk login, or set LIGHTNING_USER_ID and LIGHTNING_API_KEY")
        super().log_hyperparams(params)

    def log_image(self, key: str, images: list[Image.Image], step: int | None = None) -> None:
        """Write images, as W&B's logger does."""
        import litlogger

        for image in images:
            self.experiment[key].append(litlogger.Image(image), step)


def _add_image(logger: TensorBoardLogger, key: str, image: Image.Image, step: int | None) -> None:
    logger.experiment.add_image(key, np.asarray(image), step, dataformats="HWC")


def log_picture(loggers: Iterable[Logger], key: str, image: Image.Image, step: int, caption: str = "") -> None:
    """Log an image to TensorBoard, W&B, MLflow, Comet and loggers with a ``log_image`` like W&B's; call it on rank 0.

    Args:
        caption: Text for those whose ``log_image`` takes a ``caption``, and for TensorBoard as ``KEY/caption``.
    """
    for logger in loggers:
        at = step if isinstance(logger, TensorBoard) else max(step - 1, 0)  # as the metrics of the same weights
        if hasattr(logger, "log_image"):
            options = inspect.signature(logger.log_image).parameters.values()
            takes = any(option.name == "caption" or option.kind is option.VAR_KEYWORD for option in options)
            logger.log_image(key=key, images=[image], step=at, **({"caption": [caption]} if takes and caption else {}))
        elif isinstance(logger, TensorBoardLogger):
            _add_image(logger, key, image, at)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_image(logger.run_id, image, key=key, step=at)
        elif isinstance(logger, CometLogger):
            logger.experiment.log_image(image, name=key, step=at)


def log_recipe(loggers: Sequence[Logger], recipe: dict[str, Any], folder: Path) -> None:
    """Log the recipe to every logger on rank 0, and keep the runs of trackers in a file of the run folder.

    A tracker that continues a run has its recipe, and MLflow takes no other. Raises UserError if a tracker cannot be
    opened, as without a login.
    """
    known = [run for _, run in _tracker_runs(folder)]
    for logger in loggers:
        name = type(logger).__name__
        try:
            if name in RUN_OPTIONS and str(logger.version) in known:
                _ = logger.experiment  # type: ignore[attr-defined]  # opens it
            else:
                logger.log_hyperparams(recipe)
        except Exception as error:  # trackers raise different exceptions
            advice = " Without an account: export WANDB_MODE=offline" if name == "WandbLogger" else ""
            advice += f" For a new run of the tracker: {shell_line('rm', folder / TRACKERS)}" if known else ""
            raise UserError(f"trainer.logger={name} cannot start: {one_line(error).rstrip('.')}.{advice}") from error
    runs = [(type(one).__name__, str(one.version)) for one in loggers if type(one).__name__ in RUN_OPTIONS]
    if runs:
        write_atomically(folder / TRACKERS, json.dumps(runs))


def log_settings(loggers: Iterable[Logger], parts: Mapping[str, Any]) -> None:
    """Log the class and the options of the parts of a run that no recipe describes to every logger."""
    for logger in loggers:
        try:
            logger.log_hyperparams({key: _options_of(part) for key, part in parts.items()})
        except Exception as error:  # MLflow takes no other values in a second fit
            rank_zero_warn(f"{type(logger).__name__} did not take the run's settings: {one_line(error)}")


def _options_of(value: Any) -> Any:
    """Return the class of an object, and this package's options that it keeps under their names, without addresses."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_options_of(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _options_of(item) for key, item in value.items()}
    if not type(value).__module__.startswith("lit_vgrpo."):
        return str(value) if isinstance(value, torch.dtype) else getattr(value, "__name__", type(value).__name__)
    makers = [vars(cls)["__init__"] for cls in type(value).__mro__ if "__init__" in vars(cls)]
    names = {name for maker in makers for name in inspect.signature(maker).parameters} - NOT_LOGGED
    attributes = {**vars(value), **vars(value).get("_modules", {})}
    kept = {name: _options_of(option) for name, option in attributes.items() if name in names}
    return {"class": type(value).__name__, **kept}


def continue_trackers(settings: Iterable[Any], folder: Path) -> list[str]:
    """Let trackers continue the runs that a run folder names, unless their options name one; return a line for each.

    Args:
        settings: The loggers' ``class_path`` and ``init_args``, which are changed in place.
    """
    lines, runs = [], _tracker_runs(folder)
    for setting in settings:
        name = setting.class_path.rpartition(".")[2]
        run = next((run for run in runs if run[0] == name), None)
        if run is not None and setting.init_args.get(RUN_OPTIONS[name]) is None:
            runs.remove(run)
            setting.init_args[RUN_OPTIONS[name]] = run[1]
            lines.append(f"{name} continues its run {run[1]}.")
    return lines


def _tracker_runs(folder: Path) -> list[tuple[str, str]]:
    """Return the class and the run of each tracker that a run folder names."""
    file = folder / TRACKERS
    runs = checked_json(file.read_bytes(), TypeAdapter(list[tuple[str, str]]), f"{file}") if file.is_file() else []
    return [run for run in runs if run[0] in RUN_OPTIONS]


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return a table's columns and rows, without lines that were cut off when a run was killed."""
    text = read_regular(path).decode("utf-8-sig", "replace").replace("\0", "")
    lines = text.splitlines(keepends=True)
    if len(lines) > 1 and not lines[-1].endswith("\n"):
        lines.pop()
    csv.field_size_limit(sys.maxsize)  # no damaged cell makes a table unreadable
    reader: csv.DictReader[str] = csv.DictReader(lines)
    rows = [row for row in reader if _is_whole(row)]
    return list(reader.fieldnames or []), rows


def _is_whole(row: dict[Any, Any]) -> bool:
    """Return ``True`` if a row has a cell for each column and numbers for its step and epoch."""
    if None in row or None in row.values():
        return False
    try:
        return math.isfinite(float(row.get("step") or "nan")) and math.isfinite(float(row.get("epoch") or 0))
    except ValueError:
        return False


def rows_up_to(progress: Progress) -> Callable[[Mapping[str, Any]], bool]:
    """Return a predicate for the rows logged before a checkpoint; a resumed run logs the rest again.

    >>> keep = rows_up_to(Progress(iterations=3, optimizer_steps=6, images=0, logged=3))
    >>> [keep({"step": step, "epoch": epoch}) for step, epoch in [("0", ""), ("5", "2"), ("7", "3"), ("8", "")]]
    [True, True, False, False]
    """

    def keep(row: Mapping[str, Any]) -> bool:
        if row.get("epoch"):
            return float(row["epoch"]) < progress.logged
        return float(row.get("step") or 0) <= progress.optimizer_steps

    return keep
