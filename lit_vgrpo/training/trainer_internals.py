"""Changes to Lightning's Trainer that have no public way; private names are those of lightning 2.6.6."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS, _ResultCollection
from torch import Tensor
from typing_extensions import override

Child = subprocess.Popen[Any]
Kind = TypeVar("Kind", bound=Callback)


def callbacks_of(trainer: Trainer, kind: type[Kind]) -> list[Kind]:
    """Return the callbacks of a class, in order."""
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]  # type: ignore[attr-defined]


def is_on_this_machine(path: Any) -> bool:
    """Return ``True`` for a path in a local file system, ``False`` for one such as ``s3://...``."""
    return _is_local_file_protocol(path)


def move_root_dir(trainer: Trainer, folder: str) -> None:
    """Change ``trainer.default_root_dir``, which the constructor sets, when only rank 0 knew the run folder then."""
    trainer._default_root_dir = folder  # type: ignore[attr-defined]


def count_iterations(trainer: Trainer, iterations: int) -> None:
    """Let ``fast_dev_run``, which counts batches, run this many whole epochs."""
    trainer.limit_train_batches = 1.0
    trainer.fit_loop.max_epochs = iterations
    trainer.fit_loop.epoch_loop.max_steps = -1


def call_train_hooks_at_end(trainer: Trainer) -> None:
    """Let ``fit`` call ``on_train_start`` and ``on_train_end`` where no epoch is left; Lightning's loop skips them."""
    loop = trainer.fit_loop
    run = loop.run

    def run_to_the_end() -> None:
        run()
        loop.on_run_start()
        loop.on_run_end()

    loop.run = run_to_the_end  # type: ignore[method-assign]


def log_at_epoch_end(trainer: Trainer, values: Mapping[str, Tensor]) -> None:
    """Log values at the end of this epoch as ``self.log(on_epoch=True)`` does, all in one call.

    They stand in ``trainer.callback_metrics`` and in the loggers' row beside what ``self.log`` was given. ``self.log``
    makes a torchmetrics object for each name, and takes all of them through each epoch again.

    Args:
        values: scalars, already reduced over ranks.
    """
    _results_of_epoch(trainer).plain.update(values)


def log_epoch_now(trainer: Trainer) -> None:
    """Give the loggers this epoch's row now; Lightning does so after the hooks of the epoch's end.

    Call it before a checkpoint of the epoch's end is written: a run that is killed between the two and resumed from
    there would have no such row. What hooks log later stands in a row of its own.
    """
    loop, results = trainer.fit_loop.epoch_loop, _results_of_epoch(trainer)
    row = results.metrics(on_step=False)["log"]
    epochs = trainer.fit_loop.epoch_progress.state_dict()["current"]
    is_past_batches = epochs["processed"] == epochs["ready"]
    loop._batches_that_stepped -= is_past_batches  # as fit_loop.on_advance_end does; before that it is not counted yet
    trainer._logger_connector.log_metrics(row)
    loop._batches_that_stepped += is_past_batches
    results.written.update(row)


def _results_of_epoch(trainer: Trainer) -> _WithPlainValues:
    loop = trainer.fit_loop.epoch_loop
    if not isinstance(loop._results, _WithPlainValues):
        loop._results = _WithPlainValues(loop._results)
    return loop._results


class _WithPlainValues(_ResultCollection):
    """The metrics of a training epoch, some of which are finished values.

    Attributes:
        plain: the finished values.
        written: names that the loggers have already.
    """

    def __init__(self, others: _ResultCollection) -> None:
        super().__init__(training=True)
        self.update(others)
        self.__dict__.update(vars(others))
        self.plain: dict[str, Tensor] = {}
        self.written: set[str] = set()

    def __bool__(self) -> bool:
        return bool(len(self) or self.plain)

    @override
    def metrics(self, on_step: bool) -> _METRICS:
        found = super().metrics(on_step)
        if not on_step:
            found["callback"].update(self.plain)
            found["log"].update(self.plain)
            found["log"] = {name: value for name, value in found["log"].items() if name not in self.written}
        return found

    @override
    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        super().reset(metrics, fx)
        if metrics is None and fx is None:  # at the end of an epoch
            self.plain, self.written = {}, set()


def script_launcher(strategy: Strategy) -> _SubprocessScriptLauncher | None:
    """Return the launcher that starts this script once for each rank; ``None`` for any other."""
    launcher = strategy.launcher
    return launcher if type(launcher) is _SubprocessScriptLauncher else None


def hand_over_children(strategy: Strategy, take: Callable[[list[Child]], None], environment: Mapping[str, str]) -> None:
    """Replace Lightning's observer of the ranks that rank 0 starts, which kills rank 0 too, without a word.

    Args:
        take: is called with their processes, and with none once Lightning itself kills them.
        environment: variables to set before they start.
    """
    launcher = script_launcher(strategy)
    assert launcher is not None
    strategy._launcher = _HandingOver(launcher, take, environment)


class _HandingOver(_SubprocessScriptLauncher):
    def __init__(
        self,
        launcher: _SubprocessScriptLauncher,
        take: Callable[[list[Child]], None],
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
        self.take, self.environment = take, environment
        self.children: list[Child] = []

    @override
    def _call_children_scripts(self) -> None:
        os.environ.update(self.environment)
        super()._call_children_scripts()
        self.children, self.procs = self.procs, []  # an observer of no processes ends by itself
        self.take(self.children)

    @override
    def kill(self, signum: Any) -> None:
        if signum == signal.SIGKILL:
            self.take([])
        for child in self.children:
            child.send_signal(signum)
