"""A benchmark's prompts: downloaded once into the hub's cache, verified, and read into rows."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.data.benchmark import Benchmark
from lit_vgrpo.data.prompts import PROMPT, Rows
from lit_vgrpo.errors import UserError, one_line
from lit_vgrpo.rewards import Connection
from lit_vgrpo.system.paths import file_sha256, new_file
from lit_vgrpo.system.process import bar

TASK = "benchmark_task"
"""Field of a row with its task; "all" for a benchmark without tasks."""
TIMEOUT_S = 30.0


def cache_folder(benchmark: Benchmark) -> Path:
    """Return the folder of a benchmark's files in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / "lit_vgrpo" / benchmark.name / benchmark.prompts.revision[:12]


def read_rows(benchmark: Benchmark, given: Path | None = None, pictures: Path | None = None) -> Rows:
    """Return a benchmark's rows, each with its task, at most ``limit`` of them; raise UserError for wrong files.

    ``given`` is a local copy of the prompt file, or a folder of several, and ``pictures`` the folder of those to edit.
    """
    prompts, rows = benchmark.prompts, []
    for name, file in _files(benchmark, given).items():
        for number, fields in enumerate(_records(file), start=1):
            if not isinstance(text := fields.get(prompts.prompt), str):
                raise UserError(f'{file} row {number} has no prompt in its field "{prompts.prompt}".')
            task = Path(name).stem if prompts.task == "file" else fields.get(prompts.task or "", "all")
            rows.append({**fields, PROMPT: text, TASK: str(task)})
    if prompts.distinct:
        rows = list({row[PROMPT]: row for row in reversed(rows)}.values())[::-1]
    rows = in_turn(rows)[: benchmark.limit] if benchmark.limit else rows
    return _with_pictures(rows, benchmark, pictures) if prompts.picture else rows


def in_turn(rows: Rows) -> Rows:
    """Return rows ordered so that the tasks take turns.

    >>> [row["n"] for row in in_turn([{TASK: "a", "n": 1}, {TASK: "a", "n": 2}, {TASK: "b", "n": 3}])]
    [1, 3, 2]
    """
    task_rows: dict[str, Rows] = {}
    for row in rows:
        task_rows.setdefault(row[TASK], []).append(row)
    return [row for row in chain.from_iterable(zip_longest(*task_rows.values())) if row is not None]


def _files(benchmark: Benchmark, given: Path | None) -> dict[str, Path]:
    """Return the benchmark's verified files by name, after downloading those missing from the cache."""
    prompts, files = benchmark.prompts, {}
    for name, wanted in prompts.files.items():
        file = cache_folder(benchmark) / name if given is None else given / name if given.is_dir() else given
        if given is None and not file.is_file():
            _download(f"{prompts.address}{name}", file, benchmark)
        if not file.is_file():
            raise UserError(f"--prompts {given} has no file {name}. {_advice(benchmark)}")
        if wanted is not None and (digest := file_sha256(file)) != wanted:
            size = file.stat().st_size
            if given is None:
                file.unlink()
            raise UserError(
                f"{file} is not the file of {benchmark.name}: it has {size} bytes and the SHA-256 "
                f"{digest[:12]}..., not {wanted[:12]}...; it was truncated or changed. {_advice(benchmark)}"
            )
        files[name] = file
    return files


def _download(url: str, file: Path, benchmark: Benchmark) -> None:
    """Download a file with a progress bar, atomically; raise UserError if that fails."""
    import httpx
    from huggingface_hub import constants

    try:
        if constants.HF_HUB_OFFLINE:
            raise httpx.ConnectError("HF_HUB_OFFLINE is set")
        file.parent.mkdir(parents=True, exist_ok=True)
        options = {"follow_redirects": True, "timeout": TIMEOUT_S, **Connection().client_options(url, str)}
        with httpx.stream("GET", url, **options) as answer, new_file(file) as draft:
            answer.raise_for_status()
            size = int(answer.headers.get("content-length", 0)) or None
            with bar(f"Downloading {file.name}", total=size, unit_scale=True) as received:
                for block in answer.iter_bytes():
                    draft.write(block)
                    received.update(len(block))
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise UserError(f"Cannot download {url}: {one_line(error).rstrip('.')}. {_advice(benchmark)}") from error


def _advice(benchmark: Benchmark) -> str:
    names, several = ",".join(benchmark.prompts.files), len(benchmark.prompts.files) > 1
    names = f"{{{names}}}" if several else names
    command = f"curl -fL --create-dirs --output-dir FOLDER -O '{benchmark.prompts.address}{names}'"
    return f"With a network, run: {command}; add --prompts FOLDER{'' if several else f'/{names}'}"


def _records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the fields of each row of a .txt, .jsonl, .tsv or .json file; lines of text become the field ``prompt``."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".tsv":
            yield from csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
            return
        lines = [line for line in text.split("\n") if line.strip()]
        if file.suffix == ".json":
            content = json.loads(text)
            content = list(content.values()) if isinstance(content, dict) else content
        else:
            content = [json.loads(line) for line in lines] if file.suffix == ".jsonl" else lines
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{file} cannot be read: {one_line(error)}.") from error
    for one in content:
        yield one if isinstance(one, dict) else {PROMPT: str(one).strip()}


def _with_pictures(rows: Rows, benchmark: Benchmark, folder: Path | None) -> Rows:
    """Return rows with pictures of the images' size: resized to cover it, and cropped around the centre."""
    prompts = benchmark.prompts
    if folder is None:
        raise UserError(f"{benchmark.name} edits pictures. {prompts.get_pictures}; then add --pictures FOLDER.")
    if benchmark.height is None or benchmark.width is None:
        raise UserError(f"{benchmark.name} resizes pictures. Set height=1024 width=1024, or another size.")
    size, complete = (benchmark.width, benchmark.height), []
    for row in rows:
        source = folder / str(row[str(prompts.picture)])
        try:
            key = f"{source.resolve()} {source.stat().st_mtime_ns} {size}"
            target = cache_folder(benchmark) / f"pictures/{sha256(key.encode()).hexdigest()[:24]}.png"
            if not target.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                with Image.open(source) as picture, new_file(target) as file:
                    fitted = ImageOps.fit(ImageOps.exif_transpose(picture).convert("RGB"), size)
                    fitted.save(file, format="PNG")
        except (OSError, UnidentifiedImageError) as error:
            why = "does not exist" if not source.exists() else f"cannot be read ({one_line(error)})"
            raise UserError(f"{source} {why}. {prompts.get_pictures}; then add --pictures FOLDER.") from error
        complete.append(dict[str, Any](row) | {PICTURE: str(target)})
    return complete
