"""A cache of prompt embeddings on disk, one file per prompt."""

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
"""The key of :func:`checksum` in a file's metadata."""
FORMAT = 3
"""Part of file names: files of an earlier format, with many rows each, are not read and are deleted in time."""
ABANDONED_AFTER_S = 3600.0

Row = Mapping[str, Tensor]


class EmbeddingCache:
    """A folder of safetensors files, one per text, that several processes may share.

    Files are written atomically and named by their content's key, so a look-up opens one file and needs no index. A
    missing, damaged or altered file counts as absent. A folder that cannot be written or read causes only one warning.

    Args:
        folder: created on first write.
        max_bytes: maximum size of the folder over all encoders; the least recently used files are deleted first.
            Concurrent writers may exceed it by 1 % each.
        encoder: fingerprint of the encoders; rows of other encoders are never returned.
    """

    def __init__(self, folder: str | Path, max_bytes: int, encoder: str) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.encoder = encoder
        self._room = 0  # bytes that may be written before the folder is scanned again
        self._writes = True
        self._warned: set[str] = set()

    def read(self, texts: Sequence[str]) -> list[Row | None]:
        """Return each text's row, on the CPU and in its stored type; ``None`` if there is none."""
        return [self._row(text) for text in texts]

    def _row(self, text: str) -> Row | None:
        path = self._path(text)
        try:
            with safe_open(path, "pt") as file:
                row = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                if (file.metadata() or {}).get(CHECKSUM) != checksum(path.name, row):
                    raise SafetensorError("its values do not match their checksum")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn("read", f"Cannot read {path}: {error.strerror or error}. Its prompt is encoded again.")
            return None
        except SafetensorError as error:
            self._warn("damage", f"{path} is damaged ({error}) and was removed. Its prompt is encoded again.")
            _remove(path)
            return None
        with suppress(OSError):  # another user's, or already deleted
            os.utime(path)
        return row

    def write(self, texts: Sequence[str], rows: Sequence[Row]) -> None:
        """Store rows; at half the size if a half-precision type represents every value of a tensor exactly.

        Args:
            texts: distinct texts.
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
                f"Embeddings of {len(texts)} prompts take {size / 1e9:.2f} GB, more than the limit of {self.folder}. "
                f"They are not cached. Set model.policy.embedding_cache_gb above {self.max_bytes / 1e9:g}.",
            )
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(size)
            for path, content in files.items():
                _write(path, content)
        except OSError as error:
            self._writes = False
            self._warn("write", f"Cannot cache embeddings in {self.folder}: {error}. The run continues without.")

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until ``size`` bytes fit, and temporary files of ended processes."""
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
    """Return the CRC-32 of a row: its key, and each tensor's name, type, shape and bytes.

    >>> checksum("a", {"x": torch.tensor([1.0])}) == checksum("a", {"x": torch.tensor([1.5])})
    False
    """
    total = zlib.crc32(key.encode())
    for name, value in sorted(row.items()):
        total = zlib.crc32(f"{name} {value.dtype} {list(value.shape)}".encode(), total)
        total = zlib.crc32(value.reshape(-1).view(torch.uint8).numpy().data, total)
    return str(total)


def narrowed(value: Tensor) -> Tensor:
    """Convert a float32 tensor to bfloat16 or float16 if that represents every value exactly.

    >>> narrowed(torch.tensor([1.0, 0.5])).dtype, narrowed(torch.tensor([0.1])).dtype
    (torch.bfloat16, torch.float32)
    """
    for dtype in (torch.bfloat16, torch.float16):
        small = value.to(dtype)
        # compared as integers, because 0 equals -0 and NaN does not equal itself
        if value.dtype == torch.float32 and torch.equal(small.float().view(torch.int32), value.view(torch.int32)):
            return small.contiguous()
    return value.contiguous()


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically, without fsync: the checksum detects a file torn by a power cut."""
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
