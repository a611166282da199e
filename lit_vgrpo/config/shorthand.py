"""The short form ``python: my_module:my_function`` for a reward."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

KEY = "python"
PREFIX = f"{KEY}:"
REWARD_KEYS = ("reward", "heldout_reward")
"""Options of the model that accept a reward."""


def expanded(node: Any) -> Any:
    """Expand the short form to the class ``PythonReward``, also inside lists and mappings.

    >>> expanded({"python": "my_module:score", "images": "pil"})
    {'class_path': 'PythonReward', 'init_args': {'function': 'my_module:score', 'images': 'pil'}}
    >>> expanded(["python:my_module:score", "JPEGCompressibility"])
    [{'class_path': 'PythonReward', 'init_args': {'function': 'my_module:score'}}, 'JPEGCompressibility']
    """
    if isinstance(node, str) and node.startswith(PREFIX):
        return _of_function({KEY: node.removeprefix(PREFIX).strip()})
    if isinstance(node, list):
        return [expanded(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    if isinstance(node.get(KEY), str) and "class_path" not in node:
        return _of_function(node)
    return {key: expanded(value) for key, value in node.items()}


def expanded_recipe(recipe: Mapping[Any, Any]) -> dict[Any, Any]:
    """Expand the short form in the rewards of a recipe, given as plain values."""
    model = recipe.get("model")
    if not isinstance(model, Mapping):
        return dict(recipe)
    rewards = {key: expanded(model[key]) for key in REWARD_KEYS if key in model}
    return {**recipe, "model": {**model, **rewards}}


def expanded_override(key: str, text: str) -> str:
    """Expand the short form in the text of an override, as JSON."""
    if KEY not in text or not key.startswith(tuple(f"model.{name}" for name in REWARD_KEYS)):
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text  # the parser reports the error
    full = expanded(value)
    return text if full == value else json.dumps(full)


def _of_function(node: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in node.items() if key != KEY}
    return {"class_path": "PythonReward", "init_args": {"function": node[KEY], **options}}
