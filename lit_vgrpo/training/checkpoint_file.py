"""Checkpoint files: written whole or not at all, and verified when read."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor
from typing_extensions import override

from lit_vgrpo.system.atomic_folder import DRAFT_PREFIX, sync_folder
from lit_vgrpo.training.trainer_internals import is_on_this_machine

RECIPE_KEY, INPUTS_KEY = "lit_vgrpo_recipe", "lit_vgrpo_inputs"
"""Entries of a checkpoint: the recipe of its run, and the fingerprints of what that read."""
NEEDED_KEYS = ("state_dict", "loops", "global_step", "optimizer_states", "lit_vgrpo")


class CheckpointDamage(Exception):
    """A file that is not a checkpoint of a run, or is damaged; the message says why."""


class FileCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint I/O, with atomic writes and verified reads.

    A checkpoint is written to a draft beside its file and renamed, without a copy in memory or in a temporary folder.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if not is_on_this_machine(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        draft = path if path.name.startswith(DRAFT_PREFIX) else path.with_name(DRAFT_PREFIX + path.name)
        write(checkpoint, draft)
        if draft != path:
            put_in_place(draft, path)

    @override
    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        content: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        verify_for_trainer(path, content.get("state_dict", {}))
        return content


def write(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint and flush it to disk.

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
        # torch's writer raises RuntimeError for a full disk; the first cause is worth reporting.
        raise _disk_error(error) from error


def _disk_error(error: BaseException) -> OSError:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return OSError(None, str(error).splitlines()[0])


def put_in_place(draft: Path, path: Path, previous: Path | None = None) -> None:
    """Rename a draft to its final name, after renaming the file that had it to ``previous``.

    Raises:
        OSError: a rename failed; no file is lost.
    """
    if previous is not None and zipfile.is_zipfile(path):  # a torn file must not replace a good one
        os.replace(path, previous)
    os.replace(draft, path)
    sync_folder(path.parent)


def read(path: Path) -> dict[str, Any]:
    """Return a checkpoint's content, with memory-mapped tensors.

    Raises:
        CheckpointDamage: it is torn, unreadable or incomplete.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (PermissionError, IsADirectoryError) as error:
        is_folder = isinstance(error, IsADirectoryError)
        raise CheckpointDamage(
            "is a folder, not a file" if is_folder else f"cannot be read: {error.strerror}"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointDamage("is torn, or no checkpoint") from error
    missing = [key for key in NEEDED_KEYS if key not in content] if isinstance(content, dict) else list(NEEDED_KEYS)
    if missing:
        raise CheckpointDamage(f"has no {missing[0]}: no checkpoint of a run")
    return content


def verify(path: Path) -> None:
    """Verify a file against its own checksums, which torch does not do; skip files that this process has verified.

    Raises:
        CheckpointDamage: names the first tensor that differs.
    """
    try:
        version = _version(path)
        if version in _VERIFIED:
            return
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except PermissionError as error:
        raise CheckpointDamage(f"cannot be read: {error.strerror}") from error
    except (OSError, zipfile.BadZipFile, NotImplementedError, EOFError) as error:  # inconsistent zip records
        raise CheckpointDamage("is torn, or no checkpoint") from error
    if damaged is not None:
        raise CheckpointDamage(f"is damaged: {_tensor_in(path, damaged)} is not what was written")
    _VERIFIED.add(version)


def read_sound(path: Path) -> dict[str, Any]:
    """Read a checkpoint as :func:`read` does, and verify its bytes and that every weight is finite.

    Raises:
        CheckpointDamage: it is torn, unreadable, incomplete or damaged, or holds a weight that is not finite.
    """
    content = read(path)
    verify(path)
    if (version := _version(path)) not in _FINITE:
        for weights in (content["state_dict"], *averages(content)):
            _refuse_non_finite(weights)
        _FINITE.add(version)
    return content


def verify_for_trainer(path: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Verify a checkpoint that a Trainer has just read; skip remote files and folders.

    Args:
        path: path that the Trainer was given.
        weights: the checkpoint's ``state_dict``.

    Raises:
        RuntimeError: the file is damaged, or a weight is not finite.
    """
    if not is_on_this_machine(path) or Path(path).is_dir():
        return
    try:
        verify(Path(path))
        _refuse_non_finite(weights)
    except CheckpointDamage as damage:
        raise RuntimeError(f"{path} {damage}. Give another checkpoint.") from damage


def averages(content: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Return the averaged weights that callbacks keep in a checkpoint."""
    states = content.get("callbacks", {}).values()
    return [state["average"] for state in states if isinstance(state, dict) and "average" in state]


def _refuse_non_finite(weights: Mapping[str, Tensor]) -> None:
    for name, tensor in weights.items():
        # One pass without a copy: 30 times as fast as isfinite().all().
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
            raise CheckpointDamage(f"holds values that are not finite, in {name}")


_VERIFIED: set[tuple[object, ...]] = set()
_FINITE: set[tuple[object, ...]] = set()
"""Versions of files whose bytes, or weights, this process has verified."""


def _version(path: Path) -> tuple[object, ...]:
    """Return an identifier of the file that changes when it is written to or replaced."""
    found = path.stat()
    return str(path.resolve()), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _tensor_in(path: Path, record: str) -> str:
    """Return the name of the tensor in the record ``NAME/data/NUMBER``, or the record's own name."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        number = int(record.rpartition("/data/")[2])
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError):
        return record
    # torch.save (2.15) numbers storages in pickling order and identifies them by _cdata.
    names: dict[int, str] = {}
    for name, tensor in _tensors(content, ""):
        names.setdefault(tensor.untyped_storage()._cdata, name)
    return dict(enumerate(names.values())).get(number, record)


def _tensors(tree: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its dotted name, in pickling order."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _tensors(value, f"{prefix}.{key}" if prefix else str(key))
