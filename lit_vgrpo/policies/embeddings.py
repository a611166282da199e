"""Prompt embeddings on disk: each prompt is encoded once, and the rows of an iteration are read in one call a file."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lit_vgrpo.errors import one_line

PREFIX, SUFFIX = "embeddings-", ".safetensors"
DRAFT_PREFIX = "writing-"
LOCK = "embeddings-merging.lock"
KEYS = "_keys"
"""The table of a file's prompts: a SHA-256 a row, ``(N, 32)`` uint8. The other tensors are ``(N, ...)``."""
CHECKSUMS = "_checksums"
"""A CRC-32 a row, ``(N,)`` int64, see :func:`checksums`."""
FORMAT = 2
"""Is part of what names files: those of an earlier format, without checksums, are not read and go with time."""
LARGEST_HEADER = 2**10
FILES_BEFORE_MERGE = 16
LARGEST_MERGED = 2**29
ABANDONED_AFTER_S = 3600.0
ATTEMPTS = 3

Rows = dict[str, Tensor]


class EmbeddingCache:
    """Keeps rows of tensors by text in a folder that several processes may share.

    What one :meth:`write` gets becomes one safetensors file of stacked tensors, and many small files become a larger
    one. A folder that cannot be written or read costs one warning and no more. Files are put in place whole, are opened
    only while they are read, and may go at any time: a row whose file is gone or damaged, or that is not what was
    written, is one that is not there.

    Args:
        folder: made when it is first written to.
        max_bytes: most that the folder may hold, of all encoders; files unused for longest go first.
        encoder: what the rows were computed by; rows of another one are never returned.
    """

    def __init__(self, folder: str | Path, max_bytes: int, encoder: str) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.encoder = encoder
        self._prefix = PREFIX + hashlib.sha256(f"{FORMAT}\n{encoder}".encode()).hexdigest()[:16] + "-"
        self._rows: dict[bytes, tuple[str, int]] = {}
        self._known: set[str] = set()
        self._damaged: set[tuple[str, int]] = set()
        self._writes = True
        self._warned: set[str] = set()

    # --- reading ---------------------------------------------------------------------------------------------------

    def read(self, texts: Sequence[str]) -> tuple[list[int], Rows]:
        """Look texts up.

        Returns:
            The positions of those that were found, file by file and so in no order that means anything, and their rows
            in that order, on the CPU and in the type that they are kept in. Empty where none was found.
        """
        keys = [self._key(text) for text in texts]
        attempts = 0
        while attempts < ATTEMPTS:
            if not all(key in self._rows for key in keys):
                self._look_around()
            found = [position for position, key in enumerate(keys) if key in self._rows]
            if not found:
                break
            try:
                order, rows = self._gather([self._rows[keys[position]] for position in found])
                return [found[place] for place in order], rows
            except _Gone as gone:
                self._forget(gone.name)
                attempts += 1
            except _Damaged:  # another file may hold these rows too
                self._known, self._rows = set(), {}
        return [], {}

    def _gather(self, places: Sequence[tuple[str, int]]) -> tuple[list[int], Rows]:
        """The rows at ``(file, row)``, file by file: one indexing call a file and tensor, and one copy of each row.

        Returns:
            Which of the places each row is of, and the rows.

        Raises:
            _Gone: a file is not there any more.
            _Damaged: rows are not what was written; they are not looked up again.
        """
        by_file: dict[str, list[int]] = {}
        for place, (name, _) in enumerate(places):
            by_file.setdefault(name, []).append(place)
        gathered: Rows = {}
        start = 0
        for name, of_file in by_file.items():
            rows, stop = torch.tensor([places[place][1] for place in of_file]), start + len(of_file)
            with self._opened(name) as file:
                table, written = file.get_tensor(KEYS), file.get_tensor(CHECKSUMS)
                sums = [zlib.crc32(key) for key in table[rows].numpy()]
                for key in _tensor_names(file):
                    kept = file.get_tensor(key)
                    whole = gathered.get(key)
                    if whole is None:
                        whole = kept.new_empty(len(places), *kept.shape[1:])
                    if not len(kept) == len(table) == len(written) or kept.shape[1:] != whole.shape[1:]:
                        raise SafetensorError("its tensors do not fit each other")
                    if whole.dtype == kept.dtype:
                        chosen = torch.index_select(kept, 0, rows, out=whole[start:stop])
                    else:  # a file of another type, which the wider one holds too
                        whole = whole.to(torch.promote_types(whole.dtype, kept.dtype))
                        chosen = kept.index_select(0, rows)
                        whole[start:stop] = chosen
                    sums = checksums(key, chosen, sums)
                    gathered[key] = whole
                kept_sums = written[rows].tolist()
            self._mark_used(name)
            wrong = [row for row, one, other in zip(rows.tolist(), sums, kept_sums, strict=True) if one != other]
            if wrong:
                self._damaged |= {(name, row) for row in wrong}
                self._warn(
                    "damage",
                    f"{len(wrong)} of {len(table)} rows of {self.folder / name} are damaged. "
                    "Their prompts are encoded again.",
                )
                raise _Damaged
            start = stop
        return [place for of_file in by_file.values() for place in of_file], gathered

    @contextmanager
    def _opened(self, name: str) -> Iterator[safe_open]:
        """A file, mapped.

        Raises:
            _Gone: it is not there any more, or was damaged and has been removed.
        """
        path = self.folder / name
        try:
            with safe_open(path, "pt") as file:
                yield file
        except FileNotFoundError as error:
            raise _Gone(name) from error
        except OSError as error:
            self._warn("read", f"Cannot read {path}: {error.strerror or error}. Its prompts are encoded again.")
            raise _Gone(name) from error
        except SafetensorError as error:
            self._warn("damage", f"{path} is damaged ({error}) and was removed. Its prompts are encoded again.")
            self._remove(path)
            raise _Gone(name) from error

    def _look_around(self) -> None:
        """Learn of the files that others have written or removed."""
        names = {file.name for file in self._files(self._prefix)}
        for name in self._known - names:
            self._forget(name)
        for name in sorted(names - self._known):
            try:
                table = self._table(name)
            except _Gone:
                continue
            self._known.add(name)
            for row, key in enumerate(table):
                if (name, row) not in self._damaged:
                    self._rows.setdefault(key, (name, row))

    def _table(self, name: str) -> list[bytes]:
        """A file's keys, one a row."""
        with self._opened(name) as file:
            return [row.tobytes() for row in file.get_tensor(KEYS).numpy()]

    def _forget(self, name: str) -> None:
        self._known.discard(name)
        self._rows = {key: place for key, place in self._rows.items() if place[0] != name}

    def _mark_used(self, name: str) -> None:
        with suppress(OSError):  # another user's, or gone by now
            os.utime(self.folder / name)

    def _key(self, text: str) -> bytes:
        return hashlib.sha256(f"{self.encoder}\n{text}".encode("utf-8", "surrogatepass")).digest()

    # --- writing ---------------------------------------------------------------------------------------------------

    def write(self, texts: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Keep rows; half the size where a half-precision type holds every value of a tensor exactly.

        Args:
            texts: one a row, all different.
            tensors: ``(N, ...)`` by name, float32, on any device.
        """
        if not self._writes:
            return
        kept = {name: narrowed(value.detach().cpu()) for name, value in tensors.items()}
        size = sum(value.nbytes for value in kept.values()) + (32 + 8) * len(texts) + LARGEST_HEADER
        if size > self.max_bytes:
            self._warn(
                "large",
                f"The embeddings of {len(texts)} prompts take {size / 1e9:.2f} GB, more than {self.folder} may hold. "
                f"They are not kept. Set model.policy.embedding_cache_gb above {self.max_bytes / 1e9:g}.",
            )
            return
        keys = [self._key(text) for text in texts]
        try:
            self._make_room(size)
            self._store(keys, kept)
            self._merge()
        except (OSError, SafetensorError) as error:
            self._writes = False
            self._warn("write", f"Cannot keep embeddings in {self.folder}: {error}. The run goes on without.")

    def _store(self, keys: Sequence[bytes], tensors: Rows) -> None:
        """Write one file, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._prefix}{uuid.uuid4().hex}{SUFFIX}"
        draft = self.folder / (DRAFT_PREFIX + name)
        table = torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(len(keys), -1)
        sums = [zlib.crc32(key) for key in keys]
        for key in sorted(tensors):
            sums = checksums(key, tensors[key], sums)
        try:
            # not by save_file, whose own draft has another name and, put in place, can be read by its owner alone
            with draft.open("xb") as file:
                file.write(save({**tensors, KEYS: table, CHECKSUMS: torch.tensor(sums)}))
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self.folder / name)
        except BaseException:
            self._remove(draft)
            raise
        self._known.add(name)
        self._rows |= {key: (name, row) for row, key in enumerate(keys)}

    def _merge(self) -> None:
        """Put small files together once there are many: an iteration's prompts are then read in fewer calls."""
        limit = min(LARGEST_MERGED, self.max_bytes // 8)
        small = [file for file in self._files(self._prefix) if file.size < limit / 2]
        if len(small) < FILES_BEFORE_MERGE:
            return
        with self._alone() as alone:
            if alone:
                total = 0
                chosen = [file.name for file in small if (total := total + file.size) <= limit]
                with suppress(_Gone, _Damaged):  # another time
                    self._put_together(chosen)

    def _put_together(self, names: Sequence[str]) -> None:
        places: dict[bytes, tuple[str, int]] = {}
        for name in names:
            for row, key in enumerate(self._table(name)):
                if (name, row) not in self._damaged:
                    places.setdefault(key, (name, row))
        if places:
            order, rows = self._gather(list(places.values()))
            keys = list(places)
            self._store([keys[place] for place in order], rows)
        for name in names:
            self._remove(self.folder / name)
            self._known.discard(name)

    def _make_room(self, size: int) -> None:
        """Remove what was unused for longest until ``size`` bytes fit, and drafts of processes that are no more."""
        now = time.time()
        for draft in self.folder.glob(f"{DRAFT_PREFIX}{PREFIX}*"):
            if _age(draft, now) > ABANDONED_AFTER_S:
                self._remove(draft)
        files = self._files(PREFIX)
        total = size + sum(file.size for file in files)
        for file in files:
            if total <= self.max_bytes:
                return
            self._remove(self.folder / file.name)
            self._forget(file.name)
            total -= file.size

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether no other process merges meanwhile."""
        lock = self.folder / LOCK
        if _age(lock, time.time()) > ABANDONED_AFTER_S:
            self._remove(lock)
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            yield False
            return
        try:
            yield True
        finally:
            self._remove(lock)

    # --- both ------------------------------------------------------------------------------------------------------

    def _files(self, prefix: str) -> list[_File]:
        """What there is, unused for longest first."""
        files = []
        with suppress(OSError), os.scandir(self.folder) as entries:  # no such folder yet, or it cannot be read
            for entry in entries:
                if entry.name.startswith(prefix) and entry.name.endswith(SUFFIX):
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        files.append(_File(status.st_mtime, entry.name, status.st_size))
        return sorted(files)

    def _remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"Embedding cache: {one_line(text)}", stacklevel=2)


class _File(NamedTuple):
    used: float
    name: str
    size: int


class _Gone(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Damaged(Exception):
    """Rows of a file are not what was written."""


def checksums(name: str, rows: Tensor, start: Sequence[int]) -> list[int]:
    """Continue the CRC-32 of each row: a tensor's name, type and shape, and the row's bytes.

    Args:
        rows: ``(N, ...)``, contiguous, on the CPU.
        start: the N checksums so far.

    >>> checksums("a", torch.tensor([1.0, 2.0]), [0, 0]) == checksums("a", torch.tensor([1.0, 2.5]), [0, 0])
    False
    """
    about = f"{name} {rows.dtype} {list(rows.shape[1:])}".encode()
    raw = rows.unsqueeze(1).flatten(1).view(torch.uint8).numpy()
    return [zlib.crc32(row, zlib.crc32(about, so_far)) for row, so_far in zip(raw, start, strict=True)]


def narrowed(value: Tensor) -> Tensor:
    """A float32 tensor in bfloat16 or float16 where one of them holds every value exactly, else as it is.

    >>> narrowed(torch.tensor([1.0, 0.5])).dtype, narrowed(torch.tensor([0.1])).dtype
    (torch.bfloat16, torch.float32)
    """
    for dtype in (torch.bfloat16, torch.float16):
        small = value.to(dtype)
        # as integers: 0 equals -0, and NaN nothing
        if value.dtype == torch.float32 and torch.equal(small.float().view(torch.int32), value.view(torch.int32)):
            return small.contiguous()
    return value.contiguous()


def _tensor_names(file: safe_open) -> list[str]:
    return sorted(name for name in file.keys() if name not in (KEYS, CHECKSUMS))  # noqa: SIM118


def _age(path: Path, now: float) -> float:
    try:
        return now - path.stat().st_mtime
    except OSError:
        return 0.0
