"""The folder of a run: creating it, locking it against other runs, and finding one by a path."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lit_vgrpo.config.recipe import FOUND_IN
from lit_vgrpo.errors import UserError, report, shell_line, suggestion
from lit_vgrpo.system.paths import CONFIG_NAME as CONFIG_NAME
from lit_vgrpo.system.paths import typed_path, write_atomically
from lit_vgrpo.training.trainer_internals import move_root_dir, run_folder

CHECKPOINTS = "checkpoints"
LOCK = ".lock"
BEST, LAST = "best.ckpt", "last.ckpt"
PREVIOUS, INTERRUPTED = "previous.ckpt", "interrupted.ckpt"
EXPORT, REPORT_NAME = "export", "report.html"
WRITTEN = (REPORT_NAME, "summary.json", "metrics.csv", "samples", CHECKPOINTS, EXPORT)
"""Results in a run folder."""
STARTED = {CONFIG_NAME, LOCK, "tensorboard", "trackers.json"}
"""What a run writes before training."""


def candidates(base: Path) -> Iterator[Path]:
    """Yield ``base``, ``base-2``, ``base-3``, ...

    >>> from itertools import islice
    >>> [path.name for path in islice(candidates(Path("runs/demo")), 3)]
    ['demo', 'demo-2', 'demo-3']
    """
    yield base
    yield from (base.with_name(f"{base.name}-{number}") for number in count(2))


def reserve(base: Path, is_resumed: bool = False) -> Path:
    """Create the first free folder of :func:`candidates`; safe when several runs start at once.

    A folder in which a run only started is free. A resumed run takes ``base`` itself. Raises UserError if the folder
    cannot be created.
    """
    try:
        for folder in candidates(base):
            with suppress(FileExistsError):
                folder.mkdir(parents=True, exist_ok=is_resumed)
                return folder
            if _has_only_started(folder):
                return folder
    except OSError as error:
        what = f"Cannot create the run folder {base}: {error.strerror}."
        raise UserError(f"{what} Set run_dir=/another/folder.") from error
    raise AssertionError("unreachable: the candidates never end")


def _has_only_started(folder: Path) -> bool:
    """Return True if a run that has ended wrote its recipe to a folder, and no result."""
    config = folder / CONFIG_NAME
    if not config.is_file() or {path.name for path in folder.iterdir()} - STARTED:
        return False
    lock = FolderLock()
    with suppress(UserError):
        lock.take(folder)
    was_free = lock.is_held and lock.works
    lock.release()
    return was_free and f"\n{FOUND_IN}:" in config.read_text(errors="replace")


def release(folder: Path, made: Iterable[Path] = ()) -> None:
    """Remove a folder to which nothing was written, and the folders ``made`` for it, the inner ones first."""
    with suppress(OSError):
        if os.listdir(folder) == [LOCK]:
            (folder / LOCK).unlink()
        for one in (folder, *made):
            one.rmdir()


class FolderLock:
    """Locks a folder against other runs until this process ends, however it ends.

    The lock is on a file in it, open for writing: NFS locks no folders, and other network disks only within a machine.
    """

    def __init__(self) -> None:
        self._handle: int | None = None
        self._lock: int | None = None
        self.works = True  # False on a disk without locks

    def take(self, folder: Path) -> None:
        """Lock a folder; raise UserError if another process has it, or if it cannot be written to."""
        file = folder / LOCK
        while self._lock is None:
            try:
                lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                raise UserError(f"Cannot write to {folder}: {error.strerror}. Set run_dir=/another/folder.") from error
            with suppress(OSError):  # of another user, who may do what the folder allows
                os.fchmod(lock, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(lock)
                advice = f"Wait for it, or stop it. If its machine is gone, run: {shell_line('rm', file)}"
                raise UserError(f"Another process is still writing to {folder}. {advice}") from error
            except OSError as error:
                self.works = False
                report([f"WARNING: {folder} cannot be locked ({error.strerror}). Start no second run in it."])
            if file.exists() and os.path.samestat(os.fstat(lock), file.stat()):  # else its holder just removed it
                self._lock, self._handle = lock, os.open(folder, os.O_RDONLY)
            else:
                os.close(lock)

    @property
    def is_held(self) -> bool:
        return self._lock is not None

    def has_moved(self, folder: Path) -> bool:
        """Return True if the folder's path now names another folder, or none."""
        if self._handle is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._handle), folder.stat())
        except OSError:
            return True

    def release(self) -> None:
        for handle in (self._lock, self._handle):
            if handle is not None:
                os.close(handle)
        self._lock = self._handle = None


class RunFolder(Callback):
    """Broadcasts the folder that rank 0 created; until ``setup`` the other ranks have the requested name.

    On rank 0 it keeps ``config.yaml``, without which the run cannot be resumed.

    Args:
        ckpt_path: Checkpoint that this rank resumes from; ``setup`` raises RuntimeError if the ranks' differ.
    """

    def __init__(self, ckpt_path: str | None = None) -> None:
        self.ckpt_path = ckpt_path
        self._recipe = ""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = trainer.strategy.broadcast(f"{run_folder(trainer)}")  # which machines may mount in different places
        move_root_dir(trainer, typed_path(folder))
        agreed = trainer.strategy.broadcast(self.ckpt_path)
        if trainer.strategy.reduce_boolean_decision(agreed != self.ckpt_path, all=False):
            raise RuntimeError(
                f"The ranks do not see the same checkpoints: rank 0 continues from {agreed}, "
                f"rank {trainer.global_rank} from {self.ckpt_path}. Use a run folder that all machines share."
            )

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.keep_recipe(run_folder(trainer))

    def write_recipe(self, folder: Path, text: str, is_changed: bool) -> None:
        """Write ``config.yaml``; an existing file stays unless the settings were changed."""
        file = folder / CONFIG_NAME
        if is_changed or not file.exists():
            write_atomically(file, text)
        self._recipe = file.read_text(encoding="utf-8")

    def keep_recipe(self, folder: Path) -> bool:
        """Write a deleted ``config.yaml`` again, and report it; return ``False`` if that fails."""
        file = folder / CONFIG_NAME
        if not self._recipe or file.exists():
            return True
        what = "is written again."
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(file, self._recipe)
        except (OSError, UserError) as error:
            what = f"the run cannot be continued without it. {error}"
        report([f"{file} was deleted, and {what}"])
        return file.exists()


def find_checkpoint(text: str, run: Path) -> Path:
    """Return a checkpoint by its path, or its name in a run's checkpoint folder; raise UserError if there is none."""
    named = Path(text).expanduser()
    for path in (typed_path(text), run / named, run / CHECKPOINTS / named):
        if path.is_file():
            return path
    known = sorted(path.name for path in (run / CHECKPOINTS).glob("*.ckpt"))
    raise UserError(f"--checkpoint {text} does not exist. {suggestion(text, known) if known else no_checkpoint(run)}")


def no_checkpoint(run: Path) -> str:
    """Return the error message for a run without checkpoints."""
    return f"{run} has no checkpoint yet. Train it: {shell_line('lightning', 'run', run / CONFIG_NAME, '--resume')}"
