"""Training and held-out prompts: deduplication, splitting by hash, and the order of training prompts."""

from __future__ import annotations

import random
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from lit_vgrpo.data.prompts import Row, Rows, TableRows, open_prompts, text_of
from lit_vgrpo.data.source import PromptError, PromptSource
from lit_vgrpo.errors import setting

CHECKED_ROWS = 10_000
"""Rows of a table whose fields are checked before a run; prompts are all checked."""
Keys = NDArray[np.uint64]


@dataclass
class PromptChoice:
    """A recipe's prompt options; see :class:`~lit_vgrpo.data.module.PromptDataModule`."""

    train: list[PromptSource]
    heldout: list[PromptSource] = field(default_factory=list)
    heldout_fraction: float | None = None
    heldout_limit: int | None = None
    deduplicate: bool = False
    edits: bool = True
    exclude: list[PromptSource] = field(default_factory=list)


class PromptSets:
    """A recipe's training and held-out prompts.

    Raises:
        PromptError: A source cannot be read, or no prompts remain on a side.
    """

    def __init__(self, choice: PromptChoice) -> None:
        self.choice = choice
        self.heldout: Rows | None = None  # None without any
        names: list[str | None] = []
        sources = [open_prompts(source, choice.edits) for source in choice.train]
        apart = prompt_keys([])
        if choice.heldout:
            self.heldout, names, apart = read_heldout(choice)
        keys = np.concatenate([prompt_keys(_texts(rows)) for rows in sources])
        firsts, is_shared = first_of_each(keys), np.isin(keys, apart)
        stays = firsts & ~is_shared if choice.deduplicate else np.ones_like(firsts)
        excluded = (text_of(row) for source in choice.exclude for row in open_prompts(source, choice.edits))
        stays &= ~np.isin(keys, prompt_keys(excluded))
        self.shared = int((stays & is_shared).sum())  # training prompts that are also held-out prompts, and were kept
        self.has_others = bool((stays & ~is_shared).any())
        aside = stays & is_held_out(keys, choice.heldout_fraction or 0.0)
        starts = np.cumsum([0, *map(len, sources)])
        if choice.heldout_fraction is not None:
            # sorted by key, so independent of the order of sources and rows
            chosen = np.flatnonzero(aside)
            chosen = chosen[np.argsort(keys[chosen], kind="stable")][: choice.heldout_limit]
            places = [*zip(np.searchsorted(starts, chosen, side="right") - 1, chosen, strict=True)]
            self.heldout = [sources[source][int(index - starts[source])] for source, index in places]
            names = [choice.train[source].name for source, _ in places]
            if not self.heldout:
                raise PromptError(
                    f"heldout_fraction={choice.heldout_fraction} holds out no prompts. Use a larger fraction."
                )
        training: list[Rows | TableRows] = []
        for source, rows, mask in zip(choice.train, sources, np.split(stays & ~aside, starts[1:-1]), strict=True):
            indices = np.flatnonzero(mask)
            if not len(indices):
                key = "" if choice.heldout_fraction is None else f"heldout_fraction={choice.heldout_fraction}: "
                all_out = "has no prompts left for training: all are held out or duplicates."
                raise PromptError(f"{key}{source.path} {all_out}")
            training.append(rows.select(indices) if isinstance(rows, TableRows) else [rows[i] for i in indices])
        self.heldout_sources = [name for name in names if name is not None]  # empty if there is only one source
        of_sources = [source.name for source in choice.train if source.name is not None]
        self.training = PromptMixture(training, [source.weight for source in choice.train], of_sources)

    def rows_by_source(self) -> Iterator[tuple[str | None, Iterator[Row]]]:
        """Yield the name of each training source and its rows to check before a run; of a table only the first ones."""
        for source, rows in zip(self.choice.train, self.training.sources, strict=True):
            yield source.name, islice(rows, CHECKED_ROWS if isinstance(rows, TableRows) else None)

    def describe(self) -> str:
        """Return a line about the prompts read."""
        named = zip(self.choice.train, self.training.sources, strict=True)
        lengths = " + ".join(f"{len(rows):,}{f' ({source.name})' if source.name else ''}" for source, rows in named)
        return f"Prompts: {lengths} to train on, {len(self.heldout or ()):,} held out."

    def heldout_warning(self) -> str | None:
        """Return why the held-out reward does not measure new prompts, or ``None``."""
        if self.heldout is None:
            advice = f"Set data.heldout to a file of other prompts, or {setting('data', heldout_fraction=0.1)}."
            return f"No prompts are held out, so the reward is measured on training prompts alone. {advice}"
        if not self.shared:
            return None
        drop = f"To drop them, set {setting('data', deduplicate=True)}."
        advice = drop if self.has_others else "Set data.heldout to other prompts."
        which = "" if self.has_others else "All "
        are = "prompt is also a held-out prompt" if self.shared == 1 else "prompts are also held-out prompts"
        return f"{which * (self.shared > 1)}{self.shared:,} training {are}. {advice}"

    def fingerprint(self) -> str:
        """Return the SHA-256 of the training prompts and their pictures in order, independent of file locations."""
        digest = sha256()
        for text in chain.from_iterable(map(_texts, self.training.sources)):
            digest.update(f"{text}\0".encode())
        return digest.hexdigest()


def read_heldout(choice: PromptChoice) -> tuple[Rows, list[str | None], Keys]:
    """Return the held-out files' rows that the evaluation uses, the source of each, and the keys of all their rows."""
    read = [(row, source.name) for source in choice.heldout for row in open_prompts(source, choice.edits)]
    keys = prompt_keys(text_of(row) for row, _ in read)
    if choice.deduplicate:
        read = [read[index] for index in np.flatnonzero(first_of_each(keys))]
    kept = read[: choice.heldout_limit]
    return [row for row, _ in kept], [name for _, name in kept], keys


def _texts(rows: Rows | TableRows) -> Iterable[str]:
    return rows.texts() if isinstance(rows, TableRows) else map(text_of, rows)


def normalised(prompt: str) -> str:
    """Normalise a prompt's case, white space and Unicode representation of accents.

    >>> normalised("A  Cafe\\u0301 ") == normalised("a caf\\u00e9")
    True
    """
    folded = unicodedata.normalize("NFD", prompt).casefold()
    return " ".join(unicodedata.normalize("NFC", folded).split())


def prompt_keys(prompts: Iterable[str]) -> Keys:
    """Return the first 64 bits of the SHA-256 of every normalised prompt, shape ``(N,)``."""
    digests = (sha256(normalised(prompt).encode()).digest() for prompt in prompts)
    return np.fromiter((int.from_bytes(digest[:8], "big") for digest in digests), dtype=np.uint64)


def is_held_out(keys: Keys, fraction: float) -> NDArray[np.bool_]:
    """Return a mask ``(N,)`` of the held-out prompts: those with keys in the lowest ``fraction`` of all possible keys.

    A prompt keeps its side regardless of the rest of its file. A larger fraction holds out the same prompts and more.
    """
    return keys < np.uint64(int(fraction * 2**64))


def first_of_each(keys: Keys) -> NDArray[np.bool_]:
    """Return a mask of the entries that are the first with their key, shape ``(N,)``."""
    firsts = np.zeros(len(keys), dtype=bool)
    firsts[np.unique(keys, return_index=True)[1]] = True
    return firsts


# --- the order of training prompts -----------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _shuffled_pass(key: str, dataset_size: int) -> Sequence[int]:
    order = array("q", range(dataset_size))
    # random.Random seeded with text gives the same order on every Python and platform
    random.Random(key).shuffle(order)
    return order


def prompt_index(seed: int, position: int, dataset_size: int, source: int = 0) -> int:
    """Return the prompt at a position in consecutive shuffled passes over a dataset, in [0, dataset_size).

    Each ``source``, the dataset's index among several, has a different order.
    """
    pass_index, offset = divmod(position, dataset_size)
    key = f"prompts {seed} {pass_index}" + (f" source {source}" if source else "")
    return _shuffled_pass(key, dataset_size)[offset]


def place_in_mixture(position: int, weights: Sequence[int | Fraction]) -> tuple[int, int]:
    """Return the source for a position in the endless prompt sequence, and the number of its earlier positions.

    Sources are split in halves recursively; each half gets its rounded share of the positions. Any prefix is therefore
    within half a position per split of the exact shares, without keeping state.

    The weights must be exact numbers, since positions have no end.

    >>> [place_in_mixture(position, [3, 1])[0] for position in range(8)]
    [0, 0, 1, 0, 0, 0, 1, 0]
    """
    first, last = 0, len(weights)
    while last - first > 1:
        middle = (first + last) // 2
        part, whole = sum(weights[first:middle]), sum(weights[first:last])
        before, after = ((2 * n * part + whole) // (2 * whole) for n in (position, position + 1))
        if after > before:
            position, last = before, middle
        else:
            position, first = position - before, middle
    return first, position


class PromptMixture:
    """A mixture of training prompt sources, named if there are several, each shuffled and repeated independently."""

    def __init__(
        self, sources: Sequence[Rows | TableRows], weights: Sequence[float] = (1.0,), names: Sequence[str] = ()
    ) -> None:
        self.sources, self.names = sources, names
        self.weights = [Fraction(repr(float(weight))) for weight in weights]  # of numpy's too

    def rows(self, seed: int, positions: Sequence[int]) -> Rows:
        """Return the rows at positions of the endless prompt sequence: a pure function of seed and position."""
        places = [place_in_mixture(position, self.weights) for position in positions]
        return [
            self.sources[number][prompt_index(seed, position, len(self.sources[number]), number)]
            for number, position in places
        ]

    def names_at(self, positions: Sequence[int]) -> list[str]:
        """Return the names of these rows' sources; empty without names."""
        return [self.names[place_in_mixture(position, self.weights)[0]] for position in positions if self.names]
