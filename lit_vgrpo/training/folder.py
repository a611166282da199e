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


def reserve(base: Path, lock: FolderLock, is_resumed: bool = False) -> tuple[Path, list[Path]]:
    """Create and lock the first free folder of :func:`candidates`; safe when several runs start at once.

    An empty folder is free, and one in which a run only started. A resumed run takes ``base`` itself.

    Returns:
        The folder, and the folders created for it, the inner ones first.

    Raises:
        UserError: The folder cannot be created or written to, or another process has the one to resume in.
    """
    try:
        for folder in [base] if is_resumed else candidates(base):
            made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
            if made or is_resumed:
                folder.mkdir(parents=True, exist_ok=True)
            if is_resumed:
                lock.take(folder)
                return folder, made
            if (made or _is_free(folder)) and lock.try_to_take(folder):
                if lock.is_safe and (made or _is_free(folder)):  # a run may have ended in it between these lines
                    return folder, made
                lock.release()
    except OSError as error:
        broken = next((path for path in (base, *base.parents) if path.is_symlink() and not path.exists()), None)
        why = error.strerror if broken is None else f"{broken} is a link to {broken.readlink()}, which does not exist"
        raise UserError(f"Cannot create the run folder {base}: {why}. Set run_dir=/another/folder.") from error
    raise AssertionError("unreachable: the candidates never end")


def _is_free(folder: Path) -> bool:
    """Return True for a folder without a result: it is empty, or a run wrote its recipe and no more."""
    try:
        names = {path.name for path in folder.iterdir()}
        config = folder / CONFIG_NAME
        is_recipe = config.is_file() and f"\n{FOUND_IN}:" in config.read_text(errors="replace")
    except OSError:  # a file, a link that leads nowhere, or a folder of another user
        return False
    return names - {"lost+found"} <= (STARTED if is_recipe else {LOCK})  # which a new disk has


def release(folder: Path, made: Iterable[Path]) -> None:
    """Remove the lock file from a folder to which nothing else was written, and the folders ``made`` for it."""
    with suppress(OSError):
        if os.listdir(folder) == [LOCK]:
            (folder / LOCK).unlink()
        for one in made:
            one.rmdir()


class FolderLock:
    """Locks a folder against other runs until this process ends, however it ends.

    The lock is on a file in it, open for writing: NFS locks no folders, and other network disks only within a machine.
    """

    def __init__(self) -> None:
        self._handle: int | None = None
        self._lock: int | None = None
        self.is_safe = True  # False on a disk without locks, if another process may have the folder

    def take(self, folder: Path) -> None:
        """Lock a folder; raise UserError if another process has it, or if it cannot be written to."""
        if not self.try_to_take(folder):
            advice = f"Wait for it, or stop it. If its machine is gone, run: {shell_line('rm', folder / LOCK)}"
            raise UserError(f"Another process is still writing to {folder}. {advice}")

    def try_to_take(self, folder: Path) -> bool:
        """Lock a folder; return ``False`` if another process has it, raise UserError if it cannot be written to."""
        file = folder / LOCK
        while self._lock is None:
            try:
                is_new = not os.path.lexists(file)
                lock = os.open(file, os.O_RDWR | os.O_CREAT | (os.O_EXCL if is_new else 0), 0o666)
            except FileExistsError:  # another process created it just now
                continue
            except OSError as error:
                raise UserError(f"Cannot write to {folder}: {error.strerror}. Set run_dir=/another/folder.") from error
            with suppress(OSError):  # of another user, who may do what the folder allows
                os.fchmod(lock, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.is_safe = True
            except BlockingIOError:
                os.close(lock)
                return False
            except OSError as error:
                self.is_safe = is_new
                report([f"WARNING: {folder} cannot be locked ({error.strerror}). Start no second run in it."])
            if file.exists() and os.path.samestat(os.fstat(lock), file.stat()):  # else its holder just removed it
                self._lock, self._handle = lock, os.open(folder, os.O_RDONLY)
            else:
                os.close(lock)
        return True

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
