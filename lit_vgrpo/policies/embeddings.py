"""Prompt embeddings on disk, a file per prompt, so that each is computed once."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
import warnings
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lit_vgrpo.errors import one_line

PREFIX, SUFFIX = "embeddings-", ".safetensors"
DRAFT_PREFIX = "writing-"
CHECKSUM = "crc32"
"""The entry of a file's metadata that holds :func:`checksum`."""
FORMAT = 3
"""Is part of what names files: those of an earlier format, of many rows each, are not read and go with time."""
ABANDONED_AFTER_S = 3600.0

Row = Mapping[str, Tensor]


class EmbeddingCache:
    """A folder of safetensors files, one per text, that several processes may share.

    Files are put in place whole and named by what they hold, so that a look-up opens one file and needs no index. A
    file that is missing, damaged, or not what was written counts as absent. A folder that cannot be written or read
    costs one warning and no more.

    Args:
        folder: made when it is first written to.
        max_bytes: most that the folder may hold, of all encoders; the files unused for longest go first. Processes
            that write at once may exceed it by 1 % each.
        encoder: what the rows were computed by; rows of another one are never returned.
    """

    def __init__(self, folder: str | Path, max_bytes: int, encoder: str) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.encoder = encoder
        self._room = 0  # bytes that may be written before the folder is looked at again
        self._writes = True
        self._warned: set[str] = set()

    def read(self, texts: Sequence[str]) -> list[Row | None]:
        """Return each text's row, on the CPU and in the type that it is kept in; ``None`` where there is none."""
        return [self._row(text) for text in texts]

    def _row(self, text: str) -> Row | None:
        path = self._path(text)
        try:
            with safe_open(path, "pt") as file:
                row = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                if (file.metadata() or {}).get(CHECKSUM) != checksum(path.name, row):
                    raise SafetensorError("its values are not what was written")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", f"Cannot read {path}: {error.strerror or error}. Its prompt is encoded again.")
            return None
        except SafetensorError as error:
            self._warn("damage", f"{path} is damaged ({error}) and was removed. Its prompt is encoded again.")
            _remove(path)
            return None
        with suppress(OSError):  # another user's, or gone by now
            os.utime(path)
        return row

    def write(self, texts: Sequence[str], rows: Sequence[Row]) -> None:
        """Keep rows; half the size where a half-precision type holds every value of a tensor exactly.

        Args:
            texts: all different.
            rows: one per text: tensors by name, on any device.
        """
        if not self._writes:
            return
        files = {}
        for text, row in zip(texts, rows, strict=True):
            path, kept = self._path(text), {name: narrowed(value.detach().cpu()) for name, value in row.items()}
            files[path] = save(kept, {CHECKSUM: checksum(path.name, kept)})
        size = sum(map(len, files.values()))
        if size > self.max_bytes:
            self._warn(
                "large",
                f"The embeddings of {len(texts)} prompts take {size / 1e9:.2f} GB, more than {self.folder} may hold. "
                f"They are not kept. Set model.policy.embedding_cache_gb above {self.max_bytes / 1e9:g}.",
            )
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            for path, content in files.items():
                _write(path, content)
        except OSError as error:
            self._writes = False
            self._warn("write", f"Cannot keep embeddings in {self.folder}: {error}. The run goes on without.")

    def _make_room(self, size: int) -> None:
        """Remove the files unused for longest until ``size`` bytes fit, and drafts of processes that are no more."""
        if size > self._room:
            spare, total, files = self.max_bytes // 100, size, []
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if entry.name.endswith(SUFFIX) and entry.name.startswith((PREFIX, DRAFT_PREFIX + PREFIX)):
                        with suppress(FileNotFoundError):
                            status = entry.stat()
                            files.append((status.st_mtime, entry.name, status.st_size))
            total += sum(length for _, name, length in files)
            for used, name, length in sorted(files):
                is_draft = name.startswith(DRAFT_PREFIX)
                if (time.time() - used > ABANDONED_AFTER_S) if is_draft else (total + spare > self.max_bytes):
                    _remove(self.folder / name)
                    total -= length
            self._room = size + min(spare, self.max_bytes - total)
        self._room -= size

    def _path(self, text: str) -> Path:
        key = f"{FORMAT}\n{self.encoder}\n{text}".encode("utf-8", "surrogatepass")
        return self.folder / f"{PREFIX}{hashlib.sha256(key).hexdigest()}{SUFFIX}"

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"Embedding cache: {one_line(text)}", stacklevel=2)


def checksum(key: str, row: Row) -> str:
    """Return the CRC-32 of a row: whose it is, and each tensor's name, type, shape and bytes.

    >>> checksum("a", {"x": torch.tensor([1.0])}) == checksum("a", {"x": torch.tensor([1.5])})
    False
    """
    total = zlib.crc32(key.encode())
    for name, value in sorted(row.items()):
        total = zlib.crc32(f"{name} {value.dtype} {list(value.shape)}".encode(), total)
        total = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data, total)
    return str(total)


def narrowed(value: Tensor) -> Tensor:
    """Return a float32 tensor in bfloat16 or float16 where one of them holds every value exactly, else as it is.

    >>> narrowed(torch.tensor([1.0, 0.5])).dtype, narrowed(torch.tensor([0.1])).dtype
    (torch.bfloat16, torch.float32)
    """
    for dtype in (torch.bfloat16, torch.float16):
        small = value.to(dtype)
        # as integers: 0 equals -0, and NaN nothing
        if value.dtype == torch.float32 and torch.equal(small.float().view(torch.int32), value.view(torch.int32)):
            return small.contiguous()
    return value.contiguous()


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Its checksum, and no wait for the disk, finds what a power cut has torn."""
    draft = path.with_name(f"{DRAFT_PREFIX}{path.stem}-{uuid.uuid4().hex}{SUFFIX}")
    try:
        draft.write_bytes(content)
        os.replace(draft, path)
    except BaseException:
        _remove(draft)
        raise


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
