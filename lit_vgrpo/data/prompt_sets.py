"""Training and held-out prompts: opening, deduplication, splitting."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
from numpy.typing import NDArray

from lit_vgrpo.data.mixture import PromptMixture
from lit_vgrpo.data.prompts import open_prompts, prompts_of, read_prompts, text_of
from lit_vgrpo.data.rows import Row, Rows, RowSequence
from lit_vgrpo.data.source import PromptError, PromptSource
from lit_vgrpo.data.split import Keys, first_of_each, held_out, prompt_key, prompt_keys
from lit_vgrpo.data.tables import StreamedRows

CHECKED_ROWS = 10_000
"""Rows checked before a run, for sources that are not in memory."""
CHECKED_STREAM_ROWS = 1_000

Opened = Sequence[Row] | StreamedRows
NO_KEYS: Keys = np.empty(0, dtype=np.uint64)


@dataclass
class PromptChoice:
    """A recipe's prompt options; see :class:`~lit_vgrpo.data.module.PromptDataModule`."""

    train: list[PromptSource]
    heldout: PromptSource | None = None
    heldout_fraction: float | None = None
    heldout_limit: int | None = None
    deduplicate: bool = False
    streaming: bool | None = None
    seed: int = 0

    @property
    def reads_all(self) -> bool:
        """True if every training prompt is read before a run, even from disk."""
        return self.deduplicate or self.heldout_fraction is not None


class ChosenRows(RowSequence):
    """A selection of rows of a source that is not in memory: 8 bytes per row."""

    def __init__(self, rows: Sequence[Row], numbers: NDArray[np.int64]) -> None:
        self.rows, self.numbers = rows, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def row(self, number: int) -> Row:
        return self.rows[int(self.numbers[number])]


class PromptSets:
    """A recipe's prompts.

    Attributes:
        errors: errors, one line each; the other attributes are valid only if there are none.
        training: the training prompts.
        heldout: the held-out prompts; None without any.
        dropped: number of duplicates left out.
        repeated: number of duplicate training prompts that were kept.
        shared: number of training prompts that are also held-out prompts, and were kept.
    """

    training: PromptMixture

    def __init__(self, choice: PromptChoice) -> None:
        self.choice = choice
        self.errors: list[str] = []
        self.heldout: Rows | None = None
        self.dropped = self.repeated = self.shared = 0
        sources = self._opened()
        apart = NO_KEYS
        try:
            if choice.heldout is not None:
                rows = read_prompts(choice.heldout)
                apart = prompt_keys(map(text_of, rows))
                self.heldout = limited_heldout(rows, choice)
        except (PromptError, ModuleNotFoundError) as error:
            self.errors.append(str(error))
        if self.errors:
            return
        try:
            sources = self._split(sources, apart)
        except PromptError as error:
            self.errors.append(str(error))
            return
        if choice.heldout_fraction is not None and not self.heldout:
            self.errors.append(
                f"heldout_fraction={choice.heldout_fraction} holds out no prompts. "
                "Use a larger fraction, or a held-out file."
            )
        self.training = PromptMixture(sources, [source.weight for source in choice.train])

    def training_rows(self) -> Iterator[Row]:
        """Return the training rows, source by source; of sources not in memory only the first ones."""
        for _, rows in self.sources():
            yield from islice(rows, checked_rows(rows))

    def sources(self) -> Iterator[tuple[PromptSource, Opened]]:
        """Return the training sources with their rows."""
        return zip(self.choice.train, self.training.sources, strict=True)

    def _opened(self) -> list[Opened]:
        sources: list[Opened] = []
        for number, source in enumerate(self.choice.train):
            seed = random.Random(f"stream {self.choice.seed} source {number}").getrandbits(32)
            try:
                rows = open_prompts(source, self.choice.streaming, seed)
                if isinstance(rows, StreamedRows):
                    self._check_stream(source)
                if not isinstance(rows, list):
                    for _ in islice(rows, checked_rows(rows)):
                        pass
                sources.append(rows)
            except (PromptError, ModuleNotFoundError) as error:
                self.errors.append(str(error))
        return sources

    def _check_stream(self, source: PromptSource) -> None:
        if self.choice.deduplicate:
            raise PromptError(
                f"deduplicate=true needs all of {source.path}, which is a stream. "
                "Set data.deduplicate=false or data.streaming=null."
            )
        if self.choice.heldout_fraction is not None and self.choice.heldout_limit is None:
            raise PromptError(
                f"heldout_fraction={self.choice.heldout_fraction} of the stream {source.path} is unbounded. "
                "Set data.heldout_limit."
            )

    def _split(self, sources: list[Opened], apart: Keys) -> list[Opened]:
        """Remove duplicates and held-out prompts; those split off by hash go to ``heldout``.

        Args:
            sources: the opened sources.
            apart: keys of the prompts of the held-out file.
        """
        fraction = self.choice.heldout_fraction
        own_keys = {number: keys for number, rows in enumerate(sources) if (keys := self._keys(rows)) is not None}
        keys = np.concatenate([NO_KEYS, *own_keys.values()])
        firsts, outside = first_of_each(keys), np.isin(keys, apart)
        stays = np.ones(len(keys), dtype=bool)
        if self.choice.deduplicate:
            stays = firsts & ~outside
            self.dropped = int((~stays).sum())
        else:
            self.repeated, self.shared = int((~firsts).sum()), int(outside.sum())
        aside = stays & held_out(keys, fraction or 0.0)

        taken: list[tuple[int, Row]] = []
        start = 0
        for number, own in own_keys.items():
            part = slice(start, start := start + len(own))
            rows = cast(Sequence[Row], sources[number])
            taken += self._taken(rows, own, np.flatnonzero(aside[part]))
            remains = stays[part] & ~aside[part]
            sources[number] = _chosen(rows, remains)
            if not remains.any():
                path = self.choice.train[number].path
                self.errors.append(f"{path} has no prompts left for training: all are held out or duplicates.")
        if fraction is not None:
            streams = [rows for rows in sources if isinstance(rows, StreamedRows)]
            taken += [pair for rows in streams for pair in self._of_stream(rows, fraction)]
            # by hash, independent of the order of sources and rows
            taken.sort(key=lambda pair: pair[0])
            self.heldout = [row for _, row in taken][: self.choice.heldout_limit]
        return sources

    def _keys(self, rows: Opened) -> Keys | None:
        """Return the keys of a source; None if it is not read completely."""
        if isinstance(rows, StreamedRows):
            return None
        if isinstance(rows, list) or self.choice.reads_all:
            return prompt_keys(prompts_of(rows))
        return None

    def _taken(self, rows: Sequence[Row], keys: Keys, numbers: NDArray[np.int64]) -> list[tuple[int, Row]]:
        """Return a source's held-out rows with their keys, as many as needed."""
        lowest = numbers[np.argsort(keys[numbers], kind="stable")][: self.choice.heldout_limit]
        return [(int(keys[number]), rows[number]) for number in lowest.tolist()]

    def _of_stream(self, rows: StreamedRows, fraction: float) -> list[tuple[int, Row]]:
        """Return a stream's first rows with their keys."""

        def is_aside(row: Row) -> bool:
            return bool(held_out(prompt_keys([text_of(row)]), fraction)[0])

        rows.skip(is_aside)
        aside = (row for row in rows if is_aside(row))
        return [(prompt_key(text_of(row)), row) for row in islice(aside, self.choice.heldout_limit)]


def limited_heldout(rows: Rows, choice: PromptChoice) -> Rows:
    """Return the rows of a held-out file that the evaluation uses."""
    if choice.deduplicate:
        firsts = first_of_each(prompt_keys(map(text_of, rows)))
        rows = [row for row, first in zip(rows, firsts, strict=True) if first]
    return rows[: choice.heldout_limit]


def _chosen(rows: Sequence[Row], mask: NDArray[np.bool_]) -> Sequence[Row]:
    if mask.all():
        return rows
    numbers = np.flatnonzero(mask)
    return [rows[number] for number in numbers.tolist()] if isinstance(rows, list) else ChosenRows(rows, numbers)


def checked_rows(rows: Opened) -> int | None:
    """Return how many rows of a source are checked before a run; None for all."""
    if isinstance(rows, list):
        return None
    return CHECKED_STREAM_ROWS if isinstance(rows, StreamedRows) else CHECKED_ROWS
