"""Hashes of files and of model folders."""

from __future__ import annotations

import hashlib
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


def of_the_model(config: Any) -> Any:
    """Return a configuration without entries about the model's origin."""
    if not isinstance(config, dict):
        return config
    return {key: of_the_model(value) for key, value in config.items() if key not in NOT_OF_THE_MODEL}
