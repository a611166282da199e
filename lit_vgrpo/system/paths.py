"""Paths in recipes, hashes of files, and atomic writing of files and folders."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from lit_vgrpo.errors import UserError, one_line

SHIPPED_PREFIX = "shipped:"
CONFIG_NAME = "config.yaml"
"""A run's recipe, in its folder."""
DRAFT_PREFIX = "writing-"
"""Prefix of an incomplete file or folder; one that a killed process left is removed by the next writer."""
WRITE_ERRORS = (OSError, SafetensorError)
"""Exceptions raised by a full or read-only disk."""


def shipped_root() -> Path:
    """Return the folder of the recipes, prompts and tiny pipelines installed with the package."""
    return Path(str(files("lit_vgrpo.recipes")))


def resolve_path(text: str | Path) -> Path:
    """Resolve a recipe's path: ``shipped:prompts/x.txt`` points into the installed recipes.

    Raises:
        ValueError: A ``shipped:`` path leaves the installed folder.
    """
    text = str(text)
    if not text.startswith(SHIPPED_PREFIX):
        return Path(text).expanduser()
    root = shipped_root()
    path = (root / text[len(SHIPPED_PREFIX) :]).resolve()
    if root.resolve() not in (path, *path.parents):
        raise ValueError(f"{text} leaves the shipped recipes folder {root}. Give a path without '..'.")
    return path


def import_from_here(*folders: Path) -> None:
    """Make modules in the current folder and in other folders importable; a console script lacks the current one.

    Args:
        folders: Folders to search first, in this order.
    """
    for folder in (os.getcwd(), *(str(folder.absolute()) for folder in reversed(folders))):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write a small file in UTF-8 atomically; raise UserError if it cannot be written."""
    try:
        with new_file(path, "x", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from error


@contextmanager
def new_file(path: Path, mode: str = "xb", **options: Any) -> Iterator[IO[Any]]:
    """Yield a new file that replaces ``path`` at the end of the block; takes open()'s arguments, follows no links."""
    draft = path.with_name(DRAFT_PREFIX + path.name)
    remove(draft)
    try:
        with draft.open(mode, **options) as file:
            yield file
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def copy_file(source: Path, target: Path) -> None:
    """Copy a file atomically; raise UserError for a link."""
    if source.is_symlink():
        raise UserError(f"{source} is a link, and its target may not be meant to be published. Replace it with a copy.")
    with source.open("rb") as read, new_file(target) as written:
        shutil.copyfileobj(read, written)


def remove(path: Path) -> None:
    """Remove a file, link or folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def vacant_folder(text: str) -> Path:
    """Return the path of a folder that is empty or does not exist.

    Raises:
        UserError: The path is a file or a non-empty folder.
    """
    folder = Path(text).expanduser()
    if any(folder.iterdir()) if folder.is_dir() else folder.exists():
        what = "is not empty" if folder.is_dir() else "is a file"
        raise UserError(f"{text} {what} and will not be overwritten. Choose a new folder.")
    return folder


@contextmanager
def write_new_folder(folder: Path, option: str, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder, and rename it at the end of the block; see :func:`write_folder_atomically`.

    Raises:
        UserError: The disk is full or not writable.
    """
    try:
        with write_folder_atomically(folder, replace) as draft:
            yield draft
    except WRITE_ERRORS as error:
        raise UserError(f"Cannot write {folder}: {write_error(error)}. Choose another folder: {option} DIR.") from error


@contextmanager
def write_folder_atomically(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to the destination, and rename it at the end of the block.

    If the block raises, the temporary folder is removed.

    Args:
        replace: If the destination has entries, replace those of the same name and keep the others.

    Raises:
        OSError, SafetensorError: The folder cannot be written.
    """
    target = folder.resolve()
    draft = target.with_name(DRAFT_PREFIX + target.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(draft)
        draft.mkdir()
        yield draft
        for path in draft.rglob("*"):
            if path.is_file():
                path.chmod(draft.stat().st_mode & 0o666)  # safetensors makes private files
        if replace and target.is_dir():
            for entry in sorted(draft.iterdir()):
                remove(target / entry.name)
                os.replace(entry, target / entry.name)
        else:
            os.rename(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_error(error: Exception) -> str:
    """Return why something could not be written, in a few words."""
    return error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
