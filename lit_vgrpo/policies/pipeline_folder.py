"""Checks of a pipeline folder's small files before weights are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_vgrpo.policies.contract import Parts, PolicyContract
from lit_vgrpo.policies.misfits import DISTILLED_NAMES
from lit_vgrpo.system.hub import cached_file, explain_unloadable, file_at_hand, hub_error, local_folder

INDEX = "model_index.json"
KEY = "model.policy.checkpoint"
ONE_FILE = (".safetensors", ".ckpt", ".pt", ".pth", ".gguf")
WEIGHTS = re.compile(
    # a part's weights, with or without a variant, which is before or (formerly) after the number of a shard
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.(\w+))?(?:-\d{5}-of-\d{5})?(?:\.(\w+))?\.(?:safetensors|bin)"
)


def pipeline_errors(policy: PolicyContract) -> list[str]:
    """Return why a policy's checkpoint does not fit it, in one line; empty if it does."""
    checkpoint, revision = policy.checkpoint, policy.revision
    if (error := _version_error(policy)) is not None:
        return [error]
    folder = local_folder(checkpoint)
    if folder is None:
        error = explain_unloadable(checkpoint, INDEX, KEY, revision)
        if error is not None:
            return [error]
        _fetch_index(checkpoint, revision)
        cached = config_folder(checkpoint, revision)
        return [] if cached is None else folder_errors(policy, cached, is_whole=False)
    if not folder.is_dir():
        return [_not_a_folder(policy, folder)]
    if not (folder / INDEX).is_file():
        return [f"{KEY}={checkpoint} has no {INDEX}: it is not a pipeline folder."]
    if revision is not None:
        return [f"model.policy.revision={revision} has no effect on {checkpoint}, which is a folder. Leave it out."]
    return folder_errors(policy, folder)


def _version_error(policy: PolicyContract) -> str | None:
    """Return that the installed diffusers lacks the policy's pipeline, in one line, or ``None``."""
    import diffusers

    if hasattr(diffusers, policy.pipeline_class):
        return None
    return (
        f"{type(policy).__name__} needs {policy.pipeline_class}, which diffusers {diffusers.__version__} lacks. "
        f"Run: pip install 'diffusers>={policy.needs_diffusers}'."
    )


def folder_errors(policy: PolicyContract, folder: Path, is_whole: bool = True) -> list[str]:
    """Return why a pipeline folder does not fit a policy, in one line; empty if it does.

    Args:
        policy: need not be loaded.
        folder: has at least an index.
        is_whole: ``False`` for one that may lack weights and configurations.
    """
    checkpoint, needed = policy.checkpoint, policy.pipeline_class
    index = _index(folder)
    if index is None:
        return [f"{folder / INDEX} is damaged: not a JSON object. Save or download the pipeline again."]
    found = index.get("_class_name")
    if found != needed:
        families = {cls.pipeline_class: cls.__name__ for cls in _families(PolicyContract)}
        known = isinstance(found, str) and found in families
        advice = f"Use class_path: {families[found]}." if known else f"Use a {needed}."
        return [f"{KEY}={checkpoint} is a {found}, {type(policy).__name__} needs {needed}. {advice}"]
    nulls = policy.null_components(folder)
    errors = [misfit(policy, _parts_on_disk(folder, index))]
    if is_whole:
        parts = [name for name, entry in index.items() if isinstance(entry, list) and name not in nulls]
        errors += [_absent_part(policy, folder, parts), _variant_error(policy, folder, parts)]
    return [error for error in errors if error is not None][:1]


def misfit(policy: PolicyContract, parts: Parts) -> str | None:
    """Return why a pipeline of the right class cannot be trained, in one line, or ``None``."""
    error = policy.misfit(parts)
    return None if error is None else f"{KEY}={policy.checkpoint} {error}"


def distillation_warning(policy: PolicyContract) -> str | None:
    """Return a warning about training a model that looks distilled to a few steps, in one line, or ``None``."""
    if policy.loaded:
        parts: Parts = parts_in_memory(policy.pipeline)
    else:
        folder = config_folder(policy.checkpoint, policy.revision)
        parts = {} if folder is None else _parts_on_disk(folder, _index(folder) or {})
    told = policy.distilled_by(parts)
    if told is None and (named := DISTILLED_NAMES.search(Path(policy.checkpoint).name)) is not None:
        told = f"its name has {named[1]}"
    if told is None:
        return None
    return (
        f"{KEY}={policy.checkpoint} looks distilled to a few steps ({told}). Trained directly, it loses detail over "
        "thousands of updates. Train the model that it was distilled from, or keep the run short and near its start: "
        "model.objective.anchor_weight=1 model.objective.anchor_decay=0.3. Look at the pictures."
    )


def parts_in_memory(pipeline: Any) -> dict[str, dict[str, Any] | None]:
    """Return a loaded pipeline's parts that belong to diffusers or are left out."""
    parts: dict[str, dict[str, Any] | None] = {}
    for name, part in pipeline.components.items():
        kinds = [kind.__name__ for kind in type(part).__mro__ if kind.__module__.startswith("diffusers.")]
        if part is None:
            parts[name] = None
        elif kinds and isinstance(part.config, Mapping):
            parts[name] = {**part.config, "_class_name": kinds[0]}
    return parts


def config_folder(checkpoint: str, revision: str | None = None) -> Path | None:
    """Return the local folder with a pipeline's index: its own folder or the hub's cache."""
    index = file_at_hand(checkpoint, INDEX, revision)
    return None if index is None else index.parent


def config_value(policy: PolicyContract, file: str, key: str) -> Any:
    """Return a value in one of a pipeline's JSON files on this machine, or ``None``; damage is reported by check."""
    folder = config_folder(policy.checkpoint, policy.revision)
    try:
        return None if folder is None else json.loads((folder / file).read_text())[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def null_components(folder: Path) -> dict[str, None]:
    """Return components that are null in the folder's index."""
    index = _index(folder) or {}
    return {name: None for name, value in index.items() if isinstance(value, list) and value and value[0] is None}


def _index(folder: Path) -> dict[str, Any] | None:
    """Return the folder's index, or ``None`` if it cannot be read."""
    try:
        index = json.loads((folder / INDEX).read_text())
    except (OSError, ValueError):
        return None
    return index if isinstance(index, dict) else None


def _parts_on_disk(folder: Path, index: Mapping[str, Any]) -> dict[str, dict[str, Any] | None]:
    """Return the parts that the index names, with their configurations if present."""
    parts: dict[str, dict[str, Any] | None] = {}
    for name, entry in index.items():
        if not (isinstance(entry, list) and len(entry) == 2):
            continue
        if entry[0] is None:
            parts[name] = None
            continue
        parts[name] = {"_class_name": entry[1]}
        for file in ("config.json", "scheduler_config.json"):
            try:
                parts[name] = {**json.loads((folder / name / file).read_text()), "_class_name": entry[1]}
            except (OSError, ValueError, TypeError):  # damage is reported when the file is read
                continue
    return parts


def _fetch_index(checkpoint: str, revision: str | None) -> None:
    """Download a repository's index to the hub's cache; without it, fewer errors are found before loading."""
    from huggingface_hub import hf_hub_download

    if cached_file(checkpoint, INDEX, revision) is None:
        hub_error(lambda: hf_hub_download(checkpoint, INDEX, revision=revision))


def _not_a_folder(policy: PolicyContract, path: Path) -> str:
    if path.suffix.lower() not in ONE_FILE or not path.is_file():
        return f"{KEY}={policy.checkpoint} is not a folder. Use a pipeline folder or a hub name."
    convert = f'diffusers.{policy.pipeline_class}.from_single_file("{path}").save_pretrained("DIR")'
    return (
        f"{KEY}={policy.checkpoint} is a single file, not a pipeline folder. Convert it: "
        f"python -c 'import diffusers; {convert}', then set {KEY}=DIR."
    )


def _absent_part(policy: PolicyContract, folder: Path, names: list[str]) -> str | None:
    """Return which parts named in a folder's index are missing, such as a tokenizer, in one line, or None."""
    absent = [name for name in names if not (folder / name).is_dir()]
    if not absent:
        return None
    lacking = " and ".join(f"{name}/" for name in absent)
    return f"{KEY}={policy.checkpoint} lacks {lacking}, which its {INDEX} names. Save or download the pipeline again."


def _variant_error(policy: PolicyContract, folder: Path, names: list[str]) -> str | None:
    """Return why a folder lacks the requested variant of its weights, judged by file names, or None."""
    held = {name: variants for name in names if (variants := _variants(folder / name))}
    if policy.variant is None:
        for name, variants in held.items():
            if None not in variants:
                known = sorted(filter(None, variants))
                best = "fp16" if "fp16" in known else known[0]
                return (
                    f"{KEY}={policy.checkpoint} has its {name} only as {' and '.join(known)}. "
                    f"Set model.policy.variant={best}."
                )
        return None
    if not held or any(policy.variant in variants for variants in held.values()):
        return None
    known = sorted({variant for variants in held.values() for variant in variants if variant is not None})
    advice = f"Use {' or '.join(known)}, or leave it out" if known else "Leave it out"
    return f"model.policy.variant={policy.variant}: {policy.checkpoint} has no such weights. {advice}."


def weight_files(folder: Path, variant: str | None) -> list[Path]:
    """Return the weight files of one variant of a part, preferring safetensors."""
    files = [path for path, held in _weights(folder) if held == variant]
    return [path for path in files if path.suffix == ".safetensors"] or files


def _variants(folder: Path) -> set[str | None]:
    """Return the variants of the weights in a part's folder; ``None`` is the default."""
    return {variant for _, variant in _weights(folder)}


def _weights(folder: Path) -> list[tuple[Path, str | None]]:
    matches = [(path, WEIGHTS.fullmatch(path.name)) for path in folder.iterdir()] if folder.is_dir() else []
    return [(path, match[1] or match[2]) for path, match in matches if match is not None]


def _families(base: Any) -> Iterator[Any]:
    """Yield all subclasses that are families, the closest last."""
    for cls in base.__subclasses__():
        yield from _families(cls)
        if "pipeline_class" in vars(cls):
            yield cls
