"""Whether a checkpoint can be loaded, found out before loading it; and loading it without noise."""

from __future__ import annotations

import logging
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_vgrpo.system.paths import SHIPPED_PREFIX, resolve_path

HUB_TIMEOUT_S = 4.0
SILENCE_S = 60.0
"""How long a hub that did not answer is not asked again."""
_silent_since = -SILENCE_S
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


class LoadError(RuntimeError):
    """A checkpoint cannot be used, said in one line."""


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence diffusers and transformers below errors: they draw a bar a component and repeat every cut prompt."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    levels = [library.get_verbosity() for library in libraries]
    bars = [library.is_progress_bar_enabled() for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        # peft imports bitsandbytes where it is installed, which talks of kernels
        with only_errors_of("bitsandbytes"), warnings.catch_warnings():
            # torch_dtype was renamed to dtype between two releases that both are supported
            warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
            yield
    finally:
        for library, level, bar in zip(libraries, levels, bars, strict=True):
            library.set_verbosity(level)
            if bar:
                library.enable_progress_bar()


@contextmanager
def only_errors_of(*names: str) -> Iterator[None]:
    """Keep what these loggers say below errors to themselves."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def local_folder(checkpoint: str) -> Path | None:
    """Return the folder that a checkpoint names, or None where it is a hub name such as ``owner/name``.

    A name that is both is the folder, as in diffusers and transformers. A path that does not exist is returned too.

    Raises:
        ValueError: a ``shipped:`` path that leaves the installed folder.
    """
    path = resolve_path(checkpoint)
    looks_local = checkpoint.startswith((SHIPPED_PREFIX, "/", ".", "~")) or not _HUB_NAME.fullmatch(checkpoint)
    return path if looks_local or path.exists() else None


def source_of(checkpoint: str) -> str:
    """Return what ``from_pretrained`` is given for a checkpoint: its folder, or its hub name."""
    return str(local_folder(checkpoint) or checkpoint)


def cached_file(checkpoint: str, filename: str, revision: str | None = None) -> Path | None:
    """Return a hub repository's file in the hub's cache, or None where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(checkpoint, filename, revision=revision)
    return Path(found) if isinstance(found, str) else None


def file_at_hand(checkpoint: str, filename: str, revision: str | None = None) -> Path | None:
    """Return a checkpoint's file on this machine, in its folder or the hub's cache, or None; nothing is downloaded."""
    folder = local_folder(checkpoint)
    path = cached_file(checkpoint, filename, revision) if folder is None else folder / filename
    return path if path is not None and path.is_file() else None


def explain_unloadable(checkpoint: str, filename: str, what_to_set: str, revision: str | None = None) -> str | None:
    """Why a checkpoint cannot be loaded, in one line, or None where it can, as far as one file tells.

    Looks for ``filename`` in the local folder, else in the hub's cache, else asks the hub once, for at most about
    four seconds and not at all with ``HF_HUB_OFFLINE`` set.

    Args:
        checkpoint: a local folder, a ``shipped:`` path or a hub name ``owner/name``.
        filename: a file that every such checkpoint has, such as ``model_index.json``.
        what_to_set: the recipe's key of the checkpoint, for the message.
        revision: branch, tag or commit of a hub repository; ``None`` is its main branch.
    """
    try:
        folder = local_folder(checkpoint)
    except ValueError as error:
        return str(error)
    if folder is not None:
        if not folder.is_dir():
            return f"{folder} is not a folder. Set {what_to_set} to a folder that holds {filename}, or to a hub name."
        if not (folder / filename).is_file():
            return f"{folder} holds no {filename}. Set {what_to_set} to a folder that holds it, or to a hub name."
        return None
    if cached_file(checkpoint, filename, revision) is not None:
        return None
    return _ask_hub(checkpoint, filename, what_to_set, revision)


def _ask_hub(checkpoint: str, filename: str, what_to_set: str, revision: str | None) -> str | None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    which = f" --revision {revision}" if revision else ""
    remedy = f"Run: hf download {checkpoint}{which}, or set {what_to_set}=/a/local/folder."
    if constants.HF_HUB_OFFLINE:
        return f"Cannot load {checkpoint}: not in the local cache and HF_HUB_OFFLINE is set. {remedy}"

    address = hf_hub_url(checkpoint, filename, revision=revision)
    error = hub_error(lambda: get_hf_file_metadata(address, timeout=HUB_TIMEOUT_S))
    if error is None:
        return None
    if isinstance(error, GatedRepoError):
        return f"Cannot load {checkpoint}: access must be granted first. Run: hf auth login, then {_lower(remedy)}"
    if isinstance(error, RepositoryNotFoundError):
        return f"Cannot load {checkpoint}: no such repository. Set {what_to_set} to another name or a folder."
    if isinstance(error, RevisionNotFoundError):
        return f"Cannot load {checkpoint}: it has no revision {revision!r}. Use one of its branches, tags or commits."
    if isinstance(error, EntryNotFoundError):
        return f"Cannot load {checkpoint}: it holds no {filename}. Set {what_to_set} to another name or a folder."
    return f"Cannot load {checkpoint}: not in the local cache and the hub cannot be reached. {remedy}"


def hub_error(question: Callable[[], object]) -> Exception | None:
    """Return what a question to the hub raises, or None; ``TimeoutError`` where no answer comes in some four seconds.

    A recipe names several checkpoints: after one question without an answer the others are not asked.
    """
    global _silent_since
    if time.monotonic() < _silent_since + SILENCE_S:
        return TimeoutError()
    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            question()
            answers.append(None)
        except Exception as error:
            answers.append(error)

    # in a thread because the timeout does not cover a name server that never answers
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    if not answers:
        _silent_since = time.monotonic()
    return answers[0] if answers else TimeoutError()


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
