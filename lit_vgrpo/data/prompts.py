"""Prompts from files, folders and datasets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.data.hub_datasets import is_saved
from lit_vgrpo.data.rows import PROMPT, Row
from lit_vgrpo.data.source import PromptError, PromptSource, as_source, kind_of
from lit_vgrpo.data.tables import StreamedRows, TableRows, read_parquet
from lit_vgrpo.data.text_files import IndexedRows, read_text
from lit_vgrpo.system.file_fingerprint import file_sha256
from lit_vgrpo.system.paths import resolve_path

LARGE_FILE_BYTES = 64 * 2**20
"""Files of at least this size are left on disk."""

__all__ = ["PromptError", "open_prompts", "prompt_errors", "prompts_of", "read_prompts"]


def read_prompts(source: str | Path | PromptSource) -> list[dict[str, Any]]:
    """Read prompts into rows ``{"prompt": str, **fields}``.

    Args:
        source: a ``.txt`` file with one prompt per line; a ``.jsonl`` file with one object per line that has a "prompt"
            string and any fields for rewards; a ``.csv`` file with a header; a ``.parquet`` file; a folder or a hub
            dataset, see :class:`PromptSource`. Text is UTF-8; blank lines are skipped; ``shipped:`` paths are resolved.

    Raises:
        PromptError: (a ValueError) it is missing, of another kind, not UTF-8, empty or malformed. The one-line message
            names the file and the line or row.
        ModuleNotFoundError: it needs the extra ``data``.
    """
    return list(open_prompts(as_source(source), streaming=False))


def open_prompts(source: PromptSource, streaming: bool | None = None, seed: int = 0) -> Sequence[Row] | StreamedRows:
    """Open a source's rows, in memory or on disk.

    Args:
        source: what to open.
        streaming: True leaves them on disk, and reads folders of data files and hub datasets sequentially; False reads
            text and parquet files into memory; None decides by file size.
        seed: seed of the order of a stream.

    Raises:
        PromptError: as in :func:`read_prompts`; rows left on disk are checked when accessed.
        ModuleNotFoundError: it needs the extra ``data``.
    """
    kind = kind_of(source)
    if kind in ("hub", "folder"):
        is_stream = streaming and not (kind == "folder" and is_saved(resolve_path(source.path)))
        return StreamedRows(source, kind, seed) if is_stream else TableRows(source, kind)
    if streaming is None:
        streaming = resolve_path(source.path).stat().st_size >= LARGE_FILE_BYTES
    if not streaming:
        return read_parquet(source) if kind == "parquet" else read_text(source, kind)
    return TableRows(source, kind) if kind == "parquet" else IndexedRows(source, kind)


def prompt_errors(*given: object) -> list[str]:
    """Return why sources in a recipe's plain values cannot be opened; other values are skipped."""
    errors = []
    for value in given:
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, str | dict):
                continue
            try:
                source = as_source(entry)
            except (TypeError, ValueError):
                continue  # the parser reports it
            try:
                open_prompts(source)
            except (PromptError, ModuleNotFoundError) as error:
                errors.append(str(error))
    return errors


def prompts_of(rows: Sequence[Row]) -> Iterator[str]:
    """Yield every row's text that tells it from others, in order: its prompt, and the picture that the prompt edits."""
    if isinstance(rows, TableRows) and not rows.has_pictures:
        return rows.prompts()
    return map(text_of, rows)


def text_of(row: Row) -> str:
    """Return what tells a row from others: its prompt, and a hash of the picture that the prompt edits."""
    return row[PROMPT] if PICTURE not in row else f"{row[PROMPT]}\n{file_sha256(Path(row[PICTURE]))}"
