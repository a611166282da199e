"""Prompts out of files, folders and datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_vgrpo.data.hub_datasets import is_saved
from lit_vgrpo.data.rows import PROMPT, Row
from lit_vgrpo.data.source import PromptError, PromptSource, as_source, kind_of
from lit_vgrpo.data.tables import StreamedRows, TableRows, read_parquet
from lit_vgrpo.data.text_files import IndexedRows, read_text
from lit_vgrpo.system.paths import resolve_path

LARGE_FILE_BYTES = 64 * 2**20
"""Files from this size on are left on disk."""

__all__ = ["PromptError", "open_prompts", "prompt_faults", "prompts_of", "read_prompts"]


def read_prompts(source: str | Path | PromptSource) -> list[dict[str, Any]]:
    """Read prompts into rows ``{"prompt": str, **fields}``.

    Args:
        source: a ``.txt`` file with one prompt a line; a ``.jsonl`` file with one object a line that has a "prompt"
            string and any fields a reward may read; a ``.csv`` file with a header; a ``.parquet`` file; a folder or
            a dataset of the hub, see :class:`PromptSource`. Text is UTF-8; blank lines are skipped; ``shipped:``
            paths are resolved.

    Raises:
        PromptError: (a ValueError) it is missing, of another kind, not UTF-8, empty, or a line of it is wrong. The
            message is one line and names the file and the number of the line or row.
        ModuleNotFoundError: it needs the extra ``data``.
    """
    source = as_source(source)
    kind = kind_of(source)
    if kind in ("folder", "hub"):
        return list(TableRows(source, kind))
    return read_parquet(source) if kind == "parquet" else read_text(source, kind)


def open_prompts(source: PromptSource, streaming: bool | None = None, seed: int = 0) -> Sequence[Row] | StreamedRows:
    """Return the rows of a source, in memory or left where they are.

    Args:
        source: what to open.
        streaming: True leaves them on disk, and reads folders of data files and datasets of the hub forwards only;
            False reads text and parquet files into memory; None looks at their size.
        seed: seed of the order of a stream.

    Raises:
        PromptError: as :func:`read_prompts`; what stands in a row that is left on disk shows when it is asked for.
        ModuleNotFoundError: it needs the extra ``data``.
    """
    kind = kind_of(source)
    if kind == "hub" or (kind == "folder" and not is_saved(resolve_path(source.path))):
        return StreamedRows(source, kind, seed) if streaming else TableRows(source, kind)
    if kind == "folder":
        return TableRows(source, kind)
    if streaming is None:
        streaming = resolve_path(source.path).stat().st_size >= LARGE_FILE_BYTES
    if not streaming:
        return read_parquet(source) if kind == "parquet" else read_text(source, kind)
    return TableRows(source, kind) if kind == "parquet" else IndexedRows(source, kind)


def prompt_faults(*given: object) -> list[str]:
    """List what keeps the sources in a recipe's plain values from being opened; other values are skipped."""
    faults = []
    for value in given:
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, str | dict):
                continue
            try:
                source = as_source(entry)
            except (TypeError, ValueError):
                continue  # the parser says it
            try:
                open_prompts(source)
            except (PromptError, ModuleNotFoundError) as error:
                faults.append(str(error))
    return faults


def prompts_of(rows: Sequence[Row]) -> Iterator[str]:
    """Every prompt, in order."""
    if isinstance(rows, TableRows):
        return rows.prompts()
    return (row[PROMPT] for row in rows)
