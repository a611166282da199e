"""Checks of whether a checkpoint can be loaded, and quiet loading."""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_vgrpo.errors import one_line
from lit_vgrpo.system.paths import SHIPPED_PREFIX, resolve_path

HUB_TIMEOUT_S = 4.0
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


class LoadError(RuntimeError):
    """A checkpoint cannot be used; the message is one line."""


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence diffusers and transformers below errors, including progress bars and truncation warnings."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    bars = [library.is_progress_bar_enabled() for library in libraries]
    for library in libraries:
        library.disable_progress_bar()
    try:
        # peft imports bitsandbytes if installed, which logs messages about kernels
        with only_errors_of("diffusers", "transformers", "bitsandbytes"), warnings.catch_warnings():
            # torch_dtype was renamed to dtype between two supported releases
            warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
            yield
    finally:
        for library, bar in zip(libraries, bars, strict=True):
            if bar:
                library.enable_progress_bar()


@contextmanager
def only_errors_of(*names: str) -> Iterator[None]:
    """Silence these loggers below errors."""
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def loading(checkpoint: str, remedy: str) -> Iterator[None]:
    """Turn any error of a library in loading a checkpoint into one line.

    Raises:
        LoadError: with the library's message, shortened, and the remedy.
    """
    try:
        yield
    except LoadError:
        raise
    except Exception as error:  # libraries may raise anything on other files
        reason = one_line(str(error).strip().split("\n")[0]).rstrip(".:") or type(error).__name__
        raise LoadError(f"Cannot load {checkpoint}: {reason}. {remedy}") from error


def local_folder(checkpoint: str) -> Path | None:
    """Return the folder that a checkpoint names, or None for a hub name such as ``owner/name``.

    A name that is both means the folder, as in diffusers and transformers. A path need not exist.

    Raises:
        ValueError: a ``shipped:`` path that leaves the installed folder.
    """
    path = resolve_path(checkpoint)
    looks_local = checkpoint.startswith((SHIPPED_PREFIX, "/", ".", "~")) or not _HUB_NAME.fullmatch(checkpoint)
    return path if looks_local or path.exists() else None


def source_of(checkpoint: str) -> str:
    """Return the argument of ``from_pretrained`` for a checkpoint: its folder, or its hub name."""
    return str(local_folder(checkpoint) or checkpoint)


def cached_file(checkpoint: str, filename: str, revision: str | None = None) -> Path | None:
    """Return a hub repository's file in the hub's cache, or None."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(checkpoint, filename, revision=revision)
    return Path(found) if isinstance(found, str) else None


def file_at_hand(checkpoint: str, filename: str, revision: str | None = None) -> Path | None:
    """Return a checkpoint's file on this machine, in its folder or the hub's cache, or None; nothing is downloaded."""
    folder = local_folder(checkpoint)
    path = cached_file(checkpoint, filename, revision) if folder is None else folder / filename
    return path if path is not None and path.is_file() else None


def explain_unloadable(checkpoint: str, filename: str, what_to_set: str, revision: str | None = None) -> str | None:
    """Return why a checkpoint cannot be loaded, in one line, or None, judged by one of its files.

    Looks for ``filename`` in the local folder, then in the hub's cache, then asks the hub once, for at most about four
    seconds, unless ``HF_HUB_OFFLINE`` is set.

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
            return f"{folder} is not a folder. Set {what_to_set} to a folder with {filename}, or to a hub name."
        if not (folder / filename).is_file():
            return f"{folder} has no {filename}. Set {what_to_set} to a folder that has it, or to a hub name."
        return None
    if cached_file(checkpoint, filename, revision) is not None:
        return None
    return _ask_hub(checkpoint, filename, what_to_set, revision)


def _ask_hub(checkpoint: str, filename: str, what_to_set: str, revision: str | None) -> str | None:
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url

    which = f" --revision {revision}" if revision else ""
    remedy = f"Run: hf download {checkpoint}{which}, or set {what_to_set}=/a/local/folder."
    if constants.HF_HUB_OFFLINE:
        return f"Cannot load {checkpoint}: not in the local cache and HF_HUB_OFFLINE is set. {remedy}"
    address = hf_hub_url(checkpoint, filename, revision=revision)
    error = hub_error(lambda: get_hf_file_metadata(address, timeout=HUB_TIMEOUT_S))
    if error is None:
        return None
    reasons: dict[type[Exception], str] = {  # the first is a subclass of the second
        errors.GatedRepoError: "access must be granted first. Run: hf auth login.",
        errors.RepositoryNotFoundError: "no such repository.",
        errors.RevisionNotFoundError: f"it has no revision {revision!r}.",
        errors.EntryNotFoundError: f"it has no {filename}.",
    }
    unreachable = "not in the local cache and the hub cannot be reached."
    reason = next((reason for kind, reason in reasons.items() if isinstance(error, kind)), unreachable)
    return f"Cannot load {checkpoint}: {reason} {remedy}"


def hub_error(question: Callable[[], object]) -> Exception | None:
    """Return the exception of a request to the hub, or None; ``TimeoutError`` if no answer comes within about 4 s."""
    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            question()
            answers.append(None)
        except Exception as error:
            answers.append(error)

    # in a thread, because the timeout does not cover DNS lookups
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    return answers[0] if answers else TimeoutError()
