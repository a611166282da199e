"""Prompt files: one prompt a line (txt), or one object a line (jsonl)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_vgrpo.paths import resolve_path


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """Read a prompt file into rows ``{"prompt": str, **fields}``.

    Args:
        path: a ``.txt`` file with one prompt a line, or a ``.jsonl`` file with one object a line that has a "prompt"
            string and any fields a reward may read; UTF-8; blank lines are skipped; ``shipped:`` paths are resolved.

    Raises:
        ValueError: the file is missing, of another kind, not UTF-8, empty, or a line of it is wrong. The message is
            one line and names the file and the line number.
    """
    file = resolve_path(path)
    if file.suffix.lower() not in (".txt", ".jsonl"):
        raise ValueError(f"{file} is not a prompt file. Use .txt (one prompt a line) or .jsonl (one object a line).")
    if not file.exists():
        raise ValueError(f"{file} does not exist. Give the path of a .txt or .jsonl prompt file.")
    if not file.is_file():
        raise ValueError(f"{file} is not a file. Give the path of a .txt or .jsonl prompt file.")
    as_row = _json_row if file.suffix.lower() == ".jsonl" else _text_row
    rows = [as_row(line, f"{file} line {number}") for number, line in _lines(file)]
    if not rows:
        raise ValueError(f"{file} holds no prompts. Write one prompt a line.")
    return rows


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}). Check its permissions.") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{file} line {number}: not UTF-8. Save the file as UTF-8.") from error
    # str.splitlines would also cut at U+2028 and its like, which may stand inside a JSON string
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _text_row(line: str, where: str) -> dict[str, Any]:
    return {"prompt": line}


def _json_row(line: str, where: str) -> dict[str, Any]:
    need = 'Each line must be an object with a "prompt" string.'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError alone: a number of thousands of digits
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise ValueError(f"{where}: not JSON ({reason}). {need}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: not an object but {_json_type(row)}. {need}")
    if "prompt" not in row:
        raise ValueError(f'{where}: no "prompt". {need}')
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        raise ValueError(f'{where}: "prompt" is {_json_type(prompt)}. {need}')
    if not prompt.strip():
        raise ValueError(f'{where}: "prompt" is empty. {need}')
    if not _is_text(prompt):
        raise ValueError(f'{where}: "prompt" holds half a character (a lone surrogate). {need}')
    return row


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_type(value: object) -> str:
    names = {list: "an array", dict: "an object", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
