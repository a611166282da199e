"""Parsing of recipes by jsonargparse, part by part, with its errors in one line."""

from __future__ import annotations

import copy
import inspect
import re
import sys
import typing
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentParser

from lit_vgrpo.config.tree import Place, apply_override, expanded, leaves, typed_key
from lit_vgrpo.errors import UserError, error_in_user_code, nearest, one_line, unknown_option

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
CONSTRUCTOR_ERRORS = (ValueError, TypeError, RuntimeError, ModuleNotFoundError, OSError)
KEY = re.compile(r"""Parser key ["']([\w.+]+)["']""")
CLASS = re.compile(r"class_path '([\w.]+)'")
UNKNOWN = re.compile(r"(?:Group '([\w.]+)' does not accept option|Option) '([\w.]+)'(?: is not accepted)?")
UNKNOWN_CLASS = re.compile(r"Expected a dot import path string: (.+)")
OF_CLASS = re.compile(r"Problem with given class_path '(?:[\w.]+\.)?(\w+)':\s+(.+)")
OTHER_CLASS = re.compile(r"Import path ([\w.]+) does not correspond to a subclass of (\w+)")
OF_CONSTRUCTOR = re.compile(r"- (\w+=.*)")
LIMIT = re.compile(r"(Input should be .+?) \[type=")
EXPECTED = re.compile(r"Expected an? (.+?)(?:\. Got value|$)", re.MULTILINE)
GIVEN = re.compile(r"(?:Given value|Got value|input_value)[:=] ?(.*)")
REQUIRED = re.compile(r"the following arguments are required: (.+)")
NO_CLASS = re.compile(r"is abstract|class_path 'lightning.Callback'")
TYPES = {"NoneType": "null", "bool": "true or false", "float": "a number", "str": "text", "dict": "a mapping"}


def built_part(tree: Mapping[str, Any], key: str, hint: Any) -> Any:
    """Build the part under a dotted key; return ``None`` if the recipe has none.

    Args:
        tree: Recipe as plain values, with overrides and interpolations applied.
        hint: Type hint of the part, usually its base class.

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
        return parser.instantiate_classes(parser.parse_object({key: copy.deepcopy(node)}))[key]
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
        return _parser_error(str(error), tree, root)
    plain = one_line(error) or type(error).__name__
    quoted = [place for place, value in leaves(tree) if isinstance(value, str) and repr(value) in plain]
    message = with_full_key(plain, tree)
    return error_in_user_code(error) or (f"{typed_key(quoted[0])}: {plain}" if quoted and message == plain else message)


def _parser_error(text: str, tree: Mapping[str, Any], root: Any) -> str:
    keys, classes = KEY.findall(text), CLASS.findall(text)
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
        owner, group = _imported(classes[-1]) if classes else root, unknown[1] or ""
        for step in filter(None, group.split(".")):
            owner = _member(owner, step)
        full = ".".join(filter(None, (key, group, unknown[2].partition(".")[0]))).replace(".init_args", "")
        if inspect.isclass(owner):
            options = options_of_class(owner)
        else:
            options = [*(owner or ()), *(typed_key(place) for place, _ in leaves(tree) if place[0] in (owner or ()))]
        return unknown_option(full, getattr(owner, "__name__", "a recipe"), options)
    if message := OF_CONSTRUCTOR.search(text):
        return with_full_key(message[1], tree)
    value, expected = GIVEN.search(text), [_type_name(kind) for kind in EXPECTED.findall(text)]
    if literals := [kind for kind in expected if kind.startswith("one of")]:
        expected = [*literals, "a mapping"] if UNKNOWN_CLASS.search(text) else expected
    elif name := UNKNOWN_CLASS.search(text):
        modules = [module for path, module in sys.modules.items() if path.startswith("lit_vgrpo.")]
        known = [name for module in modules for name in getattr(module, "__all__", ())]
        guess = nearest(name[1], known)
        hint = f"Did you mean {guess}?" if guess else "Write it as package.module.Class."
        return f"{key}={name[1]} is not a known class. {hint}"
    if wrong := OTHER_CLASS.search(text):
        return f"{key}={wrong[1]} is not a {wrong[2]}. Name one of its classes."
    if limit := LIMIT.search(text):
        return f"{key}={value[1].partition(',')[0] if value else ''}: {limit[1]}"
    if value is not None and expected and key:
        return f"{key}={value[1]}: expected {' or '.join(dict.fromkeys(expected))}."
    plain = re.sub(r'Parser key "[\w.]+":|Problem with given class_path \'[\w.]+\':', "", text).strip()
    plain = re.sub(r"- Expected a path but .*\n", "", plain).strip(" -\n").partition("\n")[0]
    if plain.startswith("Does not validate") and (reason := OF_CLASS.search(text)):
        return f"{reason[1]}: {reason[2]}"
    return f"{key}: {plain}" if key else one_line(plain)


def _misplaced_option(tree: Mapping[str, Any], key: str) -> str | None:
    """Return the error for an option next to a ``class_path``, at or below a dotted key, or ``None``."""
    classes = {place[:-1]: value for place, value in leaves(tree) if place and place[-1] == "class_path"}
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
    places = list(_places_of(name[0], tree)) if name else []
    if not places:
        return message
    shown = re.match(r"\w+=([^\s:]+)", message)
    same = [place for place, value in places if shown and str(value) == shown[1].strip("'\"")]
    return f"{typed_key((same or [place for place, _ in places])[0][:-1])}.{message}".removeprefix(".")


def _places_of(name: str, tree: Any) -> Iterator[tuple[Place, Any]]:
    seen = set()
    for place, value in leaves(tree):
        if name in place:
            start = place[: place.index(name) + 1]
            if start not in seen:
                seen.add(start)
                yield start, value


def options_of_class(cls: type) -> list[str]:
    """Return the names of a class's options, with those of the base classes that its ``**kwargs`` reach."""
    names: list[str] = []
    for owner in cls.__mro__:
        if owner is not cls and ("__init__" not in vars(owner) or owner is object):
            continue
        parameters = inspect.signature(owner).parameters.values()
        names += [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return list(dict.fromkeys(names))


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def _member(owner: Any, option: str) -> Any:
    """Return the class of an option, or of an entry of a mapping of classes."""
    if isinstance(owner, Mapping):
        return owner.get(option)
    hint = typing.get_type_hints(owner.__init__).get(option) if inspect.isclass(owner) else None
    return next((kind for kind in typing.get_args(hint) or (hint,) if inspect.isclass(kind)), None)
