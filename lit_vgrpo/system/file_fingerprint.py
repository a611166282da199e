"""Fingerprints of files by content, with sampling of files too large to read completely."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

READ_WHOLE = 64 * 2**20
"""Maximum size of a file that is read completely."""
SAMPLE, SAMPLES = 4096, 1024
"""Bytes per sample of a larger file, and the number of evenly spaced samples."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
WORDS = (".txt", ".model")
"""Vocabulary files other than JSON."""
NOT_OF_THE_MODEL = (
    "_name_or_path",
    "_commit_hash",
    "transformers_version",
    "_diffusers_version",
    "dtype",
    "torch_dtype",
)
"""Entries of a config about a model's origin; the dtype is known from its parameters."""


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def file_fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file of up to 64 MiB, or of the size and samples of a larger one.

    For safetensors the samples include the header and the beginning of every tensor. For a zip file, such as torch
    writes, the checksums of all its parts are used instead, which are together at its end.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    if size <= READ_WHOLE:
        return file_sha256(path)
    digest = sha256(str(size).encode())
    with path.open("rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                parts = [(part.filename, part.CRC, part.file_size) for part in archive.infolist()]
            digest.update(repr(parts).encode())
            return digest.hexdigest()
        for place in sorted({*range(0, size, size // SAMPLES), *_tensors(path, file)}):
            file.seek(place)
            digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _tensors(path: Path, file: BinaryIO) -> Iterable[int]:
    """Return the offsets of a safetensors file's tensors."""
    if path.suffix != ".safetensors":
        return []
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
    return [8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"]


def folder_fingerprint(folder: Path, weights: Sequence[Path] | None = None) -> str:
    """Return a fingerprint of a model or tokenizer, independent of its folder's location and the library's version.

    Args:
        folder: the folder with JSON files, vocabularies and weights.
        weights: the weight files; by default all, preferring safetensors.

    Raises:
        OSError: a file cannot be read.
        ValueError: a JSON file is damaged.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if weights is None:
        weights = [path for path in files if path.suffix in WEIGHTS]
        weights = [path for path in weights if path.suffix == ".safetensors"] or weights
    digest = sha256()
    for path in files:
        if path.suffix == ".json" and path.stat().st_size <= READ_WHOLE:
            digest.update(json.dumps([path.name, of_the_model(json.loads(path.read_bytes()))], sort_keys=True).encode())
        elif path.suffix in WORDS or path in weights:
            digest.update(f"{path.name} {file_fingerprint(path)}".encode())
    return digest.hexdigest()


def of_the_model(config: Any) -> Any:
    """Return a configuration without entries about the model's origin."""
    if not isinstance(config, dict):
        return config
    return {key: of_the_model(value) for key, value in config.items() if key not in NOT_OF_THE_MODEL}
