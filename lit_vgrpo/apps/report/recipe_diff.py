"""Differences between a run's recipe and the shipped one, or between the recipes of several runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lit_vgrpo.config.recipe import loaded, shipped_recipes
from lit_vgrpo.system.paths import CONFIG_NAME

ABSENT, HIDDEN = "not set", "(hidden)"
SECRET = re.compile(
    r"^([ -]*[\w-]*(?:token|secret|password|passwd|api_?key|authorization|credentials?)\"?'?: +)"
    r"(?!null *$|true *$|false *$|[\d.]+ *$)\S.*$",
    re.IGNORECASE | re.MULTILINE,
)
PASSWORD_IN_ADDRESS = re.compile(r"(\w+://)[^/\s@]+@")
NOT_COMPARED = {
    *("name", "run_dir", "ckpt_path", "allow_changes", "trainer.default_root_dir"),
    *("trainer.num_sanity_val_steps", "trainer.log_every_n_steps", "trainer.enable_model_summary"),
}
"""Settings of this machine or of the command."""
OURS = ("lit_vgrpo.", "lightning.pytorch.")
"""Packages whose defaults are looked up; a report imports no other code."""
OWNERS = {
    "model": "lit_vgrpo.VGRPOModule",
    "data": "lit_vgrpo.PromptDataModule",
    "trainer": "lightning.pytorch.Trainer",
    "model.optimizer": "lit_vgrpo.OptimizerConfig",
    "model.objective.rollout": "lit_vgrpo.RolloutSpec",
    "model.evaluation": "lit_vgrpo.RolloutSpec",
}
"""Classes of the sections that name none."""
Row = tuple[str, list[str]]


def difference_to_shipped(recipe: Mapping[Any, Any]) -> tuple[str, list[Row]] | None:
    """Return the name of the shipped recipe that a run's name starts with, and each different setting of both."""
    name = str(recipe.get("name") or "")
    shipped = max((one for one in shipped_recipes() if f"{name}_".startswith(f"{one}_")), key=len, default=None)
    if shipped is None:
        return None
    before = {key: text for key, text, _ in _settings(loaded(shipped_recipes()[shipped]))}
    after = {key: (text, is_default) for key, text, is_default in _settings(recipe)}
    rows = []
    for key in dict.fromkeys([*before, *after]):
        text, is_default = after.get(key, (ABSENT, False))
        if text != before.get(key, ABSENT) and not (is_default and key not in before):
            rows.append((key, [before.get(key, ABSENT), text]))
    return shipped, rows


def differences(recipes: Sequence[Mapping[Any, Any]]) -> list[Row]:
    """Return the settings in which several recipes differ, with the value of each."""
    settings = [{key: text for key, text, _ in _settings(recipe)} for recipe in recipes]
    keys = dict.fromkeys(key for own in settings for key in own)
    rows = [(key, [own.get(key, ABSENT) for own in settings]) for key in keys]
    return [(key, texts) for key, texts in rows if len(set(texts)) > 1]


def _settings(node: Any, key: str = "") -> Iterator[tuple[str, str, bool]]:
    """Yield each setting's key as a user types it, its value as text, and whether that is the default."""
    if isinstance(node, Mapping):
        owner = str(node.get("class_path", OWNERS.get(key, "")))
        if "class_path" in node:
            yield key, _text(owner), False
            node = node.get("init_args") or {}
        defaults = _defaults(owner)
        for name, value in node.items():
            place = f"{key}.{name}" if key else str(name)
            if place in NOT_COMPARED:
                continue
            if name in defaults and _text(defaults[name]) == _text(value):
                yield place, _text(value), True
            else:
                yield from _settings(value, place)
    elif isinstance(node, list) and any(isinstance(entry, Mapping | str) for entry in node):
        for number, entry in enumerate(node):
            yield from _settings(entry, f"{key}[{number}]")
    else:
        secret = without_secrets(f"{key.rpartition('.')[2]}: {node}").partition(": ")[2]
        yield key, _text(secret if isinstance(node, str) else node), node is None


@cache
def _defaults(path: str) -> dict[str, Any]:
    """Return the defaults of a class's constructor and of its bases, to which it may pass arguments."""
    module, _, name = path.rpartition(".")
    owner = getattr(import_module(module), name, None) if path.startswith(OURS) else None
    found: dict[str, Any] = {}
    for base in owner.__mro__[:-1] if isinstance(owner, type) else []:
        if "__init__" in vars(base):
            parameters = inspect.signature(base).parameters.items()
            found = {name: one.default for name, one in parameters if one.default is not one.empty} | found
    return found


def _text(value: Any) -> str:
    """Return a value as in YAML; our classes by their short names."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) < 1e6 else str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return str(value).rpartition(".")[2] if str(value).startswith(OURS) else str(value)


def config_text(run: Path) -> str:
    """Return a run's ``config.yaml`` without values that look secret; empty if it has none."""
    file = run / CONFIG_NAME
    return without_secrets(file.read_text(encoding="utf-8", errors="replace")) if file.is_file() else ""


def without_secrets(text: str) -> str:
    """Hide the values of keys such as ``token``, and passwords in addresses, in a recipe's text."""
    return PASSWORD_IN_ADDRESS.sub(rf"\g<1>{HIDDEN}@", SECRET.sub(rf"\g<1>{HIDDEN}", text))
