"""What was read as training prompts, as one short text."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import islice

from lit_vgrpo.data.prompt_sets import ChosenRows, Opened, PromptSets, checked_rows
from lit_vgrpo.data.tables import StreamedRows
from lit_vgrpo.data.text_files import IndexedRows
from lit_vgrpo.file_fingerprint import file_sha256


def prompts_fingerprint(sets: PromptSets) -> str:
    """The same for the same training prompts in the same order, wherever their files lie: 64 hexadecimal digits.

    Every row counts with its fields. A text file that stays on disk counts byte by byte, which takes a second for each
    1 to 2 GB; of datasets, their length and the rows that are looked at before a run.
    """
    digest = sha256()
    for _, rows in sets.sources():
        digest.update(_of_rows(rows).encode())
    return digest.hexdigest()


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
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()
