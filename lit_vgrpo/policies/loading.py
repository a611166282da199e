"""Loading of a policy's diffusers pipeline, from a folder or the hub, and checks of its small files before loading."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lit_vgrpo.policies.pipeline import INDEX, PipelinePolicy
from lit_vgrpo.system.hub import (
    LoadError,
    cached_file,
    explain_unloadable,
    file_at_hand,
    loading,
    local_folder,
    quiet_libraries,
)

KEY = "model.policy.checkpoint"
WEIGHTS = re.compile(
    # a part's weights, with or without a variant, which is before or (formerly) after the number of a shard
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.(\w+))?(?:-\d{5}-of-\d{5})?(?:\.(\w+))?\.(?:safetensors|bin)"
)
DISTILLED_NAMES = re.compile(r"(?:^|[-_.])(schnell|turbo|lightning|lcm|hyper|distilled)(?=$|[-_.])", re.IGNORECASE)
"""Words in the names of models distilled to a few steps; their files seldom show it."""


def pipeline_errors(policy: PipelinePolicy) -> list[str]:
    """Return why a policy's checkpoint cannot be loaded, in one line; empty if no reason is known."""
    checkpoint, needed = policy.checkpoint, policy.pipeline_class
    try:
        found = find_pipeline_class(checkpoint, policy.revision)
    except LoadError as error:
        return [str(error)]
    if found in (None, needed):
        return []
    return [f"{KEY}={checkpoint} is a {found}, {type(policy).__name__} needs {needed}. Use another class_path."]


def find_pipeline_class(checkpoint: str, revision: str | None = None, what_to_set: str = KEY) -> str | None:
    """Return the class that a pipeline's index names, downloaded if necessary; ``None`` if unavailable.

    Raises:
        LoadError: The checkpoint cannot be found, or the index is damaged.
    """
    if (reason := explain_unloadable(checkpoint, INDEX, what_to_set, revision)) is not None:
        raise LoadError(reason)
    if local_folder(checkpoint) is None and cached_file(checkpoint, INDEX, revision) is None:
        from huggingface_hub import hf_hub_download

        with suppress(Exception):  # the next line tells
            hf_hub_download(checkpoint, INDEX, revision=revision)
    folder = config_folder(checkpoint, revision)
    if folder is None:
        return None
    try:
        return str(json.loads((folder / INDEX).read_text())["_class_name"])
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{folder / INDEX} is damaged. Save or download the pipeline again.") from error


def read_pipeline(policy: PipelinePolicy) -> Any:
    """Load a policy's pipeline with its weights, in the types that the policy trains and computes in.

    Raises:
        LoadError: The pipeline cannot be downloaded or is damaged.
    """
    import diffusers

    # Trained weights and the VAE must not be rounded when loaded.
    network_dtype = torch.float32 if policy.lora_rank is None else policy.dtype
    dtypes = {**dict.fromkeys(policy.network_names, network_dtype), "vae": torch.float32, "default": policy.dtype}
    with quiet_libraries():
        family = getattr(diffusers, policy.pipeline_class)  # imports lazily
    folder = local_folder(policy.checkpoint)
    if folder is None:
        index = config_folder(policy.checkpoint, policy.revision)
        left_out = {} if index is None else policy.null_components(index)
        remedy = f"Run: hf download {policy.checkpoint}, or set {KEY}=/a/local/folder."
        # Keep the download's progress bars: it may be the slowest part of the start.
        with loading(policy.checkpoint, remedy), quiet_libraries(shows_bars=True):
            versions = {"revision": policy.revision, "variant": policy.variant}
            folder = Path(family.download(policy.checkpoint, **versions, **left_out))
    remedy = f"Download or save it again, or set {KEY} to a different pipeline."
    with loading(policy.checkpoint, remedy), quiet_libraries():
        return family.from_pretrained(
            folder, variant=policy.variant, torch_dtype=dtypes, **policy.null_components(folder)
        )


def distillation_warning(policy: PipelinePolicy) -> str | None:
    """Return a one-line warning if a model's index or name marks it as distilled, else ``None``."""
    flag, named = "is_distilled", DISTILLED_NAMES.search(Path(policy.checkpoint).name)
    if config_value(policy, INDEX, flag):
        sign = f"{flag} in its {INDEX}"
    elif named is not None:
        sign = f"its name has {named[1]}"
    else:
        return None
    return (
        f"{KEY}={policy.checkpoint} looks distilled to a few steps ({sign}). Trained directly, it "
        "may lose detail over thousands of updates. Train its base model, or keep the run short and near its start: "
        "model.objective.anchor_weight=1 model.objective.anchor_decay=0.3."
    )


def config_folder(checkpoint: str, revision: str | None = None) -> Path | None:
    """Return the local folder with a pipeline's index: the checkpoint itself or a folder of the hub's cache."""
    index = file_at_hand(checkpoint, INDEX, revision)
    return None if index is None else index.parent


def bare_network(policy: PipelinePolicy) -> Any:
    """Return a policy's network without weights, from its configuration on this machine; ``None`` if it is absent."""
    import diffusers

    folder = config_folder(policy.checkpoint, policy.revision)
    try:
        if folder is None:
            return None
        kind = getattr(diffusers, json.loads((folder / INDEX).read_text())[policy.network_name][1])
        with torch.device("meta"):
            return kind.from_config(kind.load_config(folder / policy.network_name, local_files_only=True))
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):  # loading tells the reason
        return None


def config_value(policy: PipelinePolicy, file: str, key: str) -> Any:
    """Return a value in one of a pipeline's JSON files on this machine, or ``None``."""
    folder = config_folder(policy.checkpoint, policy.revision)
    try:
        return None if folder is None else json.loads((folder / file).read_text())[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def weight_files(folder: Path, variant: str | None) -> list[Path]:
    """Return the weight files of one variant of a part, preferring safetensors."""
    matches = [(path, WEIGHTS.fullmatch(path.name)) for path in folder.iterdir()] if folder.is_dir() else []
    files = [path for path, match in matches if match is not None and (match[1] or match[2]) == variant]
    return [path for path in files if path.suffix == ".safetensors"] or files
