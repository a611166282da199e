"""Checkpoint and loggers that a run folder adds to a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger

from lit_vgrpo.errors import UserError
from lit_vgrpo.training.checkpoint_file import CheckpointDamage, read_sound
from lit_vgrpo.training.loggers import MetricsTable, TensorBoard, rows_up_to
from lit_vgrpo.training.resume import Progress, Resumption, newest_checkpoint


def read_checkpoint(path: Path, what: str) -> dict[str, Any]:
    """Read the checkpoint to continue from.

    Args:
        path: The checkpoint.
        what: Its name in messages.

    Raises:
        UserError: It does not exist, is a folder, or is damaged.
    """
    if not path.exists():
        raise UserError(f"{what} does not exist. Give a checkpoint of an earlier run.")
    if path.is_dir():
        newest = newest_checkpoint(path)
        advice = f"Set ckpt_path={newest}, or continue it with --resume." if newest else "Give a checkpoint file."
        raise UserError(f"{what} is a folder. {advice}")
    try:
        return read_sound(path)
    except CheckpointDamage as damage:
        raise UserError(f"{what} {damage}. Give another checkpoint of its folder.") from damage


def refuse_finished(checkpoint: dict[str, Any], trainer: Trainer, what: str) -> None:
    """Check that the trainer's limits leave iterations to train after a checkpoint; raise UserError if they do not."""
    progress = Progress.of(checkpoint)
    if progress.is_finished(trainer.max_epochs, trainer.max_steps):
        limit = "max_epochs" if progress.is_finished(trainer.max_epochs, max_steps=-1) else "max_steps"
        raise UserError(
            f"{what} is the state after {progress}. trainer.{limit}={getattr(trainer, limit)} leaves nothing to do: "
            "set it higher."
        )


def run_loggers(setting: Any, folder: Path, resumption: Resumption | None) -> list[Logger]:
    """Return the recipe's loggers, with ``metrics.csv`` and, unless it sets its own, TensorBoard in the run folder.

    Args:
        setting: The recipe's ``trainer.logger``.
        folder: The run folder.
        resumption: Where to continue the tables; ``None`` starts them.
    """
    progress = resumption.progress if resumption is not None else None
    loggers = as_list(setting, Logger)
    if not any(isinstance(logger, CSVLogger) for logger in loggers):
        loggers.insert(0, MetricsTable(folder, rows_up_to(progress) if resumption is not None else None))
    if setting in (None, True):
        purge: Any = {"purge_step": progress.optimizer_steps} if progress is not None else {}
        loggers.append(TensorBoard(folder, name="", version="tensorboard", **purge))
    return loggers


def as_list(value: Any, kind: type) -> list[Any]:
    """Return one part or several as a list; ``None`` and booleans are none."""
    if isinstance(value, kind):
        return [value]
    return [] if value is None or isinstance(value, bool) else list(value)
