"""Rows of a prompt source, validated and in the format that rewards receive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lit_vgrpo.core.pictures import PICTURE, picture_size
from lit_vgrpo.data.source import PromptError, PromptSource
from lit_vgrpo.errors import suggestion
from lit_vgrpo.system.paths import file_sha256, resolve_path

Row = dict[str, Any]
Rows = list[Row]
PROMPT = "prompt"


def checked_row(row: Mapping[str, Any], source: PromptSource, where: str) -> Row:
    """Validate a source's row and return it as ``{"prompt": str, **fields}``.

    Args:
        row: its fields.
        source: determines which field is the prompt, and which rewards apply.
        where: file and line or row, for the message.

    Raises:
        PromptError: the prompt is missing or not text, or the picture that it edits cannot be read.
    """
    check_column(row, source, where)
    fields = dict(row)
    prompt = checked_prompt(fields.pop(source.column or PROMPT), source, where)
    fields = {PROMPT: prompt, **{key: value for key, value in fields.items() if key != PROMPT}}
    if not fields.get("rewards") and source.rewards is not None:
        fields["rewards"] = source.rewards
    named = fields.get("rewards")
    if not all(isinstance(name, str) for name in (named if isinstance(named, list) else [named or ""])):
        raise PromptError(f'{where}: "rewards" is {named!r}. Write the names of rewards, such as ["ocr"].')
    picture = fields.pop(PICTURE, None)
    if picture is not None:
        fields[PICTURE] = _picture_file(picture, source, where)
    return fields


def checked_prompt(value: object, source: PromptSource, where: str) -> str:
    """Return a prompt; raise PromptError if it is empty or not text."""
    if not isinstance(value, str) or not value.strip():
        raise PromptError(f'{where}: "{source.column or PROMPT}" is {str(value)[:40]!r}. A prompt must be text.')
    return value


def check_column(columns: Iterable[str], source: PromptSource, where: str) -> None:
    """Check that the prompt's column exists.

    Raises:
        PromptError: it does not; the message names the nearest column, or all.
    """
    columns, column = list(columns), source.column or PROMPT
    if column not in columns:
        remedy = f" {suggestion(column, columns)} Set column= to the prompts' column." if columns else ""
        raise PromptError(f'{where}: no column "{column}".{remedy}')


def _picture_file(named: object, source: PromptSource, where: str) -> str:
    """Return the path of the picture that a row names, relative to the source's folder."""
    folder = resolve_path(source.path)
    file = (folder if folder.is_dir() else folder.parent) / Path(str(named)).expanduser()
    try:
        picture_size(file)
    except ValueError as error:
        raise PromptError(f'{where}: "{PICTURE}": {error}') from error
    return str(file.resolve())


def text_of(row: Row) -> str:
    """Return what distinguishes a row from others: its prompt, and a hash of the picture that the prompt edits."""
    return row[PROMPT] if PICTURE not in row else f"{row[PROMPT]}\n{file_sha256(Path(row[PICTURE]))}"
