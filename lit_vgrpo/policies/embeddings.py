"""A cache of prompt embeddings on disk, one file per prompt, and a fingerprint of what they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import warnings
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from lit_vgrpo.errors import one_line
from lit_vgrpo.system.hub import without_origin

PREFIX, SUFFIX = "embeddings-", ".row"
CRC_BYTES = 4
SAMPLED_VALUES = 4096
"""Values sampled per parameter: all of a small one, evenly spaced ones of a large one."""

Row = Mapping[str, Tensor]


class Embedder(Protocol):
    """What the encoding of prompts reads of a :class:`~lit_vgrpo.policies.base.Policy`."""

    edits: ClassVar[bool]
    checkpoint: str
    pipeline: Any
    negative_prompt: str
    embedding_cache: str | None
    embedding_cache_gb: float
    offload_encoders: bool
    offload_network: bool
    network: Any

    @property
    def embedding_key(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def image_size(self) -> tuple[int, int] | None: ...
    def encoders(self) -> list[nn.Module]: ...
    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]: ...
    def encode_negative(self) -> dict[str, Tensor]: ...
    def encode_edits(self, prompts: list[str], pictures: Tensor) -> dict[str, Tensor]: ...
    def prompt_length(self) -> int | None: ...
    def prompt_limit(self) -> tuple[Any, int, str]: ...
    def family_options(self) -> dict[str, Any]: ...


class EmbeddingCache:
    """A folder of files, one per text, that several processes may share.

    A file is a CRC-32 and the safetensors bytes of a row. Files are written atomically and named by their content's
    key, so a look-up opens one file and needs no index. A missing, damaged or unreadable file counts as absent.

    Args:
        folder: Created on first write; if it is not writable, a warning is given and nothing is cached.
        max_bytes: Maximum size of the folder over all encoders; the least recently used files are deleted first.
            Concurrent writers may exceed it by 1 % each.
        encoder: Fingerprint of the encoders; rows of other encoders are never returned.
    """

    def __init__(self, folder: str | Path, max_bytes: int, encoder: str) -> None:
        self.folder, self.max_bytes, self.encoder = Path(folder), max_bytes, encoder
        self._room = 0  # bytes that may be written before the folder is scanned again
        self._writes = True

    def read(self, texts: Sequence[str]) -> list[Row | None]:
        """Return each text's row, on the CPU and in its stored type; ``None`` if there is none."""
        return [self._row(self._path(text)) for text in texts]

    def _row(self, path: Path) -> Row | None:
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if content[:CRC_BYTES] != _crc(path, content[CRC_BYTES:]):
            with suppress(OSError):  # it cannot be removed from a read-only disk
                path.unlink()
            return None
        with suppress(OSError):  # another user's, or already deleted
            os.utime(path)
        return load(content[CRC_BYTES:])

    def write(self, texts: Sequence[str], rows: Sequence[Row]) -> None:
        """Store rows in their types.

        Args:
            texts: Distinct texts.
            rows: One per text: tensors by name, on any device.
        """
        files = {}
        for text, row in zip(texts, rows, strict=True):
            content = save({name: value.cpu().contiguous() for name, value in row.items()})
            files[self._path(text)] = _crc(self._path(text), content) + content
        size = sum(map(len, files.values()))
        if size > self.max_bytes:
            warnings.warn("Embeddings exceed model.policy.embedding_cache_gb and are not cached.", stacklevel=2)
        elif self._writes:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._make_room(size)
                for path, content in files.items():  # without fsync: the checksum detects a file torn by a power cut
                    draft = path.with_name(f"{path.stem}-{uuid.uuid4().hex}{SUFFIX}")
                    try:
                        draft.write_bytes(content)
                        os.replace(draft, path)
                    finally:
                        draft.unlink(missing_ok=True)  # a part, on a full disk
            except OSError as error:
                self._writes = False
                warnings.warn(f"Cannot cache embeddings in {self.folder}: {one_line(error)}.", stacklevel=2)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files, interrupted drafts included, until ``size`` bytes fit."""
        if size > self._room:
            spare, files = self.max_bytes // 100, []
            for path in self.folder.glob(f"{PREFIX}{64 * '[0-9a-f]'}*{SUFFIX}"):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    files.append((status.st_mtime, path, status.st_size))
            total = size + sum(length for _, _, length in files)
            for _, path, length in sorted(files):
                if total + spare > self.max_bytes:
                    path.unlink(missing_ok=True)
                    total -= length
            self._room = size + min(spare, self.max_bytes - total)
        self._room -= size

    def _path(self, text: str) -> Path:
        key = f"{self.encoder}\n{text}".encode("utf-8", "surrogatepass")
        return self.folder / f"{PREFIX}{hashlib.sha256(key).hexdigest()}{SUFFIX}"


def _crc(path: Path, content: bytes) -> bytes:
    """Return a checksum of a file's content and its name, so that a renamed file is not taken for another."""
    return zlib.crc32(content, zlib.crc32(path.name.encode())).to_bytes(CRC_BYTES, "little")


# --- what embeddings depend on ----------------------------------------------------------------------------------------


@torch.no_grad()
def encoder_fingerprint(policy: Embedder) -> str:
    """Return a fingerprint of the encoders, independent of their files' location: 64 hex digits.

    Covers the text encoders (class, config, types, weights and buffers, large ones sampled), the VAE too in a family
    that edits, the tokenizers, processors and their chat templates, the pipeline's settings, and the family's options.
    """
    digest = hashlib.sha256()

    def add(*what: object) -> None:
        digest.update(json.dumps(what, sort_keys=True, default=str).encode())

    pipeline = policy.pipeline
    add(type(policy).__name__, policy.family_options())
    settings = without_origin(dict(pipeline.config))
    add(type(pipeline).__name__, {k: v for k, v in settings.items() if k not in pipeline.components})
    encoders = [*policy.encoders(), *([pipeline.vae] if policy.edits else [])]
    for name, component in sorted(pipeline.components.items()):
        if any(component is encoder for encoder in encoders):
            config = component.config  # diffusers' is a mapping, transformers' is not
            config = dict(config) if isinstance(config, Mapping) else config.to_dict()
            add(name, type(component).__name__, without_origin(config))
            if getattr(component, "use_tiling", False):  # a VAE then encodes in tiles too
                add("tiling")
            tensors = dict(chain(component.named_parameters(), component.named_buffers()))
            for key, tensor in tensors.items():
                add(key, tensor.shape, tensor.dtype)
            flat = [tensor.flatten() for tensor in tensors.values()]
            sampled = [values[:: max(1, values.numel() // SAMPLED_VALUES)].contiguous() for values in flat]
            digest.update(torch.cat([values.view(torch.uint8) for values in sampled]).cpu().numpy().tobytes())
        parts: list[Any] = [component, getattr(component, "tokenizer", None)]  # a processor has one
        for part in parts:
            is_tokenizer = hasattr(part, "model_max_length")
            if is_tokenizer or hasattr(part, "image_processor"):
                options = _vocabulary(part) if is_tokenizer else without_origin(part.to_dict())
                add(name, type(part).__name__, getattr(part, "chat_template", None), options)
    return digest.hexdigest()


def _vocabulary(tokenizer: Any) -> list[object]:
    """Return everything that determines a tokenizer's ids, except its last truncation and padding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    words |= {"truncation": None, "padding": None}
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    return [words, special, tokenizer.model_max_length, tokenizer.padding_side]
