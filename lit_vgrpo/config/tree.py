"""Recipes as plain values: nested mappings and lists, in which a class is a text or a mapping with ``class_path``.

jsonargparse merges, swaps classes and appends too. Here it is not used for it, because it needs all classes of a recipe
even to read one part, keeps a method's settings for another that has options of the same names, has no keys for list
entries (``callbacks[0].decay``), and loses ``${oc.env:NAME}``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_vgrpo.errors import UserError, nearest, one_line, suggestion
from lit_vgrpo.system.paths import shipped

Place = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""
REWARD_KEYS = ("reward", "untrained_reward")
"""Options of the model that accept a reward."""
TEXT_KEYS = ("name", "run_dir", "ckpt_path")
"""Keys whose value is text even if it looks like a number."""
CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
PYTHON, JUDGE = "python", "judge"
UNTRAINED = ("CLIPScore", "PickScore", "ImageReward", "HPSv2", "AestheticScore")
"""Untrained rewards to measure, the first that is not trained on."""
LOGGERS: dict[str, Any] = {
    "wandb": "WandbLogger",
    "tensorboard": True,
    "csv": False,
    "TensorBoardLogger": True,  # without options, as the next: Lightning's need a folder
    "CSVLogger": False,
}
SHORT_LOGGERS = [name for name in LOGGERS if name.islower()]
TRACKERS = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow", "CometLogger": "comet_ml", "LitLogger": "litlogger"}
"""Package that each of Lightning's loggers needs."""
ASKS_FOR_SCORE = ("prompt_template", "score_pattern", "num_scores")


def leaves(tree: Any, place: Place = (), open_lists: bool = True) -> Iterator[tuple[Place, Any]]:
    """Yield every value of a tree with its place; an empty mapping or list counts as a value.

    Args:
        open_lists: Yield the entries of lists; otherwise a list is a value.

    >>> dict(leaves({"a": {"b": 1}, "c": [2, {}]}))
    {('a', 'b'): 1, ('c', 0): 2, ('c', 1): {}}
    """
    if isinstance(tree, Mapping) and (tree or not place):
        entries: Iterable[tuple[str | int, Any]] = tree.items()
    elif isinstance(tree, list) and tree and open_lists:
        entries = enumerate(tree)
    else:
        yield place, tree
        return
    for step, value in entries:
        yield from leaves(value, (*place, step), open_lists)


def replaced(
    node: Any, texts: Mapping[Place, str], replace: Callable[[str, Any], Any] = lambda text, _: text, place: Place = ()
) -> Any:
    """Return a tree with the value at each of some places replaced by ``replace(text, value)``, by default the text."""
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
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and class_name(value) in ("", class_name(old)):
            value = merged(old, value)
        result[key] = value
    return copy.deepcopy(result)


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
        short, _, name = node.partition(":")
        node = {short: name.strip()}
    if isinstance(node, list):
        return [expanded(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    form = next((form for form in (PYTHON, JUDGE) if isinstance(node.get(form), str)), None)
    if form is None or "class_path" in node:
        return {key: expanded(value) for key, value in node.items()}
    options = {key: value for key, value in node.items() if key != form}
    if form == PYTHON:
        return {"class_path": "PythonReward", "init_args": {"function": node[form], **options}}
    reward = judge_preset(node[form])["reward"]
    dropped = ASKS_FOR_SCORE if node.get("compare") else ()  # the preset asks for the score of one image
    preset = {key: value for key, value in reward["init_args"].items() if key not in dropped}
    return {"class_path": reward["class_path"], "init_args": {**preset, **options}}


def judge_preset(name: str) -> dict[str, Any]:
    """Return a judge's preset: ``setup``, shell commands that install and start it, and ``reward``, as in a recipe."""
    if name not in (known := shipped("judges")):
        raise UserError(f"{name} is not a judge with a preset. {suggestion(name, known)}")
    return dict(yaml.safe_load(known[name].read_text(encoding="utf-8")))


def expanded_recipe(recipe: Mapping[Any, Any]) -> dict[Any, Any]:
    """Expand the short forms in the rewards of a recipe, given as plain values."""
    model = recipe.get("model")
    if not isinstance(model, Mapping):
        return dict(recipe)
    rewards = {key: _weighted(expanded(model[key])) for key in REWARD_KEYS if key in model}
    return {**recipe, "model": {**model, **rewards}}


def replace_trained(model: Any) -> list[str]:
    """Replace in place an untrained reward that a model is trained on; return a line that says so, or none.

    >>> model = {"reward": "CLIPScore", "untrained_reward": "CLIPScore"}
    >>> replace_trained(model), model["untrained_reward"]
    (['model.untrained_reward=CLIPScore is trained on. Measured instead: PickScore.'], 'PickScore')
    """
    untrained = class_name(model.get("untrained_reward")) if isinstance(model, dict) else ""
    trained = [class_name(value) for _, value in leaves(model.get("reward"))] if untrained else []
    others = [name for name in UNTRAINED if name not in trained]
    if untrained not in UNTRAINED or untrained not in trained or not others:
        return []
    model["untrained_reward"] = others[0]
    return [f"model.untrained_reward={untrained} is trained on. Measured instead: {others[0]}."]


def expanded_logger(node: Any) -> Any:
    """Expand the short names of loggers; a run has ``csv`` always, and ``tensorboard`` unless ``trainer.logger=csv``.

    >>> [expanded_logger(node) for node in ("wandb", "csv", ["wandb", "tensorboard", "CSVLogger"])]
    ['WandbLogger', False, ['WandbLogger']]
    """
    if isinstance(node, list):
        return [name for name in map(expanded_logger, node) if not isinstance(name, bool)]
    return LOGGERS.get(node, node) if isinstance(node, str) else node


def logger_errors(node: Any) -> list[str]:
    """Return a line for each logger without an installed package, and for each misspelt short name."""
    given = node if isinstance(node, list) else [node]
    words = [one for one in given if isinstance(one, str) and one.isalpha() and one.islower()]
    misspelt = [one for one in words if one not in LOGGERS and nearest(one, SHORT_LOGGERS)]
    names = [class_name(expanded_logger(one)) for one in given]
    missing = [name for name in names if name in TRACKERS and not find_spec(TRACKERS[name])]
    return [f"trainer.logger={one} is not a logger. {suggestion(one, SHORT_LOGGERS)}" for one in misspelt] + [
        f"trainer.logger={name}: {TRACKERS[name]} is not installed. Run: pip install {TRACKERS[name]}"
        for name in missing
    ]


def learn_without_class(model: Any) -> None:
    """Make a model's policy that has a checkpoint but no class an ``AutoPolicy``, in place.

    >>> model = {"policy": {"checkpoint": "a/b"}}
    >>> learn_without_class(model)
    >>> model
    {'policy': {'class_path': 'AutoPolicy', 'init_args': {'checkpoint': 'a/b'}}}
    """
    policy = model.get("policy") if isinstance(model, dict) else None
    if isinstance(policy, dict) and "checkpoint" in policy and "class_path" not in policy:
        model["policy"] = {"class_path": "AutoPolicy", "init_args": policy}


def _weighted(reward: Any) -> Any:
    return {"class_path": "Weighted", "init_args": {"rewards": reward}} if isinstance(reward, list) else reward


def apply_override(recipe: dict[Any, Any], key: str, text: str) -> Any:
    """Set a key of a recipe in place to the value that a text stands for, and return the old, see :func:`set_value`."""
    value: Any = text
    try:
        value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)["value"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        unclosed = any(text.startswith(left) and text.count(left) != text.count(right) for left, right in ("{}", "[]"))
        if unclosed and isinstance(error, yaml.YAMLError):
            problem = getattr(error, "problem", None) or error
            raise UserError(f"{key}={text} is not YAML: {one_line(problem)}. Close every bracket.") from error
    is_text = text == "" or (key in TEXT_KEYS and value is not None)
    return set_value(recipe, key, text if is_text else value)


def set_value(recipe: dict[Any, Any], key: str, value: Any) -> Any:
    """Set a key of a recipe in place, and return the old value.

    The key may omit ``init_args``, and end with ``+`` to append to a list. The name of another class replaces a part
    and its options. A text is a class, or in ``data`` the path of prompts.

    >>> recipe = {"objective": {"class_path": "VGRPO"}}
    >>> set_value(recipe, "objective.clip", 0.01)
    >>> recipe
    {'objective': {'class_path': 'VGRPO', 'init_args': {'clip': 0.01}}}
    >>> recipe = {"data": {"train": "a.txt"}}
    >>> set_value(recipe, "data.train.limit", 5)
    >>> recipe
    {'data': {'train': {'path': 'a.txt', 'limit': 5}}}

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
    parent: Any = {"": recipe}
    last: str | int = ""
    steps = [int(index) if index else name for name, index in STEP.findall(key)]
    for number, step in enumerate(steps):
        node, where = parent[last], dotted(steps[:number])
        if isinstance(step, int):
            if not isinstance(node, list) or step >= len(node):
                raise UserError(f"{where}[{step}] does not exist. Append an entry with {where}+=VALUE.")
        elif isinstance(node, list):
            entry = f"{where}[{step}]" if step.isdigit() else f"{where}[0].{step}"
            raise UserError(
                f"{where} is a list and has no option {step}. Write {dotted((entry, *steps[number + 1 :]))}=..."
            )
        else:
            if not isinstance(node, dict):
                named = "path" if where.startswith("data.") else "class_path"
                node = parent[last] = {named: node} if isinstance(node, str) else {}
            if "class_path" in node and step not in CLASS_KEYS:
                node = node.setdefault("init_args", {})
            node.setdefault(step, None)
        parent, last = node, step
    old = parent[last]
    if appends:
        if isinstance(old, str | Mapping):
            raise UserError(f"{key}+= appends to a list, which {key} is not. To replace the value, use {key}=.")
        value = [*(old or []), *(value if isinstance(value, list) else [value])]
    elif isinstance(old, dict) and isinstance(value, str) and class_name(old) == class_name(value):
        value = {**old, "class_path": value}
    parent[last] = value
    return old
