"""Rows of prompts from text files, and from tables that the ``datasets`` library keeps on disk."""

from __future__ import annotations

import csv
import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from io import StringIO
from itertools import chain, filterfalse, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_vgrpo.core.pictures import PICTURE, picture_files, picture_size
from lit_vgrpo.data.source import FILE_KINDS, Kind, PromptError, PromptSource, as_source, kind_of
from lit_vgrpo.errors import nearest, one_line, shortened, suggestion
from lit_vgrpo.system.paths import file_sha256, resolve_path

Row = dict[str, Any]
Rows = list[Row]
PROMPT = "prompt"
LINE_END = re.compile(r"\r\n?|\n")
NO_PROMPTS = re.compile(r"(readme|licen[cs]e|requirements)\.txt", re.IGNORECASE)
LISTS_FILES = re.compile(r"\A---\n(?:.*\n)*?configs:")
"""Start of a dataset's README.md that lists the files of each configuration."""
UNKNOWN_SPLIT = re.compile(r"Unknown split .+ Should be one of \[(.*)\]")
SAVED_MARKS = SPLITS_MARK, TABLE_MARK = "dataset_dict.json", "state.json"
"""Files that identify a folder written by ``save_to_disk``, of several splits or of one table."""


def read_prompts(source: str | Path | PromptSource, edits: bool = True) -> Rows:
    """Read prompts into rows ``{"prompt": str, **fields}``.

    Args:
        source: A ``.txt`` file with one prompt per line; a ``.jsonl`` file with one object per line that has a "prompt"
            string and any fields for rewards; a ``.csv`` file with a header; a ``.parquet`` file; a folder or a hub
            dataset, see :class:`PromptSource`. Text is UTF-8; blank lines are skipped; ``shipped:`` paths are resolved.
        edits: The rows are for a policy that edits the pictures that they name, which must then be readable.

    Raises:
        PromptError: The source is missing, of another kind, not UTF-8, empty or malformed. The message is one line with
            the file and the line or row. It is a ValueError.
        ModuleNotFoundError: The source needs the extra ``data``.
    """
    return list(open_prompts(as_source(source), edits))


def open_prompts(source: PromptSource, edits: bool = True) -> Rows | TableRows:
    """Open a source's rows: text files in memory; parquet files and other datasets on disk, read on access.

    Errors as in :func:`read_prompts`.
    """
    rows: Rows | TableRows
    if source.prompts is not None:
        rows = [_listed_row(row, source, f"{source.path}[{n}]", edits) for n, row in enumerate(source.prompts)]
        rows = rows[: source.limit]
    elif (kind := kind_of(source)) in _PARSERS:
        rows = _read_text(source, resolve_path(source.path), edits)
    elif isinstance(opened := _open_table(source, kind), list):
        rows = [row for file in opened for row in _read_text(source, file, edits)][: source.limit]
    else:
        rows = TableRows(source, opened, edits)
    if not len(rows):
        forms = {"txt": "a red circle", "jsonl": '{"prompt": "a red circle"}'}
        form = "" if source.prompts is not None else forms.get(kind_of(source), "")
        raise PromptError(f"{source.path} has no prompts.{form and f' Write one per line, such as: {form}'}")
    return rows


def prompt_errors(*given: object) -> list[str]:
    """Return why sources in a recipe's plain values cannot be opened; other values are skipped."""
    errors = []
    entries = [entry for value in given for entry in (value if isinstance(value, list) else [value])]
    for entry in entries:
        try:
            if isinstance(entry, str | dict):
                open_prompts(as_source(entry), edits=False)
        except (PromptError, OSError, ModuleNotFoundError) as error:
            errors.append(str(error))
        except (TypeError, ValueError):
            continue  # the parser reports it
    return errors


def text_of(row: Row) -> str:
    """Return the text that identifies a row: its prompt, and a hash of each picture that the prompt edits."""
    return "\n".join([row[PROMPT], *(file_sha256(Path(file)) for file in picture_files(row))])


# --- rows ------------------------------------------------------------------------------------------------------------


def _checked_row(row: Mapping[str, Any], source: PromptSource, where: str, edits: bool) -> Row:
    """Return a row of a source, ``where`` in it, as ``{"prompt": str, **fields}``; raise PromptError if it is wrong."""
    _check_column(row, source, where)
    fields = dict(row)
    prompt = _checked_prompt(fields.pop(source.column or PROMPT), source, where)
    fields = {PROMPT: prompt, **{key: value for key, value in fields.items() if key != PROMPT}}
    if not fields.get("rewards") and source.rewards is not None:
        fields["rewards"] = source.rewards
    if fields.get("teacher") is None:  # or null
        fields.pop("teacher", None)
        if source.teacher is not None:
            fields["teacher"] = source.teacher
    named = fields.get("rewards") or []
    if not isinstance(named, str | list) or not all(isinstance(one, str) for one in named):
        raise PromptError(f'{where}: "rewards" is {fields["rewards"]!r}. Write the names of rewards, such as ["ocr"].')
    if (picture := fields.pop(PICTURE, None)) is not None:
        try:
            files = [_picture_file(one, source, where) for one in (picture if isinstance(picture, list) else [picture])]
            fields[PICTURE] = files[0] if len(files) == 1 else files
        except PromptError:
            if edits:
                raise
            fields[PICTURE] = picture  # a field like any other
    return fields


def _listed_row(entry: object, source: PromptSource, where: str, edits: bool) -> Row:
    row = {source.column or PROMPT: entry} if isinstance(entry, str) else entry
    if not isinstance(row, Mapping):
        raise PromptError(f'{where}: not a row. Write "a cat" or {{"prompt": "a cat"}}.')
    return _checked_row(row, source, where, edits)


def _checked_prompt(value: object, source: PromptSource, where: str) -> str:
    """Return a cell as text; bytes are UTF-8. Zeros, as of UTF-16, and lone surrogates are not text."""
    with suppress(UnicodeError):
        text = value.decode() if isinstance(value, bytes) else value
        if isinstance(text, str) and text.strip() and b"\0" not in text.encode():
            return text
    raise PromptError(f'{where}: "{source.column or PROMPT}" is {shortened(repr(value), 60)}. A prompt must be text.')


def _check_column(columns: Collection[str], source: PromptSource, where: str) -> None:
    column = source.column or PROMPT
    if column not in columns:
        other = nearest(column, columns) or next(iter(columns), "")
        quoted = other if re.fullmatch(r"[\w.-]+", other) else json.dumps(other, ensure_ascii=False)
        form = f"'data.train={{path: {source.path}, column: {quoted}}}'"
        remedy = f" {suggestion(column, columns)} Set column= to the prompt column, such as {form}." if columns else ""
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


# --- text files ------------------------------------------------------------------------------------------------------


def _decoded(file: Path) -> str:
    """Return the text of a file; raise PromptError with the line if it is not UTF-8."""
    content = file.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = len(LINE_END.split(content[: error.start].decode("utf-8-sig")))
        raise PromptError(f"{file} line {line}: not UTF-8. Save the file as UTF-8.") from error


def _read_text(source: PromptSource, file: Path, edits: bool) -> Rows:
    text, kind = _decoded(file), _text_kind(file)
    rows, wrong = dict[int, Row](), dict[int, PromptError]()
    for number, record in islice(_PARSERS[kind](text, source, file), source.limit):
        try:
            if isinstance(record, PromptError):
                raise record
            rows[number] = _checked_row(record, source, f"{file} line {number}", edits)
        except PromptError as error:
            wrong[number] = error
    if wrong:
        first, *others = wrong.values()
        counted = f" In all, {len(wrong)} lines are wrong, the first: {', '.join(map(str, [*wrong][:3]))}."
        raise PromptError(f"{first}{counted if others else ''}") from first
    if kind == "txt" and (marked := [number for number, row in rows.items() if row[PROMPT].startswith("# ")]):
        what = f'{file} line {marked[0]} starts with "# " and is a prompt, since a .txt has no comments'
        warnings.warn(f"{what} (lines like it: {len(marked)}). Remove what is not a prompt.", stacklevel=2)
    return [*rows.values()]


def _txt_records(text: str, source: PromptSource, file: Path) -> Iterator[tuple[int, Row]]:
    # str.splitlines would also split at U+2028 and the like, which may occur inside a JSON string
    for number, line in enumerate(LINE_END.split(text), start=1):
        if line.strip():
            yield number, {PROMPT: line.strip()}


def _jsonl_records(text: str, source: PromptSource, file: Path) -> Iterator[tuple[int, Row | PromptError]]:
    for number, line in _txt_records(text, source, file):
        try:
            row = json.loads(line[PROMPT])
        except (ValueError, RecursionError) as error:
            why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            row = PromptError(f"{file} line {number}: not JSON ({why}).")
        if not isinstance(row, dict | PromptError):
            row = PromptError(f'{file} line {number}: not an object. Write lines such as {{"prompt": "a cat"}}.')
        yield number, row


def _csv_records(text: str, source: PromptSource, file: Path) -> Iterator[tuple[int, Row | PromptError]]:
    """Yield the rows of a csv file with the number of their last line; cells are text, and empty ones are left out."""
    reader = csv.DictReader(StringIO(text, newline=""), strict=True)
    try:
        names = reader.fieldnames or []
        if (source.column or PROMPT) not in names and len(names) == 1 and (mark := re.search("[;\t|]", names[0])):
            raise PromptError(f"{file} line 1: cells are separated by {mark[0]!r}. Save the file with commas.")
        _check_column(names, source, f"{file} line 1")
        if repeated := [name for number, name in enumerate(names) if name.strip() and name in names[:number]]:
            raise PromptError(f'{file} line 1: two columns are "{repeated[0]}". Rename or remove one.')
        for row in reader:
            if None in row or None in row.values():
                what = "more or fewer cells than the header. Quote cells with commas."
                yield reader.line_num, PromptError(f"{file} line {reader.line_num}: {what}")
            elif any(cell.strip() for cell in row.values()):
                filled = {name: cell for name, cell in row.items() if cell.strip()}
                yield reader.line_num, {source.column or PROMPT: "", **filled}
    except csv.Error as error:
        raise PromptError(f"{file} line {reader.line_num + 1}: not csv ({error}).") from error


_PARSERS = {"txt": _txt_records, "jsonl": _jsonl_records, "csv": _csv_records}


def _text_kind(file: Path) -> str:
    return file.suffix.lower().removeprefix(".")


# --- tables ----------------------------------------------------------------------------------------------------------


class TableRows:
    """Rows of a ``datasets.Dataset`` that stay on disk, read on access: those with some numbers ``(N,)``, or all.

    Raises:
        PromptError: The dataset lacks the prompt's column; on access: the row is invalid.
    """

    def __init__(self, source: PromptSource, table: Any, edits: bool, numbers: NDArray[np.int64] | None = None) -> None:
        _check_column(table.column_names, source, source.path)
        self.source, self.edits = source, edits
        # images and audio are not decoded
        media = [name for name, of in table.features.items() if hasattr(of, "decode_example") or "binary" in repr(of)]
        self.table = table.remove_columns([name for name in media if name != (source.column or PROMPT)])
        self.numbers = np.arange(len(table))[: source.limit] if numbers is None else numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Row:
        number = int(self.numbers[index])
        row, column = self.table[number], self.source.column or PROMPT
        return _checked_row({**_without_nulls(row), column: row[column]}, self.source, self._where(number), self.edits)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def select(self, indices: NDArray[np.int64]) -> TableRows:
        return TableRows(self.source, self.table, self.edits, self.numbers[indices])

    def texts(self) -> Iterator[str]:
        """Yield the rows' texts as in :func:`text_of`, without reading other columns if possible."""
        if PICTURE in self.table.column_names:
            yield from map(text_of, self)
            return
        column = self.source.column or PROMPT
        rows = self.table.select_columns([column]).select(self.numbers)
        for number, row in zip(self.numbers, rows, strict=True):
            yield _checked_prompt(row[column], self.source, self._where(number))

    def _where(self, number: int) -> str:
        return f"{self.source.path} row {number + 1}"


def _open_table(source: PromptSource, kind: Kind) -> Any:
    """Open a parquet file, a folder or a hub dataset as a ``datasets.Dataset``; errors as in :func:`read_prompts`.

    For a folder of text files, return those of the split: the library would make numbers and dates of their texts.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        message = f'{source.path} needs the datasets package. Run: pip install "lit-vgrpo[data]"'
        raise ModuleNotFoundError(message) from error
    datasets.disable_progress_bars()
    place, split = source.path if kind == "hub" else str(resolve_path(source.path)), source.split or "train"
    for name, value in {"split": source.split, "config": source.config}.items():
        if value and (Path(place) / TABLE_MARK).is_file():
            raise PromptError(f"{name}={value}: {source.path} is one table, written by save_to_disk. Leave out {name}.")
    try:
        if kind == "parquet":
            return datasets.load_dataset("parquet", data_files=place, split="train")
        if not any((Path(place) / name).is_file() for name in SAVED_MARKS):
            kinds = sorted({file.suffix for file in Path(place).glob("*") if file.suffix[1:] in FILE_KINDS})
            card = Path(place) / "README.md"
            is_listed = card.is_file() and LISTS_FILES.search(card.read_text(encoding="utf-8", errors="replace"))
            if len(kinds) > 1 and not is_listed:
                what = f"{source.path} has files of several kinds ({', '.join(kinds)}), of which only one is read"
                warnings.warn(f"{what}. Name the files instead of the folder.", stacklevel=2)
            if kind == "folder":
                splits = datasets.load_dataset_builder(place, source.config).config.data_files or {}
                files = [Path(file) for file in chain(*splits.values())]
                own = {file.name for file in Path(place).glob("[!.]*") if file.suffix in kinds[:1]}
                unread = sorted(filterfalse(NO_PROMPTS.fullmatch, own - {file.name for file in files}))
                if files and unread and len(kinds) == 1 and not is_listed:
                    what = f"{', '.join(unread)} of {source.path} {'is' if len(unread) == 1 else 'are'} in no split"
                    why = "since the names of other files or folders are those of splits"
                    warnings.warn(f"{what}, {why}. Name the files instead of the folder.", stacklevel=2)
                if files and all(_text_kind(file) in _PARSERS for file in files):
                    return [file for file in map(Path, _part(splits, split)) if not NO_PROMPTS.fullmatch(file.name)]
            return datasets.load_dataset(place, source.config, split=split)
        saved = datasets.load_from_disk(place)
        return _part(saved, split) if isinstance(saved, dict) else saved
    except Exception as error:  # the library raises anything on damaged files
        cause = error.__cause__ or error
        if unknown := UNKNOWN_SPLIT.match(str(cause)):
            known = re.findall(r"[\w.-]+", unknown[1])
            raise PromptError(f"{source.path} has no split {split}. {suggestion(split, known)}") from error
        raise PromptError(f"{source.path} cannot be read as a dataset ({one_line(repr(cause))[:200]}).") from error


def _part(splits: Mapping[Any, Any], split: str) -> Any:
    if split not in splits:
        raise ValueError(f"Unknown split {split}. Should be one of {[*map(str, splits)]}.")  # as datasets does
    return splits[split]


def _without_nulls(value: Any) -> Any:
    """Remove empty cells from a table's value, so that a row has only the fields it was written with."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
