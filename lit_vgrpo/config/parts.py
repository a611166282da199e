"""Parts of a recipe: merging plain values, and building one part without the others."""

from __future__ import annotations

import copy
from argparse import ArgumentError
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentParser

from lit_vgrpo.config.schema import CONSTRUCTOR_ERRORS, recipe_errors
from lit_vgrpo.config.tree import class_name
from lit_vgrpo.errors import UserError, from_parser


def built_part(tree: Mapping[str, Any], key: str, hint: Any) -> Any:
    """Build the part under a dotted key; return ``None`` if the recipe has none.

    Args:
        tree: Recipe as plain values, with overrides and interpolations applied.
        hint: Type hint of the part, usually its base class.

    Raises:
        UserError: With every error in the part.
    """
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    if node is None:
        return None
    parser = ArgumentParser(exit_on_error=False, parser_mode="omegaconf+")
    parser.add_argument(f"--{key}", type=hint)
    try:
        return parser.instantiate_classes(parser.parse_object({key: node}))[key]
    except (ArgumentError, *CONSTRUCTOR_ERRORS) as error:
        raise UserError(*(recipe_errors({key: node}, {key: hint | None}, {}) or [from_parser(error)])) from error


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
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not _is_another_class(old, value):
            result[key] = merged(old, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _is_another_class(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return class_name(new) not in ("", class_name(old))
