"""Recipes as plain values: nested mappings and lists, in which a class is a text or a mapping with ``class_path``."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_vgrpo.errors import UserError, suggestion
from lit_vgrpo.system.paths import shipped_root

Place = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""
REWARD_KEYS = ("reward", "heldout_reward")
"""Options of the model that accept a reward."""
TEXT_KEYS = ("name", "run_dir", "ckpt_path")
"""Keys whose value is text even if it looks like a number."""
ENTRY = re.compile(r"\[(\d+)\]")
PYTHON, JUDGE = "python", "judge"
ASKS_FOR_SCORE = ("prompt_template", "score_pattern", "num_scores")


def leaves(tree: Any, opens: Callable[[Place, list[Any]], bool] | None = None) -> Iterator[tuple[Place, Any]]:
    """Yield every value of a tree with its place; an empty mapping or list counts as a value.

    Args:
        opens: Predicate for the lists whose entries are values too; by default all lists.

    >>> dict(leaves({"a": {"b": 1}, "c": [2, {}]}))
    {('a', 'b'): 1, ('c', 0): 2, ('c', 1): {}}
    """

    def of_node(node: Any, place: Place) -> Iterator[tuple[Place, Any]]:
        if isinstance(node, Mapping) and (node or not place):
            entries = list(node.items())
        elif isinstance(node, list) and node and (opens is None or opens(place, node)):
            entries = list(enumerate(node))
        else:
            yield place, node
            return
        for step, value in entries:
            yield from of_node(value, (*place, step))

    return of_node(tree, ())


def replaced(
    node: Any, texts: Mapping[Place, str], replace: Callable[[str, Any], Any] = lambda text, _: text, place: Place = ()
) -> Any:
    """Return a tree with the values at some places replaced.

    Args:
        texts: New texts by place.
        replace: Returns the new value from the text and the old value; by default the text.
    """
    if place in texts:
        return replace(texts[place], node)
    if isinstance(node, Mapping):
        return {key: replaced(value, texts, replace, (*place, key)) for key, value in node.items()}
    if isinstance(node, list):
        return [replaced(value, texts, replace, (*place, index)) for index, value in enumerate(node)]
    return node


def dotted(place: Sequence[str | int]) -> str:
    """Return a place as a dotted key.

    >>> dotted(["data", "train", 0, "weight"])
    'data.train[0].weight'
    """
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).removeprefix(".")


def typed_key(place: Sequence[str | int]) -> str:
    """Return a place as the key that a user types, without ``init_args`` and ``class_path``.

    >>> typed_key(["model", "objective", "init_args", "clip"]), typed_key(["model", "objective", "class_path"])
    ('model.objective.clip', 'model.objective')
    """
    return dotted([step for step in place if step not in ("init_args", "class_path")])


def class_name(part: Any) -> str:
    """Return the short name of the class that a part of a recipe names; empty if it names none.

    >>> class_name("VGRPO"), class_name({"class_path": "lit_vgrpo.VGRPO"}), class_name({})
    ('VGRPO', 'VGRPO', '')
    """
    path = part.get("class_path") if isinstance(part, Mapping) else part
    return str(path or "").rpartition(".")[2]


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``over`` into a copy of ``base`` key by key; lists and plain values are replaced.

    A different ``class_path`` replaces the whole part, since options of one class do not apply to another.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    >>> merged({"a": {"class_path": "X", "init_args": {"b": 1}}}, {"a": {"class_path": "Y"}})
    {'a': {'class_path': 'Y'}}
    """
    result = copy.deepcopy(dict(base))
    for key, value in over.items():
        old = result.get(key)
        is_same = isinstance(old, Mapping) and class_name(value) in ("", class_name(old))
        is_part = is_same and isinstance(value, Mapping)
        result[key] = merged(dict(old or {}), value) if is_part else copy.deepcopy(value)
    return result


def expanded(node: Any) -> Any:
    """Expand the short forms of rewards, ``python: my_module:my_function`` and ``judge: HPSv3``, wherever they are.

    >>> expanded({"python": "my_module:score", "images": "pil"})
    {'class_path': 'PythonReward', 'init_args': {'function': 'my_module:score', 'images': 'pil'}}
    >>> expanded(["python:my_module:score", "JPEGCompressibility"])
    [{'class_path': 'PythonReward', 'init_args': {'function': 'my_module:score'}}, 'JPEGCompressibility']
    >>> [*expanded({"judge": "UnifiedReward2", "compare": "pairs"})["init_args"]]
    ['model', 'name', 'compare']
    """
    if isinstance(node, str) and node.startswith((f"{PYTHON}:", f"{JUDGE}:")):
        form, _, name = node.partition(":")
        node = {form: name.strip()}
    if isinstance(node, list):
        return [expanded(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    if isinstance(node.get(PYTHON), str) and "class_path" not in node:
        options = {key: value for key, value in node.items() if key != PYTHON}
        return {"class_path": "PythonReward", "init_args": {"function": node[PYTHON], **options}}
    if isinstance(node.get(JUDGE), str) and "class_path" not in node:
        reward = judge_preset(node[JUDGE])["reward"]
        options = reward["init_args"]
        if node.get("compare"):  # the preset asks for the score of one image
            options = {key: value for key, value in options.items() if key not in ASKS_FOR_SCORE}
        options = {**options, **{key: value for key, value in node.items() if key != JUDGE}}
        return {"class_path": reward["class_path"], "init_args": options}
    return {key: expanded(value) for key, value in node.items()}


def judge_names() -> list[str]:
    """Return the names of the judges' presets."""
    return sorted(file.stem for file in (shipped_root() / "judges").glob("*.yaml"))


def judge_preset(name: str) -> dict[str, Any]:
    """Return a judge's preset: ``setup``, shell commands that install and start it, and ``reward``, as in a recipe.

    Raises:
        UserError: There is no such judge.
    """
    if name not in (known := judge_names()):
        raise UserError(f"{name} is not a judge with a preset. {suggestion(name, known)}")
    return dict(yaml.safe_load((shipped_root() / "judges" / f"{name}.yaml").read_text(encoding="utf-8")))


def expanded_recipe(recipe: Mapping[Any, Any]) -> dict[Any, Any]:
    """Expand the short forms in the rewards of a recipe, given as plain values."""
    model = recipe.get("model")
    if not isinstance(model, Mapping):
        return dict(recipe)
    rewards = {key: _weighted(expanded(model[key])) for key in REWARD_KEYS if key in model}
    return {**recipe, "model": {**model, **rewards}}


def _weighted(reward: Any) -> Any:
    return {"class_path": "Weighted", "init_args": {"rewards": reward}} if isinstance(reward, list) else reward


def apply_override(recipe: dict[Any, Any], key: str, text: str) -> None:
    """Set a key of a recipe in place to the value that a text stands for, see :func:`set_value`."""
    try:
        value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)["value"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, OmegaConfBaseException):
        value = text
    is_text = text == "" or (key in TEXT_KEYS and value is not None)
    set_value(recipe, key, text if is_text else value)


def set_value(recipe: dict[Any, Any], key: str, value: Any) -> None:
    """Set a key of a recipe in place; the key may omit ``init_args``, and end with ``+`` to append to a list.

    The name of another class replaces a part and its options.

    >>> recipe = {"objective": {"class_path": "VGRPO"}}
    >>> set_value(recipe, "objective.clip", 0.01)
    >>> recipe
    {'objective': {'class_path': 'VGRPO', 'init_args': {'clip': 0.01}}}

    Raises:
        UserError: The key names a missing list entry, or appends to a value that is not a list.
    """
    if key.startswith(tuple(f"model.{name}" for name in REWARD_KEYS)):
        value = expanded(value)
        if key.removeprefix("model.") in REWARD_KEYS:
            value = _weighted(value)
        if key.endswith(f".{PYTHON}"):
            reward = key.removesuffix(f".{PYTHON}")
            set_value(recipe, reward, "PythonReward")  # options of another class are dropped
            key = f"{reward}.function"
    appends, key = key.endswith("+"), key.rstrip("+").removesuffix(".class_path")
    steps: list[str | int] = []
    for part in key.split("."):
        name, *entries = ENTRY.split(part)
        steps += [name, *(int(entry) for entry in entries if entry)]
    node: Any = recipe
    for number, step in enumerate(steps[:-1]):
        node, step = _holder(node, step, steps[:number])
        if isinstance(node[step], str) and isinstance(steps[number + 1], str):
            node[step] = {"class_path": node[step]}
        elif not isinstance(node[step], dict | list):
            node[step] = {}
        node = node[step]
    node, last = _holder(node, steps[-1], steps[:-1])
    old = node[last]
    if appends:
        if isinstance(old, str | Mapping):
            raise UserError(f"{key}+= appends to a list, which {key} is not. To replace the value, use {key}=.")
        value = [*(old or []), *(value if isinstance(value, list) else [value])]
    elif isinstance(old, dict) and isinstance(value, str) and class_name(old) == class_name(value):
        value = {**old, "class_path": value}
    node[last] = value


def _holder(node: Any, step: str | int, before: Sequence[str | int]) -> tuple[Any, Any]:
    """Return the mapping or list that contains a step's value, and its key or index there."""
    name = dotted(before)
    if isinstance(step, int):
        if not isinstance(node, list) or step >= len(node):
            raise UserError(f"{name}[{step}] does not exist. Append an entry with {name}+=VALUE.")
        return node, step
    if not isinstance(node, dict):
        raise UserError(f"{name} is a list and has no option {step}. Write {name}[0].{step}=...")
    if "class_path" in node and step not in ("class_path", "init_args", "dict_kwargs"):
        node = node.setdefault("init_args", {})
    node.setdefault(step, None)
    return node, step
