"""Paths that users type, hashes of files, and atomic writing of files and folders."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import file_digest
from importlib.resources import files
from pathlib import Path, PosixPath
from secrets import token_hex
from tempfile import NamedTemporaryFile
from typing import IO, Any

from safetensors import SafetensorError

from lit_vgrpo.errors import UserError, one_line, shell_line, suggestion

SHIPPED_PREFIX = "shipped:"
CONFIG_NAME = "config.yaml"
"""A run's recipe, in its folder."""
DRAFT_PREFIX = ".lit_vgrpo-draft-"
"""Prefix of a file or folder that is being written, and name of a file in such a folder."""
_started_in: Path | None = None


class TypedPath(PosixPath):
    """An absolute path that messages show as it was typed: an f-string gives it relative to :func:`start_folder`."""

    def __format__(self, spec: str) -> str:
        start = start_folder()
        return format(str(self.relative_to(start) if self.is_relative_to(start) else self), spec)


def start_folder() -> Path:
    """Return the folder in which the command was started; a user's code may change the current one."""
    return Path.cwd() if _started_in is None else _started_in


@contextmanager
def started_here() -> Iterator[None]:
    """Make the current folder the start folder for the block; raise OSError if it was deleted."""
    global _started_in
    before, _started_in = _started_in, Path.cwd()
    try:
        yield
    finally:
        _started_in = before


def typed_path(text: str | Path) -> Path:
    """Return the path that a user typed; a relative one is in :func:`start_folder`, whatever the current folder is."""
    path = text if isinstance(text, TypedPath) else Path(text).expanduser()
    return path if path.is_absolute() else TypedPath(start_folder() / path)


def shipped_root() -> Path:
    """Return the folder of the recipes, prompts and tiny pipelines installed with the package."""
    return Path(str(files("lit_vgrpo.recipes")))


def shipped(folder: str = ".") -> dict[str, Path]:
    """Return the YAML files in a folder of those installed with the package, by name without suffix."""
    return {file.stem: file for file in sorted((shipped_root() / folder).glob("*.yaml"))}


def resolve_path(text: str | Path) -> Path:
    """Resolve a recipe's path: ``shipped:prompts/x.txt`` points into the installed recipes.

    Raises:
        ValueError: A ``shipped:`` path leaves them, or does not exist.
    """
    text = str(text)
    if not text.startswith(SHIPPED_PREFIX):
        return typed_path(text)
    root = shipped_root()
    path = (root / text[len(SHIPPED_PREFIX) :]).resolve()
    if root.resolve() not in (path, *path.parents):
        raise ValueError(f"{text} leaves the shipped recipes folder {root}. Give a path without '..'.")
    if not path.exists():
        known = sorted(file.name for file in path.parent.glob("[!_.]*"))
        raise ValueError(f"{text} is not shipped. {suggestion(path.name, known)}")
    return path


def import_from_here(*folders: Path) -> None:
    """Make modules in the start folder and in other folders importable; a console script lacks that of the command.

    Args:
        folders: Folders to search first, in this order.
    """
    for folder in map(str, (start_folder(), *reversed(folders))):
        if folder not in sys.path:
            sys.path.insert(0, folder)


def missing_module(error: BaseException, name: str) -> str | None:
    """Return where the module of ``module:function`` or ``module.Class`` was searched, if that is the error."""
    module = re.split("[:.]", name)[0]
    if not isinstance(error, ModuleNotFoundError) or error.name != module:
        return None
    known = sorted(file.stem for file in start_folder().glob("*.py"))
    advice = suggestion(module, known) if known else f"Start the command in the folder with {module}.py."
    return f"No module named '{module}' in {start_folder()}, next to the recipe or among the packages. {advice}"


def without_ending(named: str) -> str:
    """Return ``module:function`` of a function that may be named by its file.

    >>> without_ending("mine/rewards.py:redness")
    'mine.rewards:redness'
    """
    return named.replace(".py:", ":").replace("/", ".")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def file_content(path: Path) -> str | int:
    """Return what tells a file's content from another: its SHA-256, or its size if that is 256 MiB or more."""
    size = path.stat().st_size
    return file_sha256(path) if size < 2**28 else size


def read_regular(path: Path) -> bytes:
    """Read a file; raise OSError for anything else, such as a FIFO, which would block."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def write_atomically(path: Path, text: str) -> None:
    """Write a small file in UTF-8 atomically; raise UserError if it cannot be written."""
    try:
        with new_file(path, "x", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from error


def check_writable(path: Path) -> None:
    """Raise UserError if a file cannot be written, before the work whose result it takes; its folder may not exist."""
    try:
        place = next(parent for parent in typed_path(path).parents if parent.exists())
        with NamedTemporaryFile(prefix=DRAFT_PREFIX, dir=place) as probe:
            probe.write(bytes(2**16))  # a full disk takes an empty file
            probe.flush()
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}. Choose another folder with --out.") from error


def draft_of(path: Path) -> Path:
    """Return a new name next to a path under which to write it, different for each writer."""
    return path.with_name(f"{DRAFT_PREFIX}{token_hex(8)}{path.suffix}")  # writers of videos read the suffix


def hold(handle: int) -> bool:
    """Lock an open draft against :func:`remove_drafts` until it is closed; return ``False`` if that fails."""
    with suppress(OSError):  # another process has it, or the file system has no locks
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def remove_drafts(folder: Path) -> None:
    """Remove the drafts of killed processes from a folder, but not from its subfolders."""
    for path in folder.glob(DRAFT_PREFIX + 16 * "[0-9a-f]" + "*"):
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            is_left = hold(handle)
            os.close(handle)
            if is_left and (path / DRAFT_PREFIX).is_file():
                shutil.rmtree(path)
            elif is_left:
                path.unlink()  # fails for any other folder


@contextmanager
def new_file(path: Path, mode: str = "xb", **options: Any) -> Iterator[IO[Any]]:
    """Yield a new file that replaces ``path`` at the end of the block; takes open()'s arguments, follows no links."""
    path = typed_path(path)
    draft = draft_of(path)
    try:
        with draft.open(mode, **options) as file:
            hold(file.fileno())
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


def vacant_folder(text: str) -> Path:
    """Return the path of a folder that is empty or does not exist; UserError for any other."""
    folder = typed_path(text)
    if any(folder.iterdir()) if folder.is_dir() else folder.exists():
        what = "is not empty" if folder.is_dir() else "is a file"
        raise UserError(f"{shell_line(text)} {what} and will not be overwritten. Choose a new folder.")
    return folder


@contextmanager
def write_new_folder(folder: Path, advice: str, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to the destination, and rename it at the end of the block.

    If the block raises, the temporary folder is removed.

    Args:
        advice: The end of the message if the folder cannot be written.
        replace: If the destination exists, replace its files of the same name and keep the others.

    Raises:
        UserError: The disk is full or not writable.
    """
    target = typed_path(folder).resolve()
    draft = draft_of(target)
    handle = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_drafts(target.parent)
        draft.mkdir()
        handle = os.open(draft, os.O_RDONLY)
        hold(handle)
        (draft / DRAFT_PREFIX).touch()
        yield draft
        (draft / DRAFT_PREFIX).unlink()
        for path in draft.rglob("*"):
            if path.is_file():
                path.chmod(draft.stat().st_mode & 0o666)  # safetensors makes private files
        if not (replace and target.is_dir()):
            os.rename(draft, target)
            return
        for path in sorted(draft.rglob("*")):
            there = target / path.relative_to(draft)
            if path.is_file():
                os.replace(path, there)  # fails for a folder
            elif not there.is_dir() or there.is_symlink():
                there.unlink(missing_ok=True)
                there.mkdir()
    except (OSError, SafetensorError) as error:  # of a full or read-only disk
        raise UserError(f"Cannot write {folder}: {write_error(error)}. {advice}") from error
    finally:
        if handle is not None:
            os.close(handle)
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
