"""One part of a recipe, built without the others."""

from __future__ import annotations

from argparse import ArgumentError
from collections.abc import Mapping
from typing import Any

from jsonargparse import ArgumentParser

from lit_vgrpo.errors import UserError, from_parser
from lit_vgrpo.schema import CONSTRUCTOR_ERRORS, recipe_faults


def built_part(tree: Mapping[str, Any], key: str, hint: Any) -> Any:
    """Build what stands under a dotted key; ``None`` where nothing does.

    Args:
        tree: the recipe as plain values, overrides and interpolations applied.
        hint: the class it must be of, or a type hint.

    Raises:
        UserError: with every fault of it.
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
        raise UserError(*(recipe_faults({key: node}, {key: hint | None}, {}) or [from_parser(error)])) from error
