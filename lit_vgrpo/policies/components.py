"""Parts of a pipeline that come from other checkpoints: ``model.policy.components``."""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from torch import nn

from lit_vgrpo.errors import unknown_option
from lit_vgrpo.system.hub import (
    LoadError,
    download_small_files,
    explain_unloadable,
    fetched_folder,
    file_at_hand,
    loading,
    local_folder,
)

KEY = "model.policy.components"


def component_folder(name: str, source: str) -> Path:
    """Return the folder of a component: the checkpoint itself, or the part of this name in a whole pipeline.

    Of a hub repository, the small files are downloaded, but no weights.

    Raises:
        LoadError: The checkpoint cannot be found, or has no such part.
    """
    file = "tokenizer_config.json" if name.startswith("tokenizer") else "config.json"
    for is_downloaded in (False, True):
        if is_downloaded and local_folder(source) is None:
            with suppress(Exception):  # the line below tells
                download_small_files(source)
        for place in (f"{name}/{file}", file):
            if (path := file_at_hand(source, place)) is not None:
                return path.parent
    reason = explain_unloadable(source, file, f"{KEY}.{name}")
    raise LoadError(reason or f"{KEY}.{name}={source}: neither {file} nor {name}/{file} can be downloaded.")


def component_class(family: Any, name: str, source: str, known: Any) -> Any:
    """Return the class of a component.

    Args:
        family: The class of the pipeline.
        known: The component's class in the pipeline's index, if it has one.

    Raises:
        LoadError: The pipeline has no such network or tokenizer, or its class is not known.
    """
    parts = inspect.signature(family).parameters
    if hasattr(family, "default_call_parameters"):
        raise LoadError(f"{KEY} is not for modular pipelines. Name the other repository in modular_model_index.json.")
    if name not in parts or name == "scheduler":
        places = [part for part in parts if part not in ("self", "scheduler")]
        raise LoadError(unknown_option(f"{KEY}.{name}", family.__name__, places))
    folder = component_folder(name, source)
    if name.startswith("tokenizer"):
        from transformers import AutoTokenizer

        return AutoTokenizer
    try:
        config = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise LoadError(f"{folder / 'config.json'} is damaged. Save or download it again.") from error
    hint = parts[name].annotation
    own = [kind for kind in (known, *(get_args(hint) or [hint])) if is_network(kind)]
    written = config.get("_class_name")  # diffusers' models have one, such as AutoencoderTiny for a vae
    if written is None and own:
        return own[0]  # several classes of transformers read the same files
    library, kind = ("diffusers", written) if written else ("transformers", (config.get("architectures") or [""])[0])
    found = getattr(import_module(library), str(kind), None)
    if not is_network(found) or (own and name != "vae" and found not in own):
        needed = f" The {name} of {family.__name__} is a {own[0].__name__}." if own else ""
        raise LoadError(f"{KEY}.{name}={source} is a {kind}.{needed} Name a checkpoint that has one.")
    return found


def is_network(kind: Any) -> bool:
    """Return whether something is a class of networks."""
    return inspect.isclass(kind) and issubclass(kind, nn.Module)


def downloaded_component(name: str, source: str, variant: str | None) -> None:
    """Download a component of a hub repository if necessary; raises as :func:`component_folder`."""
    folder = component_folder(name, source)
    if local_folder(source) is None and not name.startswith("tokenizer"):  # whose files are small
        with loading(source, f"Run: hf download {source}, or set {KEY}.{name}=/a/local/folder."):
            fetched_folder(source, name if folder.name == name else "", variant=variant)
