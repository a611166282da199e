"""Start-up messages about the prompts, and their fingerprint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path

from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.data.prompt_sets import ChosenRows, Opened, PromptSets, checked_rows
from lit_vgrpo.data.rows import Row
from lit_vgrpo.data.source import PromptSource
from lit_vgrpo.data.tables import StreamedRows
from lit_vgrpo.data.text_files import IndexedRows
from lit_vgrpo.system.file_fingerprint import file_sha256

DEDUPLICATE = "data.deduplicate=true"


def describe(sets: PromptSets) -> list[str]:
    """Return a line about what was read, and one per warning."""
    lines = [f"Prompts: {_amount(sets)} from {_origin(sets)}{_heldout(sets)}{_dropped(sets)}."]
    if sets.shared:
        lines.append(
            f"{sets.shared:,} of the training prompts {_are(sets.shared)} held-out prompts too. "
            f"Set {DEDUPLICATE} to train without them."
        )
    if sets.repeated:
        lines.append(
            f"{sets.repeated:,} of the training prompts {_are(sets.repeated)} repeated. Set {DEDUPLICATE} to drop them."
        )
    return lines + [line for source, rows in sets.sources() for line in _unseen(sets, source, rows)]


def _amount(sets: PromptSets) -> str:
    counts = [len(rows) for _, rows in sets.sources() if not isinstance(rows, StreamedRows)]
    streams = len(sets.choice.train) - len(counts)
    amounts = [f"{sum(counts):,}"] if counts else []
    amounts += ["a stream" if streams == 1 else f"{streams} streams"] if streams else []
    return " and ".join(amounts)


def _origin(sets: PromptSets) -> str:
    weights = [f"{source.weight:g}" for source in sets.choice.train]
    return "1 source" if len(weights) == 1 else f"{len(weights)} sources (weights {':'.join(weights)})"


def _heldout(sets: PromptSets) -> str:
    if sets.heldout is None:
        return ""
    return f", {len(sets.heldout):,} held out" + (" by hash" if sets.choice.heldout_fraction is not None else "")


def _dropped(sets: PromptSets) -> str:
    if not sets.choice.deduplicate:
        return ""
    return f", {sets.dropped:,} duplicate{'' if sets.dropped == 1 else 's'} dropped"


def _unseen(sets: PromptSets, source: PromptSource, rows: Opened) -> list[str]:
    seen = checked_rows(rows)
    if seen is None or (isinstance(rows, Sequence) and (sets.choice.reads_all or len(rows) <= seen)):
        return []
    of = "" if isinstance(rows, StreamedRows) else f" of {len(rows):,}"
    lines = [f"Only the first {seen:,}{of} rows of {source.path} were checked. An invalid row later stops the run."]
    if sets.choice.heldout is not None:
        lines.append(f"{source.path} was not checked for held-out prompts.")
    return lines


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def prompts_fingerprint(sets: PromptSets) -> str:
    """Return a fingerprint of the training prompts and their order, independent of file locations: 64 hex digits.

    It covers every row with its fields and its picture. A text file that stays on disk is hashed whole, which takes a
    second per 1 to 2 GB, without its pictures; of datasets it covers the length and the rows checked before a run.
    """
    digest = sha256()
    for _, rows in sets.sources():
        digest.update(_of_rows(rows).encode())
    return digest.hexdigest()


def _independent(row: Row) -> Row:
    """Return a row with its picture's content in place of its path."""
    return {**row, PICTURE: file_sha256(Path(row[PICTURE]))} if PICTURE in row else row


def _of_rows(rows: Opened) -> str:
    if isinstance(rows, IndexedRows):
        return file_sha256(rows.file)
    digest = sha256()
    if isinstance(rows, ChosenRows):
        digest.update(rows.numbers.tobytes())
        digest.update(_of_rows(rows.rows).encode())
    else:
        length = 0 if isinstance(rows, StreamedRows) else len(rows)
        digest.update(str(length).encode())
        for row in islice(rows, checked_rows(rows)):
            digest.update(json.dumps(_independent(row), sort_keys=True, default=str).encode())
    return digest.hexdigest()
