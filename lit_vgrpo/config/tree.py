"""Recipes as plain values: nested mappings and lists, in which a class is a text or a mapping with ``class_path``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Place = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""


def leaves(tree: Any, opens: Callable[[Place, list[Any]], bool] | None = None) -> Iterator[tuple[Place, Any]]:
    """Yield every value of a tree with its place; an empty mapping or list counts as a value.

    Args:
        opens: whether the entries of a list are values of their own; by default they are.

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
        texts: by place.
        replace: makes the new value from the text and the old value; by default it is the text.
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
