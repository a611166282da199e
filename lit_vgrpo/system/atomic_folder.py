"""A folder that is written to: beside its place first, so that it is whole or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from lit_vgrpo.errors import UserError, one_line

DRAFT_PREFIX = "writing-"
"""Of a file or folder that is not whole yet."""
WRITE_ERRORS = (OSError, SafetensorError)
"""What a full disk, or one that may not be written to, raises."""


def vacant_folder(text: str) -> Path:
    """Return the path of a folder that is empty or does not exist yet.

    Raises:
        UserError: Something lies there already.
    """
    folder = Path(text).expanduser()
    if folder.is_dir():
        fault = "is not empty" if any(folder.iterdir()) else None
    else:
        fault = "is a file" if folder.exists() or folder.is_symlink() else None
    if fault is not None:
        raise UserError(f"{text} {fault}, and nothing is overwritten. Name a new folder.")
    return folder


@contextmanager
def written_whole(folder: Path, option: str) -> Iterator[Path]:
    """Yield a draft beside a vacant folder, and rename it into place at the end of the block.

    Raises:
        UserError: the disk is full, or does not let itself be written to.
    """
    try:
        with drafted(folder) as draft:
            yield draft
    except WRITE_ERRORS as error:
        raise UserError(f"Cannot write {folder}: {write_fault(error)}. Name another place: {option} DIR.") from error


@contextmanager
def drafted(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a draft beside a folder, and rename it into place at the end of the block.

    Where the block raises, the draft is removed; where the process is killed, it is left under a name of its own.

    Args:
        replace: where the folder has entries, those of the draft take the place of their namesakes, and others stay.

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
                _move_over(entry, target / entry.name)
            sync_folder(target)
            return
        if target.is_dir():
            target.rmdir()  # an empty one; elsewhere than on POSIX a rename does not replace it
        os.rename(draft, target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_fault(error: Exception) -> str:
    """Why something could not be written, in a few words."""
    return error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)


def _move_over(entry: Path, place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    os.replace(entry, place)


def _finish(folder: Path) -> None:
    """Wait until all files are on the disk, readable for whom the folder is: safetensors makes private ones."""
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
    """Wait until the names in a folder are on the disk."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # no such thing as opening a folder, as on Windows
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
