"""Checkpoints in folders and on the hub: checks and quiet loading."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lit_vgrpo.errors import one_line
from lit_vgrpo.system.paths import SHIPPED_PREFIX, resolve_path

HUB_TIMEOUT_S = 4.0
NOT_OF_THE_MODEL = (
    "_name_or_path", "_commit_hash", "transformers_version", "_diffusers_version", "dtype", "torch_dtype"
)  # fmt: skip
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


class LoadError(RuntimeError):
    """A checkpoint cannot be used; the message is one line."""


@contextmanager
def quiet_libraries(shows_bars: bool = False) -> Iterator[None]:
    """Silence diffusers, transformers and the hub below errors, and their progress bars unless ``shows_bars``."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    with ExitStack() as stack, warnings.catch_warnings():
        for library in (diffusers_logging, transformers_logging):
            if library.is_progress_bar_enabled() and not shows_bars:
                library.disable_progress_bar()
                stack.callback(library.enable_progress_bar)
        # peft imports bitsandbytes if installed, which logs messages about kernels
        for logger in map(logging.getLogger, ("diffusers", "transformers", "huggingface_hub", "bitsandbytes")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        # torch_dtype was renamed to dtype between two supported releases
        warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)
        yield


@contextmanager
def loading(checkpoint: str, remedy: str) -> Iterator[None]:
    """Turn any error of a library in loading a checkpoint into one line.

    Raises:
        LoadError: The block failed; the message is the library's, shortened, with the remedy.
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
        ValueError: A ``shipped:`` path leaves the installed folder.
    """
    path = resolve_path(checkpoint)
    looks_local = checkpoint.startswith((SHIPPED_PREFIX, "/", ".", "~")) or not _HUB_NAME.fullmatch(checkpoint)
    return path if looks_local or path.exists() else None


def source_of(checkpoint: str) -> str:
    """Return the argument of ``from_pretrained`` for a checkpoint: its folder, or its hub name."""
    return str(local_folder(checkpoint) or checkpoint)


def base_name(checkpoint: str) -> str:
    """Return a checkpoint's public name: its hub name, or the last part of its folder's path."""
    return checkpoint if local_folder(checkpoint) is None else Path(source_of(checkpoint)).name


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

    Looks for ``filename`` in the local folder, then in the hub's cache, then asks the hub once, unless
    ``HF_HUB_OFFLINE`` is set.

    Args:
        checkpoint: A local folder, a ``shipped:`` path or a hub name ``owner/name``.
        filename: A file that every such checkpoint has, such as ``model_index.json``.
        what_to_set: The recipe's key of the checkpoint, for the message.
        revision: Branch, tag or commit of a hub repository; ``None`` is its main branch.
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
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    reason = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_hf_file_metadata(hf_hub_url(checkpoint, filename, revision=revision), timeout=HUB_TIMEOUT_S)
        except Exception as error:  # any error of the network too
            reason = f"asking the hub for {filename} ended with {type(error).__name__}"
        else:
            return None
    which = f" --revision {revision}" if revision else ""
    remedy = f"Run: hf download {checkpoint}{which}, or set {what_to_set}=/a/local/folder."
    return f"Cannot load {checkpoint}: not in the local cache and {reason}. {remedy}"


def of_the_model(config: Any) -> Any:
    """Return a configuration without entries about the model's origin, or its dtype, which its parameters show."""
    if not isinstance(config, dict):
        return config
    return {key: of_the_model(value) for key, value in config.items() if key not in NOT_OF_THE_MODEL}
