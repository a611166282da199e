"""Building of a recipe's parts by jsonargparse, with its errors in one line.

jsonargparse 4.53 has no structured errors: an ArgumentError is a text, and of a union only the first type's error is
its cause. So the key, the value and the reason are read from the text.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
import typing
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from pydoc import locate
from typing import Any

from jsonargparse import ArgumentParser
from pydantic import ValidationError

from lit_vgrpo.config.tree import CLASS_KEYS, Place, apply_override, expanded, leaves, typed_key
from lit_vgrpo.errors import UserError, causes, error_in_user_code, nearest, one_line, unknown_option

CONSTRUCTOR_ERRORS = (ValueError, TypeError, RuntimeError, ModuleNotFoundError, OSError)
KEY = re.compile(r"""Parser key ["']([\w.+]+)["']""")
CLASS = re.compile(r"class_path[ =]'([\w.]+)'")
UNKNOWN = re.compile(r"(?:Group '([\w.]+)' does not accept option|Option) '([\w.]+)'(?: is not accepted)?")
UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (.+)")
OTHER_CLASS = re.compile(r"Import path ([\w.]+) does not correspond to a subclass of (\w+)")
OF_CONSTRUCTOR = re.compile(r"- (\w+=.*)")
EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value|$)", re.MULTILINE)
GIVEN = re.compile(r"(?:Given value|Got value): (.*)")
REQUIRED = re.compile(r"the following arguments are required: (.+)")
NO_CLASS = re.compile(r"is abstract|class_path 'lightning.Callback'")
PATH = re.compile(r"\s*- Expected a path but .*\n")
TYPES = {"NoneType": "null", "bool": "true or false", "float": "a number", "str": "text", "dict": "a mapping"}


def built_part(tree: Mapping[str, Any], key: str, hint: Any, parse_only: bool = False) -> Any:
    """Build the part under a dotted key; return ``None`` if the recipe has none.

    Args:
        tree: Recipe as plain values, with overrides and interpolations applied.
        hint: Type hint of the part, usually its base class.
        parse_only: Find the errors that need no instance, and return ``None``.

    Raises:
        UserError: The part has an error; the message is the first one.
    """
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    if node is None:
        return None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{key}", type=hint)
    try:
        config = parser.parse_object({key: copy.deepcopy(node)})
        return None if parse_only else parser.instantiate_classes(config)[key]
    except (ArgumentError, *CONSTRUCTOR_ERRORS) as error:
        raise UserError(recipe_error(error, tree, hint)) from error


def part_of_words(words: Sequence[str], key: str, hint: Any) -> Any:
    """Build the part that words name: ``PickScore checkpoint=/a/folder``; raise UserError with the first error."""
    node = expanded(words[0])
    tree: dict[Any, Any] = {key: {"class_path": node} if isinstance(node, str) else node}
    for word in words[1:]:
        name, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            raise UserError(f"{word} is not an option of a {key}. Write options as key=value.")
        apply_override(tree, f"{key}.{name}", text)
    return built_part(tree, key, hint)


def recipe_error(error: BaseException, tree: Mapping[str, Any], root: Any = None) -> str:
    """Return an error of jsonargparse or of a constructor in one line, starting with the key if it is known.

    Args:
        tree: The recipe as plain values.
        root: Class of the part that was parsed, to suggest its options.
    """
    if isinstance(error, ArgumentError) or "Union subtypes" in str(error):
        return _parser_error(error, tree, root)
    plain = one_line(error) or type(error).__name__
    quoted = [place for place, value in leaves(tree) if isinstance(value, str) and repr(value) in plain]
    message = with_full_key(plain, tree)
    return error_in_user_code(error) or (f"{typed_key(quoted[0])}: {plain}" if quoted and message == plain else message)


def _parser_error(error: BaseException, tree: Mapping[str, Any], root: Any) -> str:
    text, reason = PATH.sub("", str(error)), [*causes(error)][-1]
    keys = KEY.findall(text)
    key = ".".join(dict.fromkeys(keys)).replace(".init_args", "")
    if misplaced := _misplaced_option(tree, key):
        return misplaced
    if NO_CLASS.search(text):
        return f"{key} names no class. Write {{class_path: NAME, init_args: {{OPTION: VALUE}}}}."
    if missing := REQUIRED.search(text):
        names = [f"{key}.{name}".removeprefix(".") for name in missing[1].split(", ")]
        return f"The recipe lacks {', '.join(names)}. For a complete one: lightning init my_run"
    if (unknown := UNKNOWN.search(text)) and unknown[2] in keys:  # of another class that the option accepts
        text, unknown = text[: unknown.start()], None
    if unknown:
        classes = CLASS.findall(text[: unknown.start()]) or CLASS.findall(text)[:1]
        return _unknown(unknown, key, locate(classes[-1]) if classes else root, tree)
    if message := OF_CONSTRUCTOR.search(text):
        return with_full_key(message[1], tree)
    if isinstance(reason, ValidationError):
        limit = reason.errors()[0]
        return f"{key}={limit['input']!r}: {limit['msg']}"
    named = key or next(iter(CLASS.findall(text)), "").rpartition(".")[2]
    if isinstance(reason, ImportError | AttributeError):
        return f"{named}: {one_line(reason)}"
    value, expected = GIVEN.search(text), [_type_name(kind) for kind in EXPECTED.findall(text)]
    if literals := [kind for kind in expected if kind.startswith("one of")]:
        expected = [*literals, "a mapping"] if UNKNOWN_CLASS.search(text) else expected
    elif name := UNKNOWN_CLASS.search(text):
        modules = [module for path, module in sys.modules.items() if path.startswith("lit_vgrpo.")]
        guess = nearest(name[1], [name for module in modules for name in getattr(module, "__all__", ())])
        hint = f"Did you mean {guess}?" if guess else "Write it as package.module.Class."
        return f"{key}={name[1]} is not a known class. {hint}"
    if wrong := OTHER_CLASS.search(text):
        return f"{key}={wrong[1]} is not a {wrong[2]}. Name one of its classes."
    if value is not None and expected and key:
        return f"{key}={value[1]}: expected {' or '.join(dict.fromkeys(expected))}."
    return f"{named}: {one_line(reason)}".removeprefix(": ")


def _unknown(unknown: re.Match[str], key: str, owner: Any, tree: Mapping[str, Any]) -> str:
    """Return the error of an option that a class, or a group of options in it, does not have."""
    groups = unknown[1].split(".") if unknown[1] else []
    for group in groups:
        hint = owner.get(group) if isinstance(owner, Mapping) else typing.get_type_hints(owner.__init__).get(group)
        owner = next((kind for kind in typing.get_args(hint) or (hint,) if inspect.isclass(kind)), None)
    full = ".".join(filter(None, (key, *groups, unknown[2].partition(".")[0]))).replace(".init_args", "")
    if inspect.isclass(owner):
        return unknown_option(full, owner.__name__, options_of_class(owner))
    known = [*(owner or ()), *(typed_key(place) for place, _ in leaves(tree) if place[0] in (owner or ()))]
    return unknown_option(full, "a recipe", known)


def _misplaced_option(tree: Mapping[str, Any], key: str) -> str | None:
    """Return the error for an option next to a ``class_path``, at or below a dotted key, or ``None``."""
    classes = {place[:-1]: value for place, value in leaves(tree) if place[-1:] == ("class_path",)}
    for place, _ in leaves(tree):
        for part, option in ((place[:end], step) for end, step in enumerate(place)):
            if part in classes and option not in CLASS_KEYS and typed_key(part).startswith(key):
                form = f"{{class_path: {classes[part]}, init_args: {{{option}: VALUE}}}}"
                return f"{typed_key(part)}: {option} is an option of the class. Write {form}."
    return None


def _type_name(kind: str) -> str:
    plain = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>|typing\.Literal", lambda match: match[1] or "one of ", kind)
    return TYPES.get(plain, plain)


def with_full_key(message: str, tree: Mapping[str, Any]) -> str:
    """Return a constructor's message with the dotted key of the option, or of the value, that it starts with.

    >>> with_full_key("clip=-1: too small", {"model": {"objective": {"class_path": "X", "init_args": {"clip": -1}}}})
    'model.objective.clip=-1: too small'
    """
    for place, value in leaves(tree):
        if isinstance(value, str) and message.startswith(f"{value} ") and typed_key(place) not in message:
            return f"{typed_key(place)}: {message}"
    name = re.match(r"\w+(?=[=.:])", message)
    starts: dict[Place, Any] = {}
    for place, value in leaves(tree):
        if name and name[0] in place:
            starts.setdefault(place[: place.index(name[0])], value)
    if not starts:
        return message
    shown = re.match(r"\w+=([^\s:]+)", message)
    same = [place for place, value in starts.items() if shown and str(value) == shown[1].strip("'\"")]
    return f"{typed_key([*same, *starts][0])}.{message}".removeprefix(".")


def options_of_class(cls: type) -> list[str]:
    """Return the names of a class's options, with those of the base classes that its ``**kwargs`` reach."""
    names: list[str] = ArgumentParser().add_class_arguments(cls, fail_untyped=False)
    return names
