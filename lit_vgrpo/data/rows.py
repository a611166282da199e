"""Rows of a prompt source, validated and in the format that rewards receive."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from lit_vgrpo.core.pictures import PICTURE, picture_size
from lit_vgrpo.data.source import PromptError, PromptSource
from lit_vgrpo.errors import LONGEST_LIST, suggestion
from lit_vgrpo.system.paths import resolve_path

Row = dict[str, Any]
Rows = list[Row]
PROMPT = "prompt"


class RowSequence(Sequence[Row]):
    """Rows that are created on access."""

    @abstractmethod
    def row(self, number: int) -> Row:
        """Return row ``number``, from 0."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return [self.row(number) for number in range(*index.indices(len(self)))]
        return self.row(range(len(self))[index])


def checked(row: Mapping[str, Any], source: PromptSource, where: str, need: str = "") -> Row:
    """Validate a file's row and return it as ``{"prompt": str, **fields}``.

    Args:
        row: its fields.
        source: determines which field is the prompt, and which rewards apply.
        where: file and line or row, for the message.
        need: advice for the message.

    Raises:
        PromptError: the prompt is missing or not text, or the picture that it edits cannot be read.
    """
    column = source.column or PROMPT
    if column not in row:
        there = f", but {_listed(row)}" if row else ""
        raise PromptError(f'{where}: no "{column}"{there}. {need}'.rstrip())
    error = prompt_error(row[column])
    if error is not None:
        raise PromptError(f'{where}: "{column}" {error}. {need}'.rstrip())
    fields = dict(row)
    if column != PROMPT:
        fields = {PROMPT: fields.pop(column), **{key: value for key, value in fields.items() if key != PROMPT}}
    named = fields.get("rewards")
    names = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(name, str) for name in names):
        raise PromptError(f'{where}: "rewards" is {type_name(named)}. Write the names of rewards, such as ["ocr"].')
    if source.rewards is not None and not named:
        fields["rewards"] = source.rewards
    if fields.get(PICTURE) is None:
        fields.pop(PICTURE, None)
    else:
        fields[PICTURE] = _picture_file(fields[PICTURE], source, where)
    return fields


def _picture_file(named: object, source: PromptSource, where: str) -> str:
    """Return the path of the picture that a row names, relative to the source's folder.

    Raises:
        PromptError: it is not a path, or there is no picture.
    """
    if not isinstance(named, str) or not named.strip():
        what = type_name(named) if not isinstance(named, str) else "empty"
        raise PromptError(f'{where}: "{PICTURE}" is {what}. Write the path of a picture, relative to the prompt file.')
    folder = resolve_path(source.path)
    file = (folder if folder.is_dir() else folder.parent) / Path(named).expanduser()
    try:
        picture_size(file)
    except ValueError as error:
        raise PromptError(f'{where}: "{PICTURE}": {error}') from error
    return str(file.resolve())


def prompt_error(prompt: object) -> str | None:
    """Return why a value is not a prompt, or None."""
    if not isinstance(prompt, str):
        return f"is {type_name(prompt)}"
    if not prompt.strip():
        return "is empty"
    try:
        prompt.encode()
    except UnicodeEncodeError:
        return "contains half a character (a lone surrogate)"
    return None


def type_name(value: object) -> str:
    """Name a value's type as JSON does."""
    names = {list: "an array", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def check_columns(columns: Iterable[str], source: PromptSource, where: str) -> None:
    """Check that the prompt's column exists.

    Raises:
        PromptError: it does not; the message names the existing columns.
    """
    columns, column = list(columns), source.column or PROMPT
    if column in columns:
        return
    remedy = suggestion(column, columns) if source.column else "Set column= to the prompts' column."
    raise PromptError(f'{where}: no column "{column}", but {_listed(columns)}. {remedy}')


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(f'"{name}"' for name in names[:LONGEST_LIST]) + (", ..." if len(names) > LONGEST_LIST else "")


def without_nulls(value: Any) -> Any:
    """Remove empty cells from a table's value, so that a row has only the fields it was written with."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [without_nulls(inner) for inner in value]
    return value
