"""Text prompt files (txt, jsonl, csv), read into memory, or row by row if they are too large."""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lit_vgrpo.data.rows import Row, Rows, RowSequence, check_columns, checked, type_name
from lit_vgrpo.data.source import Kind, PromptError, PromptSource
from lit_vgrpo.system.paths import resolve_path

LONGEST_CELL = 2**24
"""Maximum bytes of a csv cell; without a closing quote it would otherwise extend over the rest of the file."""
Parse = Callable[[Any, str], Row]
"""A record (a line or a csv row's cells) and its location -> its row."""


def read_text(source: PromptSource, kind: Kind) -> Rows:
    """Read all rows of a file.

    Raises:
        PromptError: as in :func:`lit_vgrpo.data.prompts.read_prompts`.
    """
    file = resolve_path(source.path)
    with _opened(file) as stream:
        records = _Records(stream, file, source, kind)
        rows = [records.row(record, number) for number, _, record in islice(records, source.limit)]
    if not rows:
        raise _empty(file)
    return rows


class IndexedRows(RowSequence):
    """The rows of a text file that stays on disk: 8 bytes of memory per row.

    The constructor reads the file once to index its rows, which are validated on access.

    Raises:
        PromptError: the file is empty or cannot be read; on access: the row is invalid.
    """

    def __init__(self, source: PromptSource, kind: Kind) -> None:
        self.source, self.kind = source, kind
        self.file = resolve_path(source.path)
        with _opened(self.file) as stream:
            records = _Records(stream, self.file, source, kind)
            self.header = records.header
            offsets = array("q", (offset for _, offset, _ in islice(records, source.limit)))
        if not offsets:
            raise _empty(self.file)
        self.offsets = np.frombuffer(offsets, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.offsets)

    def row(self, number: int) -> Row:
        offset = int(self.offsets[number])
        try:
            return self._read(offset, 0)
        except PromptError:
            return self._read(offset, self._lines_before(offset))  # line numbers are only for messages

    def __iter__(self) -> Iterator[Row]:
        with _opened(self.file) as stream:
            records = _Records(stream, self.file, self.source, self.kind)
            for number, _, record in islice(records, self.source.limit):
                yield records.row(record, number)

    def _read(self, offset: int, lines_before: int) -> Row:
        with _opened(self.file) as stream:
            stream.seek(offset)
            records = _Records(stream, self.file, self.source, self.kind, self.header)
            records.number = lines_before
            for number, _, record in records:
                return records.row(record, number)
        raise PromptError(f"{self.file} has become shorter since it was opened. Start again.")

    def _lines_before(self, offset: int) -> int:
        lines, block = 0, 2**20
        with _opened(self.file) as stream:
            for start in range(0, offset, block):
                lines += stream.read(min(block, offset - start)).count(b"\n")
        return lines


class _Records:
    """Iterator over ``(line number, offset, record)`` of non-blank rows, from the stream's position on.

    Args:
        stream: the file's bytes.
        file: its name, for messages.
        source: its options.
        kind: its format.
        header: columns of a csv if the stream is past its first line; None to read them.
    """

    def __init__(
        self, stream: BinaryIO, file: Path, source: PromptSource, kind: Kind, header: list[str] | None = None
    ) -> None:
        self.stream, self.file, self.source, self.kind = stream, file, source, kind
        self.number = 0  # of the line read last
        self.offset = stream.tell()  # of the next line
        self.header = header
        self.reader = csv.reader(self._lines(), strict=True)
        if kind == "csv" and header is None:
            self.header = self._read_header()

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        if self.kind == "csv":
            yield from self._cells()
            return
        start = self.offset
        for line in self._lines():
            if line.strip():
                yield self.number, start, line.strip()
            start = self.offset

    def row(self, record: Any, number: int) -> Row:
        where = f"{self.file} line {number}"
        if self.kind == "csv":
            return self._csv_row(record, where)
        return (
            _json_row(record, self.source, where)
            if self.kind == "jsonl"
            else checked({"prompt": record}, self.source, where)
        )

    def _lines(self) -> Iterator[str]:
        # str.splitlines would also split at U+2028 and the like, which may occur inside a JSON string
        for line in self.stream:
            self.number += 1
            begins, self.offset = self.offset == 0, self.offset + len(line)
            try:
                yield line.decode("utf-8-sig" if begins else "utf-8")
            except UnicodeDecodeError as error:
                message = f"{self.file} line {self.number}: not UTF-8. Save the file as UTF-8."
                raise PromptError(message) from error

    def _cells(self) -> Iterator[tuple[int, int, list[str]]]:
        while True:
            first, start = self.number + 1, self.offset
            before = csv.field_size_limit(LONGEST_CELL)
            try:
                cells = next(self.reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise PromptError(f"{self.file} line {first}: not csv ({error}).") from error
            finally:
                csv.field_size_limit(before)
            if any(cell.strip() for cell in cells):
                yield first, start, cells

    def _read_header(self) -> list[str]:
        found = next(self._cells(), None)
        if found is None:
            raise _empty(self.file)
        number, _, cells = found
        names = [cell.strip() for cell in cells]
        where = f"{self.file} line {number}"
        check_columns(names, self.source, where)
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise PromptError(f'{where}: two columns are called "{twice}". Rename one.')
        return names

    def _csv_row(self, cells: list[str], where: str) -> Row:
        assert self.header is not None
        if len(cells) != len(self.header):
            need = f"{len(cells)} cells where the header has {len(self.header)}"
            raise PromptError(f"{where}: {need}. Put a cell with a comma in quotes.")
        filled = {name: cell for name, cell in zip(self.header, cells, strict=True) if cell.strip()}
        column = self.source.column or "prompt"
        return checked({column: "", **filled}, self.source, where)


def _json_row(line: str, source: PromptSource, where: str) -> Row:
    need = f'Each line must be an object with a "{source.column or "prompt"}" string.'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # a plain ValueError: a number with thousands of digits
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise PromptError(f"{where}: not JSON ({reason}). {need}") from error
    if not isinstance(row, dict):
        raise PromptError(f"{where}: not an object but {type_name(row)}. {need}")
    return checked(row, source, where, need)


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        stream = file.open("rb")
    except OSError as error:
        raise PromptError(f"{file} cannot be read ({error.strerror}). Check its permissions.") from error
    with stream:
        yield stream


def _empty(file: Path) -> PromptError:
    return PromptError(f"{file} has no prompts. Write one prompt per line.")
