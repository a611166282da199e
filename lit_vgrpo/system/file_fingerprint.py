"""Hashes of files and of model folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


file_fingerprint = file_sha256


def folder_fingerprint(folder: Path, weights: Sequence[Path] | None = None) -> str:
    """Return a hash of a model or tokenizer, independent of its folder's location and the library's version.

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
    digest = hashlib.sha256()
    for path in files:
        if path.suffix == ".json":
            digest.update(json.dumps([path.name, of_the_model(json.loads(path.read_bytes()))], sort_keys=True).encode())
        elif path.suffix in WORDS or path in weights:
            digest.update(f"{path.name} {file_sha256(path)}".encode())
    return digest.hexdigest()


def of_the_model(config: Any) -> Any:
    """Return a configuration without entries about the model's origin."""
    if not isinstance(config, dict):
        return config
    return {key: of_the_model(value) for key, value in config.items() if key not in NOT_OF_THE_MODEL}
