"""The settings of a recipe that differ from the defaults of its classes."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from pkgutil import resolve_name
from typing import Any

from jsonargparse import ArgumentParser

from lit_vgrpo.config.parts import NAMED_IN
from lit_vgrpo.config.recipe import SECTIONS
from lit_vgrpo.report.run_data import flat_settings
from lit_vgrpo.training.settings import TRAINER_DEFAULTS

ROOTS = {
    "model": "lit_vgrpo.VGRPOModule",
    "data": "lit_vgrpo.PromptDataModule",
    "trainer": "lightning.pytorch.Trainer",
}
"""By section, the class that takes its options; by name, as recipes name the others."""
TOP = {"name": None, "run_dir": None, "ckpt_path": None, "allow_changes": False, "trainer": TRAINER_DEFAULTS}


def own_settings(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings of a full recipe that differ from their defaults, and their values as text.

    Classes of other packages are not imported for this: all their settings are returned.
    """
    defaults: dict[str, str] = {}
    for section in SECTIONS:
        defaults |= _defaults_in(recipe.get(section), section, _class(ROOTS.get(section)))
    defaults |= flat_settings(TOP)
    return [(key, value) for key, value in flat_settings(recipe).items() if defaults.get(key) != value]


def _defaults_in(node: Any, key: str, owner: Any) -> dict[str, str]:
    """Return the defaults of a node's settings as text, by key, those of the classes in it included."""
    if isinstance(node, list):
        parts = [_defaults_in(item, f"{key}[{number}]", None) for number, item in enumerate(node)]
        return {name: text for part in parts for name, text in part.items()}
    if not isinstance(node, Mapping):
        return {}
    if "class_path" in node:
        return _defaults_in(node.get("init_args") or {}, key, _class(node["class_path"]))
    known = {name: default for name, default in _defaults(owner).items() if name in node}
    found, hints = flat_settings(known, key), _hints(owner)
    for name, value in node.items():
        kinds = [kind for kind in (hints.get(name), *typing.get_args(hints.get(name))) if is_dataclass(kind)]
        found |= _defaults_in(value, f"{key}.{name}", next(iter(kinds), None))
    return found


def _class(name: str | None) -> Any:
    with suppress(Exception):  # a class of another version
        return resolve_name(name) if name is not None and name.startswith(NAMED_IN) else None


def _defaults(owner: Any) -> dict[str, Any]:
    """Return a class's defaults as a recipe takes them."""
    parser = ArgumentParser(exit_on_error=False)
    with suppress(Exception):  # a class that has changed and no longer takes arguments
        parser.add_class_arguments(owner, fail_untyped=False)
    return json.loads(parser.dump(parser.get_defaults(), skip_validation=True, skip_none=False, format="json"))


def _hints(owner: Any) -> dict[str, Any]:
    with suppress(Exception):  # a hint that exists for type checkers only
        return typing.get_type_hints(owner if is_dataclass(owner) else owner.__init__)
    return {}
