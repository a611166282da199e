"""Atomic writing of folders: to a temporary folder next to the destination, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lit_vgrpo.errors import UserError, one_line

DRAFT_PREFIX = "writing-"
"""Prefix of an incomplete file or folder."""
WRITE_ERRORS = (OSError, SafetensorError)
"""Exceptions raised by a full or read-only disk."""


def vacant_folder(text: str) -> Path:
    """Return the path of a folder that is empty or does not exist.

    Raises:
        UserError: The path is a file or a non-empty folder.
    """
    folder = Path(text).expanduser()
    if any(folder.iterdir()) if folder.is_dir() else folder.exists():
        what = "is not empty" if folder.is_dir() else "is a file"
        raise UserError(f"{text} {what}, and nothing is overwritten. Choose a new folder.")
    return folder


@contextmanager
def write_new_folder(folder: Path, option: str) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to an empty or new folder at the end of the block.

    Raises:
        UserError: the disk is full or not writable.
    """
    try:
        with write_folder_atomically(folder) as draft:
            yield draft
    except WRITE_ERRORS as error:
        raise UserError(f"Cannot write {folder}: {write_error(error)}. Choose another folder: {option} DIR.") from error


@contextmanager
def write_folder_atomically(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to the destination, and rename it at the end of the block.

    If the block raises, the temporary folder is removed.

    Args:
        replace: if the destination has entries, replace those of the same name and keep the others.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    target = folder.resolve()
    draft = target.with_name(f"{DRAFT_PREFIX}{target.name}-{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        yield draft
        _finish(draft)
        if replace and target.is_dir():
            for entry in sorted(draft.iterdir()):
                if (target / entry.name).is_dir():
                    shutil.rmtree(target / entry.name)
                os.replace(entry, target / entry.name)
            sync_folder(target)
            return
        os.rename(draft, target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_error(error: Exception) -> str:
    """Return why something could not be written, in a few words."""
    return error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)


def _finish(folder: Path) -> None:
    """Sync all files to disk and give them the folder's read permissions, since safetensors makes private files."""
    mode = folder.stat().st_mode & 0o666
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        else:
            path.chmod(mode)
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
