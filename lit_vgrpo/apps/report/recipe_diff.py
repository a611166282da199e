"""Differences between a run's recipe and the shipped one, or between the recipes of several runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_vgrpo.config.recipe import loaded, shipped_recipes
from lit_vgrpo.config.tree import Place, dotted, expanded_recipe, leaves
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.errors import UserError
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.training.optimizer import OptimizerConfig

ABSENT = "not set"
HIDDEN = "(hidden)"
SECRET = re.compile(
    r"^([ -]*[\w-]*(?:token|secret|password|passwd|api_?key|authorization|credentials?)\"?'?: +)"
    r"(?!null *$|true *$|false *$|[\d.]+ *$)\S.*$",
    re.IGNORECASE | re.MULTILINE,
)
PASSWORD_IN_ADDRESS = re.compile(r"(\w+://)[^/\s@]+@")
NOT_COMPARED = ("name", "run_dir", "ckpt_path", "allow_changes", "trainer.default_root_dir")
SET_BY_THE_COMMAND = {"trainer.num_sanity_val_steps": 0, "trainer.log_every_n_steps": 1} | {
    "trainer.enable_model_summary": False
}
OURS = ("lit_vgrpo.", "lightning.pytorch.callbacks.")
"""Modules of classes whose defaults are looked up; a report imports no other code."""
SECTIONS: dict[str, type] = {
    "model": VGRPOModule,
    "data": PromptDataModule,
    "trainer": Trainer,
    "model.optimizer": OptimizerConfig,
}
ENVIRONMENT, MASK = "${oc.env:", "$(oc.env:"
PARTS = ("model.policy", "model.objective", "model.reward", "model.heldout_reward")
"""Parts that a recipe may give by the name of their class alone."""
Row = tuple[str, list[str]]


@dataclass(frozen=True)
class RecipeDifference:
    """Difference from a shipped recipe.

    Attributes:
        shipped: name of the recipe.
        rows: key, and its values in the shipped recipe and in the run.
    """

    shipped: str
    rows: list[Row]


def difference_to_shipped(recipe: Mapping[Any, Any]) -> RecipeDifference | None:
    """Compare a run's recipe with the shipped one that its name starts with; ``None`` if there is none."""
    name = str(recipe.get("name") or "")
    known = [shipped for shipped in shipped_recipes() if name == shipped or name.startswith(f"{shipped}_")]
    if not known:
        return None
    shipped = max(known, key=len)
    try:
        before, after = _settings(_resolved(loaded(shipped_recipes()[shipped]))), _settings(_resolved(recipe))
    except (UserError, OmegaConfBaseException):
        return None
    rows = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if key in NOT_COMPARED or _shown(old) == _shown(new) or (key not in before and is_default(recipe, key, new)):
            continue
        if key not in before and SET_BY_THE_COMMAND.get(key, ABSENT) == new:
            continue
        if key not in after and new is ABSENT and _is_below(key, after):
            continue
        rows.append((_written(key), [_shown(old), _shown(new)]))
    return RecipeDifference(shipped, rows)


def differences(recipes: Sequence[Mapping[Any, Any]]) -> list[Row]:
    """Return the settings in which several recipes differ, with the value of each."""
    settings = []
    for recipe in recipes:
        try:
            settings.append(_settings(_resolved(recipe)))
        except OmegaConfBaseException:
            settings.append(_settings(recipe))
    keys = dict.fromkeys(key for own in settings for key in own if key not in NOT_COMPARED)
    rows = [(_written(key), [_shown(own.get(key, ABSENT)) for own in settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def is_default(recipe: Mapping[Any, Any], key: str, value: Any) -> bool:
    """Return True if a setting has its default, so that it need not be written in a recipe."""
    if key in SECTIONS or value is None:
        return True
    parent, _, name = key.rpartition(".")
    owner = SECTIONS.get(parent)
    if owner is None and parent.endswith(".init_args"):
        owner = _class(_at(recipe, f"{parent.removesuffix('.init_args')}.class_path"))
    if owner is None:  # settings of a spec, such as objective.init_args.rollout
        owner = _class({"rollout": "lit_vgrpo.RolloutSpec", "evaluation": "lit_vgrpo.RolloutSpec"}.get(_last(parent)))
    default = _defaults(owner).get(name, ABSENT) if owner is not None else ABSENT
    return default is not ABSENT and _shown(default) == _shown(value)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


@cache
def _defaults(owner: type) -> dict[str, Any]:
    """Return the defaults of a class's constructor and those of its bases, which it may pass on."""
    found: dict[str, Any] = {}
    for base in owner.__mro__:
        if "__init__" in vars(base) and base is not object:
            for name, parameter in inspect.signature(base).parameters.items():
                if parameter.default is not inspect.Parameter.empty:
                    found.setdefault(name, parameter.default)
    return found


def _class(path: Any) -> type | None:
    if not isinstance(path, str) or not path.startswith(OURS):
        return None
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def _resolved(recipe: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a recipe with its interpolations resolved, except those of the environment, which may hold secrets."""
    masked = _replaced(expanded_recipe(dict(recipe)), ENVIRONMENT, MASK)
    plain = _replaced(OmegaConf.to_container(OmegaConf.create(masked), resolve=True), MASK, ENVIRONMENT)
    assert isinstance(plain, dict)
    return plain


def _replaced(node: Any, old: str, new: str) -> Any:
    if isinstance(node, Mapping):
        return {key: _replaced(value, old, new) for key, value in node.items()}
    if isinstance(node, list):
        return [_replaced(value, old, new) for value in node]
    return node.replace(old, new) if isinstance(node, str) else node


def _settings(recipe: Mapping[Any, Any]) -> dict[str, Any]:
    found = {}
    for place, value in leaves(recipe, _has_parts):
        is_class = isinstance(value, str) and (dotted(place) in PARTS or isinstance(place[-1], int))
        key = dotted((*place, "class_path") if is_class else place)
        found[key] = _public(key, value)
    return found


def _has_parts(place: Place, entries: list[Any]) -> bool:
    return place == ("trainer", "callbacks") or any(isinstance(entry, Mapping) for entry in entries)


def _public(key: str, value: Any) -> Any:
    return without_secrets(f"{_last(key)}: {value}").partition(": ")[2] if isinstance(value, str) else value


def _at(recipe: Mapping[Any, Any], key: str) -> Any:
    node: Any = recipe
    for step in key.replace("[", ".[").split("."):
        if step.startswith("[") and isinstance(node, list):
            number = int(step.strip("[]"))
            node = node[number] if number < len(node) else None
        elif isinstance(node, Mapping):
            node = node.get(step)
        else:
            return None
    return node


def _is_below(key: str, settings: Mapping[str, Any]) -> bool:
    """Return True if a setting is absent because a whole part is written in another form."""
    return any(other.startswith(f"{key}.") for other in settings)


def _written(key: str) -> str:
    return key.replace(".init_args", "").removesuffix(".class_path")


def _shown(value: Any) -> str:
    """Return a value as in YAML; the classes by their short names."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}" if abs(value) < 1e6 else str(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    text = str(value)
    return _last(text) if text.startswith(OURS) else text


def config_text(run: Path) -> str:
    """Return a run's ``config.yaml`` without values that look secret; empty if it cannot be read."""
    try:
        return without_secrets((run / "config.yaml").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def without_secrets(text: str) -> str:
    """Return a recipe's text with the values of keys such as ``token``, and passwords in addresses, replaced."""
    text = SECRET.sub(rf"\g<1>{HIDDEN}", text)
    return PASSWORD_IN_ADDRESS.sub(rf"\g<1>{HIDDEN}@", text)
