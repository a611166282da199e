"""What a pipeline folder's index tells before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_vgrpo.hub import explain_unloadable, local_folder

if TYPE_CHECKING:
    from lit_vgrpo.policies.base import Policy

INDEX = "model_index.json"


def pipeline_faults(policy: Policy) -> list[str]:
    """Why a policy's checkpoint is none of its family, in a line; empty where nothing speaks against it."""
    checkpoint, needed = policy.checkpoint, policy.pipeline_class
    folder = local_folder(checkpoint)
    if folder is None:
        fault = explain_unloadable(checkpoint, INDEX, "model.policy.checkpoint")
        return [fault] if fault else []
    if not folder.is_dir():
        return [f"model.policy.checkpoint={checkpoint} is no folder. Give a pipeline folder or a hub name."]
    index = folder / INDEX
    if not index.is_file():
        return [f"model.policy.checkpoint={checkpoint} holds no {INDEX}: it is no pipeline folder."]
    try:
        found = json.loads(index.read_text()).get("_class_name")
    except (json.JSONDecodeError, AttributeError):
        return [f"{index} is damaged: not a JSON object. Save or download the pipeline again."]
    if found == needed:
        return []
    from lit_vgrpo.policies.base import Policy

    families = {cls.pipeline_class: cls.__name__ for cls in _families(Policy)}
    advice = f"Use class_path: {families[found]}." if found in families else f"Give a {needed}."
    return [f"model.policy.checkpoint={checkpoint} is a {found}, {type(policy).__name__} needs {needed}. {advice}"]


def null_components(folder: Path) -> dict[str, None]:
    """Components that are null in the folder's index."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    entries = json.loads(index.read_text())
    return {name: None for name, value in entries.items() if isinstance(value, list) and value[0] is None}


def _families(base: Any) -> Iterator[Any]:
    """The classes below that are families themselves, however deep, the nearest last."""
    for cls in base.__subclasses__():
        yield from _families(cls)
        if "pipeline_class" in vars(cls):
            yield cls
