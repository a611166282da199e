"""A checkpoint on disk: written so that it is whole or not there, and read so that damage is noticed."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from typing_extensions import override

DRAFT_PREFIX = "writing-"
"""A file of such a name is not whole yet, or was left by a run that was killed."""
NEEDED_KEYS = ("state_dict", "loops", "global_step", "optimizer_states", "lit_vgrpo")


class CheckpointDamage(Exception):
    """A file is no checkpoint of ours, or no longer a whole one; the message says why."""


class FileCheckpointIO(TorchCheckpointIO):
    """Writes beside the file that is asked for, without a copy in memory or in the system's folder for drafts."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        draft = path if path.name.startswith(DRAFT_PREFIX) else path.with_name(DRAFT_PREFIX + path.name)
        write(checkpoint, draft)
        if draft != path:
            put_in_place(draft, path)


def write(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint and wait until it is on the disk.

    Raises:
        OSError: it cannot be written; what was written is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        path.unlink(missing_ok=True)
        # torch's writer says RuntimeError when the disk says no; the first cause is the one to tell
        raise _disk_error(error) from error


def _disk_error(error: BaseException) -> OSError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return OSError(None, str(error).splitlines()[0])


def put_in_place(draft: Path, path: Path, previous: Path | None = None) -> None:
    """Give a written file its name; the file that had it becomes ``previous``. Renames only, each of them lasting.

    Raises:
        OSError: a rename failed; no file is lost.
    """
    if previous is not None and zipfile.is_zipfile(path):  # a torn file must not take the place of a good one
        os.replace(path, previous)
    os.replace(draft, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # no such thing as opening a folder, as on Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's content; tensors stay on the disk until they are looked at.

    Raises:
        CheckpointDamage: it is torn, unreadable, or lacks a part.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except PermissionError as error:
        raise CheckpointDamage(f"cannot be read: {error.strerror}") from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointDamage("is torn, or no checkpoint") from error
    missing = [key for key in NEEDED_KEYS if key not in content] if isinstance(content, dict) else list(NEEDED_KEYS)
    if missing:
        raise CheckpointDamage(f"has no {missing[0]}: no checkpoint of a run")
    return content


def verify(path: Path) -> None:
    """Compare every byte with the file's own checksums, which torch itself does not.

    Raises:
        CheckpointDamage: with the first part that differs.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointDamage("is torn, or no checkpoint") from error
    if damaged is not None:
        raise CheckpointDamage(f"is damaged: {damaged} is not what was written")
