"""``tensorboard/``: TensorBoard's files, which a run can do without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override


class Events(TensorBoardLogger):
    """Lightning's TensorBoard logger, which stops with a warning when its files cannot be written."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._has_failed = False
        threading.excepthook = partial(_report_others, threading.excepthook)

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._unless_full(super().log_metrics, metrics, step)

    @override
    def save(self) -> None:
        self._unless_full(super().save)

    @override
    def finalize(self, status: str) -> None:
        self._unless_full(super().finalize, status)

    def _unless_full(self, write: Callable[..., None], *args: Any) -> None:
        if self._has_failed:
            return
        try:
            write(*args)
        except (OSError, ValueError) as error:
            cause = error.__cause__ if isinstance(error, ValueError) else error  # Lightning wraps what log_metrics gets
            if not isinstance(cause, OSError):
                raise
            self._has_failed = True
            rank_zero_warn(f"TensorBoard logging has stopped: {cause.strerror}. metrics.csv continues.")


def _report_others(report: Callable[[threading.ExceptHookArgs], Any], failure: threading.ExceptHookArgs) -> None:
    """Report a thread's failure, unless it is the writer's, which the logger reports in one line."""
    is_writer = type(failure.thread).__module__.startswith("tensorboard.")
    if not (is_writer and isinstance(failure.exc_value, OSError)):
        report(failure)
