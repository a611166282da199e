"""Single-file weights of reward models; only tensors are unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lit_vgrpo.system.hub import LoadError, explain_unloadable, loading, local_folder
from lit_vgrpo.system.paths import resolve_path

SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".safetensors"})


def file_error(checkpoint: str, filename: str, what_to_set: str) -> str | None:
    """Return why a file of weights is not available, in one line, or None.

    Args:
        checkpoint: the file itself, a local folder with ``filename``, or a hub name.
        filename: the file's published name.
        what_to_set: the recipe's key of the checkpoint, for the message.
    """
    path = _as_file(checkpoint)
    if path is None:
        return explain_unloadable(checkpoint, filename, what_to_set)
    if not path.is_file():
        return f"{path} is not a file. Set {what_to_set} to {filename}, to a folder with this file, or to a hub name."
    return None


def weights_path(checkpoint: str, filename: str, what_to_set: str) -> Path:
    """Return the file of a checkpoint that passed :func:`file_error`; from the hub it is downloaded once.

    Raises:
        LoadError: the download failed.
    """
    path = _as_file(checkpoint)
    if path is not None:
        return path
    folder = local_folder(checkpoint)
    if folder is not None:
        return folder / filename
    from huggingface_hub import hf_hub_download

    with loading(f"{filename} of {checkpoint}", f"Set {what_to_set} to the file."):
        return Path(hf_hub_download(checkpoint, filename))


def read_weights(path: Path, what_to_set: str) -> dict[str, Tensor]:
    """Return a file's tensors by name, on the CPU; those of ``state_dict`` if the file has one.

    Raises:
        LoadError: the file has no named tensors, or anything that would have to be unpickled.
    """
    with loading(str(path), f"Set {what_to_set} to a file of weights."):
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        weights = content.get("state_dict", content)
        return {name.removeprefix("module."): weight.detach() for name, weight in weights.items()}


def fill(model: nn.Module, weights: Mapping[str, Tensor], path: Path, what_to_set: str) -> None:
    """Load weights into a model, which must match exactly.

    Raises:
        LoadError: the weights belong to a different model.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).split("\n")[1].strip()[:200]
        raise LoadError(
            f"Cannot load {path}: it holds a different model ({first}). Set {what_to_set} to the right file."
        ) from error


def _as_file(checkpoint: str) -> Path | None:
    try:
        path = resolve_path(checkpoint)
    except ValueError:
        return None  # reported when it is treated as a folder
    return path if path.is_file() or (path.suffix in SUFFIXES and not path.is_dir()) else None
