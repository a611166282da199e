"""Datasets of the Hugging Face hub and folders of data files, opened with the ``datasets`` library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_vgrpo.data.source import Kind, PromptError, PromptSource
from lit_vgrpo.errors import one_line
from lit_vgrpo.system.hub import HUB_TIMEOUT_S, hub_error
from lit_vgrpo.system.paths import resolve_path

LONGEST_REASON = 200
SAVED_MARKS = ("dataset_dict.json", "state.json")
"""Files of which a folder written by ``save_to_disk`` has one."""
_SHARD = re.compile(r"(.*)-(\d+)-of-(\d+)(\.\w+)+")


def open_table(source: PromptSource, kind: Kind, streaming: bool = False) -> Any:
    """Open a parquet file, a folder or a hub dataset as a ``datasets.Dataset`` that stays on disk.

    Args:
        source: what to open.
        kind: what it is.
        streaming: return an ``IterableDataset``, without copying or downloading first; not for folders written by
            ``save_to_disk``, which need no copy.

    Raises:
        PromptError: it cannot be read, or the hub cannot be reached and it is not in the local cache.
        ModuleNotFoundError: the ``datasets`` package is missing.
    """
    datasets = _library(source)
    place = _hub_place(source) if kind == "hub" else str(resolve_path(source.path))
    with _readable(source), _quiet(datasets):
        if kind == "parquet":
            found = datasets.load_dataset("parquet", data_files=place, split="train", streaming=streaming)
        elif is_saved(Path(place)):
            found = datasets.load_from_disk(place)
        else:
            found = datasets.load_dataset(place, source.config, split=source.split, streaming=streaming)
    return _one_split(found, source)


def is_saved(folder: Path) -> bool:
    """Return whether ``save_to_disk`` wrote the folder."""
    return any((folder / name).is_file() for name in SAVED_MARKS)


def _library(source: PromptSource) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{source.path} needs the datasets package. Run: pip install "lit-vgrpo[data]"'
        ) from error
    return datasets


def _one_split(found: Any, source: PromptSource) -> Any:
    if not isinstance(found, dict):  # both kinds of DatasetDict are dicts
        return found
    wanted = source.split or (next(iter(found)) if len(found) == 1 else "train")
    if wanted not in found:
        raise PromptError(f"{source.path} has no split {wanted}, but {', '.join(found)}. Set split= to one of them.")
    return found[wanted]


def _hub_place(source: PromptSource) -> str:
    """Return the hub name if the hub can be reached, else the folder of an earlier ``hf download``."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    name = source.path
    download = f"hf download {name} --repo-type dataset"
    remedy = f"Run: {download}, or give a local folder."
    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        error = hub_error(lambda: HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S))
        if error is None:
            return name
        if isinstance(error, GatedRepoError):
            raise PromptError(f"Cannot load {name}: access must be granted first. Run: hf auth login, then {download}.")
        if isinstance(error, RepositoryNotFoundError):
            raise PromptError(f"Cannot load {name}: no such file or folder here, and no such dataset on the hub.")
        why = "the hub cannot be reached"
    try:
        folder = Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise PromptError(f"Cannot load {name}: not in the local cache and {why}. {remedy}") from error
    missing = _missing_shard(folder)
    if missing is not None:
        raise PromptError(f"Cannot load {name}: its copy in the local cache lacks {missing}, and {why}. {remedy}")
    return str(folder)


def _missing_shard(folder: Path) -> str | None:
    """Return a file missing from an incomplete download, inferred from the other files' names."""
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    for file in sorted(files):
        match = _SHARD.fullmatch(file)
        if match is None:
            continue
        head, number, total, tail = match.groups()
        for shard in range(int(total)):
            wanted = f"{head}-{shard:0{len(number)}}-of-{total}{tail}"
            if wanted not in files:
                return wanted
    return None


@contextmanager
def _readable(source: PromptSource) -> Iterator[None]:
    """Convert the library's errors to one line."""
    try:
        yield
    except MemoryError:
        raise
    except FileNotFoundError as error:
        what = "has no data files. Put .jsonl, .csv or .parquet files into it"
        raise PromptError(f"{source.path} {what}, or check config= and split=.") from error
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = one_line(cause)[:LONGEST_REASON].rstrip(".") or type(cause).__name__
        raise PromptError(
            f"{source.path} cannot be read as a dataset ({reason}). Check the files, split= and config=."
        ) from error


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Silence progress bars and hints."""
    level, silent = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not silent:
            datasets.enable_progress_bars()
