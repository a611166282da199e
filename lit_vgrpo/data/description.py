"""What to say about the prompts before a run."""

from __future__ import annotations

from collections.abc import Sequence

from lit_vgrpo.data.prompt_sets import Opened, PromptSets, checked_rows
from lit_vgrpo.data.source import PromptSource
from lit_vgrpo.data.tables import StreamedRows

DEDUPLICATE = "data.deduplicate=true"


def describe(sets: PromptSets) -> list[str]:
    """What was read, in a line, and what is worth a second look, in one each."""
    lines = [f"Prompts: {_amount(sets)} from {_origin(sets)}{_heldout(sets)}{_dropped(sets)}."]
    if sets.shared:
        lines.append(
            f"{sets.shared:,} of the training prompts {_are(sets.shared)} held-out prompts too. "
            f"Set {DEDUPLICATE} to train without them."
        )
    if sets.repeated:
        lines.append(
            f"{sets.repeated:,} of the training prompts {_are(sets.repeated)} there before. "
            f"Set {DEDUPLICATE} to drop them."
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
    lines = [f"Only the first {seen:,}{of} rows of {source.path} were checked. A wrong one later stops the run."]
    if sets.choice.heldout is not None:
        lines.append(f"Whether held-out prompts stand in {source.path} too was not checked.")
    return lines


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
