"""Prompts in tables: parquet files read into memory, and datasets on disk or streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.data.hub_datasets import open_table
from lit_vgrpo.data.rows import PROMPT, Row, Rows, RowSequence, check_columns, checked, prompt_error, without_nulls
from lit_vgrpo.data.source import Kind, PromptError, PromptSource
from lit_vgrpo.errors import one_line
from lit_vgrpo.system.paths import resolve_path

BATCH = 1000
SHUFFLE_BUFFER = 10_000
"""Size of the shuffle buffer of a stream."""
PLAIN_FEATURES = ("Value", "ClassLabel", "List", "LargeList", "Sequence", "Json", "dict", "list")


def read_parquet(source: PromptSource) -> Rows:
    """Read all rows of a parquet file, without columns of bytes.

    Raises:
        PromptError: as in :func:`lit_vgrpo.data.prompts.read_prompts`.
        ModuleNotFoundError: pyarrow is missing.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'{source.path} needs pyarrow. Run: pip install "lit-vgrpo[data]"') from error
    file = resolve_path(source.path)
    try:
        opened = parquet.ParquetFile(file)
        columns = [field.name for field in opened.schema_arrow if "binary" not in str(field.type)]
        check_columns(columns, source, str(file))
        batches = opened.iter_batches(BATCH, columns=columns)
        cells = list(islice((cell for batch in batches for cell in batch.to_pylist()), source.limit))
    except (pa.ArrowException, OSError) as error:
        reason = one_line(error).rstrip(".")
        raise PromptError(f"{file} cannot be read as parquet ({reason}). Is the file complete?") from error
    if not cells:
        raise PromptError(f"{file} has no rows.")
    return [_table_row(row, source, f"{file} row {number}") for number, row in enumerate(cells, start=1)]


class TableRows(RowSequence):
    """The rows of a dataset that stays on disk, validated on access.

    Raises:
        PromptError: the dataset cannot be read, is empty or lacks the column; on access: the row is invalid.
        ModuleNotFoundError: the ``datasets`` package is missing.
    """

    def __init__(self, source: PromptSource, kind: Kind) -> None:
        self.source = source
        table = open_table(source, kind)
        check_columns(table.column_names, source, source.path)
        if not len(table):
            raise PromptError(f"{source.path} has no rows.")
        table = table.select_columns(_plain_columns(table, source))
        self.table = table if source.limit is None else table.select(range(min(source.limit, len(table))))

    def __len__(self) -> int:
        return len(self.table)

    def row(self, number: int) -> Row:
        return _table_row(self.table[number], self.source, self._where(number))

    @property
    def has_pictures(self) -> bool:
        return PICTURE in self.table.column_names

    def prompts(self) -> Iterator[str]:
        """Yield every prompt, without other fields."""
        column = self.source.column or PROMPT
        number = 0
        for batch in self.table.select_columns([column]).iter(BATCH):
            for prompt in batch[column]:
                error = prompt_error(prompt)
                if error is not None:
                    raise PromptError(f'{self._where(number)}: "{column}" {error}.')
                yield prompt
                number += 1

    def _where(self, index: int) -> str:
        return f"{self.source.path} row {index + 1}"


class StreamedRows:
    """The training rows of a sequentially read dataset: an endless sequence of shuffled passes.

    Going back restarts from the beginning and skips. ``datasets`` shuffles with a buffer of 10,000 rows.

    Args:
        source: what to open.
        kind: what it is.
        seed: seed of the order.

    Raises:
        PromptError: the dataset cannot be read or lacks the column; on access: the row is invalid.
        ModuleNotFoundError: the ``datasets`` package is missing.
    """

    def __init__(self, source: PromptSource, kind: Kind, seed: int = 0) -> None:
        self.source, self.seed = source, seed
        self._skips: Callable[[Row], bool] = lambda row: False
        table = open_table(source, kind, streaming=True)
        if table.column_names is not None:
            check_columns(table.column_names, source, source.path)
            table = table.select_columns(_plain_columns(table, source))
        self.table = table if source.limit is None else table.take(source.limit)
        self._passes: Iterator[Row] | None = None
        self._position = -1
        self._row: Row = {}

    def skip(self, is_skipped: Callable[[Row], bool]) -> None:
        """Leave these rows out of the passes."""
        self._skips = is_skipped

    def __iter__(self) -> Iterator[Row]:
        """Yield all rows once, in the dataset's order."""
        return self._rows(self.table)

    def at(self, position: int) -> Row:
        """Return the row at a position of the endless sequence of passes."""
        if position < self._position or self._passes is None:
            self._passes, self._position = self._endless(), -1
        while self._position < position:
            self._row = next(self._passes)
            self._position += 1
        return self._row

    def _endless(self) -> Iterator[Row]:
        table = self.table.shuffle(seed=self.seed, buffer_size=SHUFFLE_BUFFER)
        number_of_pass = 0
        while True:
            table.set_epoch(number_of_pass)
            is_empty = True
            for row in self._rows(table):
                if not self._skips(row):
                    is_empty = False
                    yield row
            if is_empty:
                raise PromptError(f"{self.source.path} has no training prompts.")
            number_of_pass += 1

    def _rows(self, table: Any) -> Iterator[Row]:
        for number, row in enumerate(table, start=1):
            yield _table_row(row, self.source, f"{self.source.path} row {number} of the stream")


def _table_row(row: Any, source: PromptSource, where: str) -> Row:
    column = source.column or PROMPT
    return checked({**without_nulls(row), column: row.get(column)}, source, where)


def _plain_columns(table: Any, source: PromptSource) -> list[str]:
    """Return the columns that are not images, audio or bytes."""
    features = table.features
    if features is None:
        return list(table.column_names)

    def is_plain(feature: Any) -> bool:
        return type(feature).__name__ in PLAIN_FEATURES and "binary" not in str(getattr(feature, "dtype", ""))

    return [name for name in table.column_names if name == (source.column or PROMPT) or is_plain(features[name])]
