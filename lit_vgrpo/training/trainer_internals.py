"""Changes to Lightning's Trainer that have no public API; private names are those of lightning 2.6.6."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, chdir, nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import _configure_optimizers
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook, _call_setup_hook
from lightning.pytorch.trainer.configuration_validator import _verify_loop_configurations
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lit_vgrpo.data import PromptDataModule
from lit_vgrpo.system.paths import TypedPath, start_folder

Child = subprocess.Popen[Any]
Kind = TypeVar("Kind", bound=Callback)


class RunTrainer(Trainer):
    """Declares attributes that Lightning's Trainer has without declaring them; never instantiated."""

    callbacks: list[Callback]
    datamodule: PromptDataModule
    fast_dev_run: bool | int
    overfit_batches: float


def declared(trainer: Trainer) -> RunTrainer:
    """Return the trainer itself, with these attributes for the type checker."""
    return cast(RunTrainer, trainer)


def callbacks_of(trainer: Trainer, kind: type[Kind]) -> list[Kind]:
    """Return the callbacks of a class, in order."""
    return [callback for callback in declared(trainer).callbacks if isinstance(callback, kind)]


def saves_by_time(callback: Callback) -> bool:
    """Return True for Lightning's ModelCheckpoint with ``train_time_interval``, which manual optimization ignores."""
    return getattr(callback, "_train_time_interval", None) is not None


def log_row(trainer: Trainer, metrics: Mapping[str, float]) -> None:
    """Log a row of metrics, and let callbacks monitor them; ``log_dict`` takes many times the CPU time."""
    values = torch.tensor([*metrics.values()], dtype=torch.float64).unbind()
    row = dict(zip(metrics, values, strict=True))
    trainer._logger_connector.log_metrics(row)
    trainer.callback_metrics.update(row)


def show_in_bar(trainer: Trainer, name: str, value: float) -> None:
    """Show a value in Lightning's progress bars."""
    trainer._logger_connector._progress_bar_metrics[name] = value


def run_folder(trainer: Trainer) -> Path:
    """Return ``trainer.default_root_dir``, which messages show relative to the folder of the command if it is in it."""
    return TypedPath(os.path.abspath(trainer.default_root_dir))


def move_root_dir(trainer: Trainer, folder: Path | None = None) -> Path:
    """Change ``trainer.default_root_dir``, which the constructor sets, to a folder or its absolute path; return it."""
    folder = folder or run_folder(trainer)
    trainer._default_root_dir = str(folder)  # type: ignore[attr-defined]
    return folder


def call_hooks(trainer: Trainer, name: str, *args: Any) -> None:
    """Call a hook of the callbacks and of the module, as Lightning does under automatic optimization."""
    _call_callback_hooks(trainer, name, *args)
    _call_lightning_module_hook(trainer, name, *args)


def read_optimizers(module: LightningModule, read: Callable[[list[Any], list[dict[str, Any]]], None]) -> None:
    """Let ``read`` see the optimizers and schedules that ``configure_optimizers`` returns next, also a subclass's.

    Strategies wrap the optimizers, and Lightning drops the metric of a schedule under manual optimization.
    """
    configure, own = module.configure_optimizers, vars(module).get("configure_optimizers")

    def once() -> Any:
        del module.configure_optimizers
        if own is not None:
            module.configure_optimizers = own  # type: ignore[method-assign]
        optimizers, found, monitor = _configure_optimizers(cast(Any, configure()))
        schedules = [{"monitor": monitor} | (one if isinstance(one, dict) else {"scheduler": one}) for one in found]
        read(optimizers, schedules)
        ignored = ("monitor", "strict", "reduce_on_plateau")  # Lightning would warn of them
        return optimizers, [{name: x for name, x in one.items() if name not in ignored} for one in schedules]

    module.configure_optimizers = once  # type: ignore[method-assign]


def accumulating(trainer: Trainer, is_last: bool) -> AbstractContextManager[None]:
    """Return a context for a micro-batch's passes: gradients are reduced over ranks with an update's last one."""
    strategy = trainer.strategy
    return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) and not is_last else nullcontext()


def skip_step(trainer: Trainer) -> bool:
    """Count an optimizer step that is not taken, and return ``False``."""
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    progress.increment_ready()
    progress.increment_completed()
    return False


def set_logged_step(trainer: Trainer, remaining: int) -> None:
    """Let loggers use the number, from 0, of an iteration's last step, which is ``remaining`` optimizer steps away."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step + remaining - 1


def round_progress(checkpoint: Mapping[str, Any]) -> bool:
    """Let a checkpoint saved within a batch repeat the batch; return True if only the batch's last hooks are missing.

    Lightning's own restart miscounts both, and a checkpoint of the resumed run then skips or repeats an epoch.
    """
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    total = batches["total"]
    if total["completed"] == total["ready"]:
        return False
    is_trained: bool = total["processed"] == total["ready"]  # in on_train_batch_end
    total.update(dict.fromkeys(total, total["completed"]))
    batches.update(current=dict.fromkeys(batches["current"], 0), is_last_batch=False)
    return is_trained


def read_limits(trainer: Trainer) -> None:
    """Make the loaders and apply the trainer's limits to them, which raises for those that do not fit."""
    trainer.fit_loop.setup_data()
    trainer.fit_loop.epoch_loop.val_loop.setup_data()


def rehearse_setup(trainer: Trainer, module: LightningModule, data: LightningDataModule) -> None:
    """Call what ``fit`` calls before it loads weights, in this process only: the hooks ``setup``, and the loaders.

    Loggers are replaced, since they would write. Raises what ``fit`` would.
    """
    trainer.loggers = [DummyLogger()]  # some callbacks need one
    trainer.state.fn = TrainerFn.FITTING
    trainer.training = True
    trainer._data_connector.attach_data(module, datamodule=data)
    trainer.strategy.connect(module)
    trainer._callback_connector._attach_model_callbacks()
    _verify_loop_configurations(trainer)
    _call_setup_hook(trainer)
    read_limits(trainer)


def call_train_hooks_at_end(trainer: Trainer) -> None:
    """Make ``fit`` call ``on_train_start`` and ``on_train_end`` if no epoch is left; Lightning's loop skips them."""
    loop = trainer.fit_loop
    run = loop.run

    def run_to_the_end() -> None:
        run()
        loop.on_run_start()
        loop.on_run_end()

    loop.run = run_to_the_end  # type: ignore[method-assign]


def script_launcher(strategy: Strategy) -> _SubprocessScriptLauncher | None:
    """Return the launcher that starts this script once for each rank; ``None`` for any other."""
    launcher = strategy.launcher
    return launcher if type(launcher) is _SubprocessScriptLauncher else None


def hand_over_children(strategy: Strategy, take: Callable[[list[Child]], None], environment: Mapping[str, str]) -> None:
    """Replace Lightning's observer of the ranks that rank 0 starts, which silently kills rank 0 too.

    Args:
        take: Called with their processes, and with none once Lightning itself kills them.
        environment: Variables to set before they start.
    """
    launcher = script_launcher(strategy)
    assert launcher is not None
    ours = _HandingOver(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
    ours.take, ours.environment = take, environment
    strategy._launcher = ours


class _HandingOver(_SubprocessScriptLauncher):
    take: Callable[[list[Child]], None]
    environment: Mapping[str, str]
    children: Sequence[Child] = ()

    @override
    def _call_children_scripts(self) -> None:
        os.environ.update(self.environment)
        with chdir(start_folder()):  # which a reward's constructor may have left
            super()._call_children_scripts()
        self.children, self.procs = self.procs, []  # an observer of no processes ends at once
        self.take(self.children)

    @override
    def kill(self, signum: Any) -> None:
        if signum == signal.SIGKILL:
            self.take([])
        for child in self.children:
            child.send_signal(signum)
