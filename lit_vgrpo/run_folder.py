"""The folder that one run writes to: never an old one, and never the same one twice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lit_vgrpo.errors import UserError

CONFIG_NAME = "config.yaml"


def candidates(base: Path) -> Iterator[Path]:
    """``base``, ``base-2``, ``base-3``, ...

    >>> from itertools import islice
    >>> [path.name for path in islice(candidates(Path("runs/demo")), 3)]
    ['demo', 'demo-2', 'demo-3']
    """
    yield base
    number = 2
    while True:
        yield base.with_name(f"{base.name}-{number}")
        number += 1


def reserve(base: Path) -> Path:
    """Create the first free folder of :func:`candidates`; safe when several runs start at once.

    Raises:
        UserError: the folder cannot be created.
    """
    if not base.name:
        raise UserError(f"run_dir={base} has no folder name. Set run_dir=runs/my_run.")
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for folder in candidates(base):
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise UserError(
            f"Cannot create the run folder {base}: {error.strerror}. Set run_dir=/another/folder."
        ) from error
    raise AssertionError("unreachable: the candidates never end")


def release(folder: Path) -> None:
    """Give back a folder in which nothing was written."""
    try:
        folder.rmdir()
    except OSError:
        return


def is_first_process() -> bool:
    """True in the one process, of all ranks, that owns the folder. Works before a Trainer exists."""
    ranks = [os.environ.get(key, "0") for key in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")]
    return all(rank in ("", "0") for rank in ranks)


class RunFolder(Callback):
    """Tells every rank the folder that the first one created.

    Children of a distributed run start before they can ask; until ``setup`` they hold the name that was asked for.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = trainer.strategy.broadcast(trainer.default_root_dir)
        trainer._default_root_dir = folder  # type: ignore[attr-defined]  # set by the Trainer, read-only in public
