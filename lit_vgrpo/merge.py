"""Laying one part of a recipe over another."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``base``, key by key; a list or a plain value replaces. Neither is changed.

    Another ``class_path`` replaces its part whole: the options of one class mean nothing to another.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    >>> merged({"a": {"class_path": "X", "init_args": {"b": 1}}}, {"a": {"class_path": "Y"}})
    {'a': {'class_path': 'Y'}}
    """
    result = copy.deepcopy(dict(base))
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not _is_another_class(old, value):
            result[key] = merged(old, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _is_another_class(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    names = [str(node.get("class_path", "")).rpartition(".")[2] for node in (old, new)]
    return bool(names[1]) and names[0] != names[1]
