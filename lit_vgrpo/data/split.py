"""The hash of a prompt, which alone determines held-out prompts and duplicates."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

KEY_BITS = 64
Keys = NDArray[np.uint64]


def normalised(prompt: str) -> str:
    """Normalise a prompt's case, white space and Unicode representation of accents.

    >>> normalised("A  Cafe\\u0301 ") == normalised("a caf\\u00e9")
    True
    """
    if prompt.isascii():
        return " ".join(prompt.lower().split())
    folded = unicodedata.normalize("NFD", prompt).casefold()
    return " ".join(unicodedata.normalize("NFC", folded).split())


def prompt_key(prompt: str) -> int:
    """Return the first 64 bits of the SHA-256 of the normalised prompt.

    >>> prompt_key("a cat") == prompt_key(" A CAT")
    True
    """
    return int.from_bytes(sha256(normalised(prompt).encode()).digest()[: KEY_BITS // 8], "big")


def prompt_keys(prompts: Iterable[str]) -> Keys:
    """Return the key of every prompt: shape ``(N,)``."""
    return np.fromiter((prompt_key(prompt) for prompt in prompts), dtype=np.uint64)


def held_out(keys: Keys, fraction: float) -> NDArray[np.bool_]:
    """Return a mask of the held-out prompts: those with keys in the lowest ``fraction`` of all possible keys.

    Only the prompt matters: it keeps its side whatever else is in its file, and a larger fraction holds out the same
    prompts and more.

    Args:
        keys: from :func:`prompt_keys`, shape ``(N,)``.
        fraction: between 0 and 1.

    Returns:
        Shape ``(N,)``.
    """
    return keys < np.uint64(int(fraction * 2**KEY_BITS))


def first_of_each(keys: Keys) -> NDArray[np.bool_]:
    """Return a mask of the entries that are the first with their key, shape ``(N,)``."""
    firsts = np.zeros(len(keys), dtype=bool)
    firsts[np.unique(keys, return_index=True)[1]] = True
    return firsts
