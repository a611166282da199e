"""A shuffled order of a range that needs no memory."""

from __future__ import annotations

from hashlib import blake2b

ROUNDS = 6


def shuffled_index(key: str, index: int, size: int) -> int:
    """Return entry ``index`` of a permutation of ``range(size)`` determined by the key.

    A Feistel network over the next even number of bits, applied until the result is in range: at most four times on
    average.

    >>> sorted(shuffled_index("any key", index, 10) for index in range(10)) == list(range(10))
    True

    Args:
        key: the same key gives the same order, on every platform.
        index: 0 to ``size - 1``.
        size: length of the range.

    Source:
        Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002): cycle walking over a Feistel network.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        index = _encrypted(key, index, half)
        if index < size:
            return index


def _encrypted(key: str, value: int, half: int) -> int:
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for number in range(ROUNDS):
        digest = blake2b(f"{key} {number} {right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
    return left << half | right
