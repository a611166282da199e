"""Building of a recipe's parts by jsonargparse, with its errors in one line.

Names that do not exist are found from the type hints. jsonargparse 4.53 has no structured errors, so the key, the value
and the reason of other errors are read from its text, in which of a union only the first type's error is the cause.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import sys
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from functools import reduce
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from jsonargparse import ArgumentParser
from pydantic import ValidationError

from lit_vgrpo.config.tree import CLASS_KEYS, Place, apply_override, class_name, expanded, leaves, typed_key
from lit_vgrpo.core.ranges import SHOULD, WORDS, should_be
from lit_vgrpo.errors import UserError, causes, error_in_user_code, nearest, one_line, suggestion, unknown_option
from lit_vgrpo.system.paths import missing_module, without_ending

CONSTRUCTOR_ERRORS = (ValueError, TypeError, RuntimeError, ModuleNotFoundError, OSError)
IS_FUNCTION = re.compile(r"^[\w./]+(:\w+|\.py)$")
KEY = re.compile(r"""Parser key ["']([\w.+]+)["']""")
OF_CONSTRUCTOR = re.compile(r"- (\w+=.*)")
OF_ITEM = re.compile(r"^  - (?!Not a valid |Expected |Does not )(?:Problem with given class_path .*\s+)?(.*)", re.M)
"""Of a union, the error of the constructor of a list's item."""
EXPECTED = re.compile(r"Expected (?:an? )?(<class '.+?'>|typing\.Literal\[.+?\])")
GIVEN = re.compile(r"(?:Given value|Got value): (.*?)(?:\. Got value: .*)?$", re.MULTILINE)
REQUIRED = re.compile(r"the following arguments are required: (.+)")
NAMED_IN = ("lit_vgrpo.", "lightning.", "torch.")
"""Packages of the classes that a recipe names."""
PAGES = {
    **{kind: f"docs/reference/{kind.lower()}s.md" for kind in ("Objective", "Reward", "Callback")},
    "Policy": "docs/reference/policies.md",
}
"""Pages that list the classes of a kind."""
TYPES = {"NoneType": "null", "list": WORDS["list"], "tuple": WORDS["tuple"], "dict": WORDS["dictionary"]}
TYPES |= {"int": WORDS["integer"], "float": WORDS["number"], "bool": WORDS["boolean"], "str": WORDS["string"]}


def built_part(tree: Mapping[str, Any], key: str, hint: Any, parse_only: bool = False) -> Any:
    """Build the part under a dotted key, or return ``None`` without one; raise UserError with the first error in it.

    Args:
        tree: Recipe as plain values, with overrides and interpolations applied.
        hint: Type hint of the part, usually its base class.
        parse_only: Find the errors that need no instance, and return ``None``.
    """
    if (node := _node(tree, key)) is None:
        return None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument(f"--{key}", type=hint)
    try:
        config = parser.parse_object({key: copy.deepcopy(node)})
        return None if parse_only else parser.instantiate_classes(config)[key]
    except (ArgumentError, *CONSTRUCTOR_ERRORS) as error:
        raise UserError(recipe_error(error, tree, {key: hint})) from error


def part_of_words(words: Sequence[str], key: str, hint: Any) -> Any:
    """Build the part that words name: ``PickScore checkpoint=/a/folder``; raise UserError with the first error.

    The first word may also be a value as in a recipe, ``{python: "my_module:my_function"}``.
    """
    tree: dict[Any, Any] = {key: words[0]}
    if words[0].startswith("{"):
        apply_override(tree, key, words[0])
    node = expanded(tree[key])
    tree[key] = {"class_path": node} if isinstance(node, str) else node
    for word in words[1:]:
        name, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            raise UserError(f"{word} is not an option of a {key}. Write options as key=value.")
        apply_override(tree, f"{key}.{name}", text)
    return built_part(tree, key, hint)


def recipe_error(error: BaseException, tree: Mapping[str, Any], hints: Mapping[str, Any]) -> str:
    """Return an error of jsonargparse or of a constructor in one line, starting with the key if it is known.

    Args:
        tree: The recipe as plain values.
        hints: Type hints of the parts that were parsed, by dotted key.
    """
    if isinstance(error, ArgumentError) or "Union subtypes" in str(error):
        found = (_misnamed(_node(tree, key), hint, tuple(key.split("."))) for key, hint in hints.items())
        return next(filter(None, found), None) or _parser_error(error, tree)
    plain = one_line(error) or type(error).__name__
    quoted = [place for place, value in leaves(tree) if isinstance(value, str) and repr(value) in plain]
    message = with_full_key(plain, tree)
    return error_in_user_code(error) or (f"{typed_key(quoted[0])}: {plain}" if quoted and message == plain else message)


def _node(tree: Any, key: str) -> Any:
    return reduce(lambda node, step: node.get(step) if isinstance(node, Mapping) else None, key.split("."), tree)


def _misnamed(node: Any, hint: Any, place: Place) -> str | None:
    """Return the error of the first class or option in a value that does not exist, or ``None``."""
    if isinstance(node, list) and not isinstance(place[-1], int):
        errors = (_misnamed({} if item is None else item, hint, (*place, number)) for number, item in enumerate(node))
        return next(filter(None, errors), None)
    key, kinds = typed_key(place), dict.fromkeys(_kinds(hint))
    classes = [kind for kind in kinds if kind.__module__.startswith(NAMED_IN) and not issubclass(kind, Enum)]
    others = kinds.keys() - {*classes, type(None)}
    name = node.get("class_path") if isinstance(node, Mapping) else node
    if not classes or node is None:
        return None
    owner: Any = None
    if isinstance(node, Mapping) and len(node) == 1 and str(first := next(iter(node))).startswith("python:"):
        name = first.removeprefix("python:")  # {python:module:function}, without a space
    if isinstance(name, str) and "Reward" in {kind.__name__ for kind in classes} and IS_FUNCTION.search(name):
        called = without_ending(name) if ":" in name else _function_in(Path(name))
        return f"{key}={name} names no class. {_function_form(key, called)}"
    if isinstance(name, str) and not (name is node and {str, dict, float, int} & others):
        if not isinstance(owner := _class_named(name, classes, key), type):
            return owner and f"{key}{owner}"
    elif name is None and dict not in others:
        owner = next((kind for kind in classes if len(place) == 1 or is_dataclass(kind)), None)
    elif isinstance(name, str) or others:
        return None
    if owner is None:
        if all(map(is_dataclass, classes)):
            return None
        if isinstance(node, float) and (settings := next(filter(is_dataclass, classes), None)):
            return f"{key}={node} names no class. Did you mean {key}.{next(iter(options_of_class(settings)))}={node}?"
        form = "{class_path: NAME, init_args: {OPTION: VALUE}}"
        form = f"[{form}]" if "list[" in str(hint) and not isinstance(place[-1], int) else form
        return f"{key}{'' if isinstance(node, Mapping) else f'={node}'} names no class. Write {form}."
    return _misnamed_option(node, owner, place) if isinstance(node, Mapping) else None


def _function_in(file: Path) -> str:
    """Return ``module:function`` of the first function in a file that takes images and prompts; it is not imported."""
    nodes, parts = list[ast.stmt](), file.with_suffix("").parts
    with suppress(OSError, SyntaxError, ValueError):
        nodes = ast.parse(file.read_bytes()).body
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and len(node.args.args) > 1]
    module = ".".join(parts) if all(map(str.isidentifier, parts)) else file.stem
    return f"{module}:{next((name for name in functions if name[0] != '_'), 'FUNCTION')}"


def _misnamed_option(node: Mapping[Any, Any], owner: Any, place: Place) -> str | None:
    """Return the error of the first option of a class that does not exist, or of a class in one, or ``None``."""
    key, options = typed_key(place), node
    if "class_path" in node:
        if misplaced := [option for option in node if option not in CLASS_KEYS]:
            form = f"{{class_path: {node['class_path']}, init_args: {{{misplaced[0]}: VALUE}}}}"
            return f"{key}: {misplaced[0]} is an option of the class. Write {form}."
        options = node.get("init_args") or {}
    if not isinstance(options, Mapping):
        return None
    known = options_of_class(owner)
    hints: dict[str, Any] = {}
    for base in reversed(owner.__mro__):
        with suppress(Exception):  # a hint that exists for type checkers only, or is no type
            hints |= typing.get_type_hints(base.__init__)
    for option, value in options.items():
        if option not in known:
            message = unknown_option(f"{key}.{option}", owner.__name__, known, "docs/reference")
            of_auto = "" if "call" in known else " of AutoPolicy"
            way = f" For an argument of the pipeline's call, set {key}.call.{option}{of_auto}."
            way = " The device is the trainer's: trainer.accelerator=gpu." if option == "device" else way
            start, listed, _ = message.partition(" Use one of")
            return start + way if key == "model.policy" and listed else message
        if error := _misnamed(value, hints.get(option), (*place, option)):
            return error
    return None


def _kinds(hint: Any) -> list[type]:
    """Return the classes that a hint accepts, also in a list or made by a callable; ``str`` for a literal."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (dict, typing.Literal):
        return [dict if origin is dict else str]
    if not arguments:
        return [hint] if inspect.isclass(hint) else []
    return [kind for inner in (arguments[-1:] if origin is Callable else arguments) for kind in _kinds(inner)]


def _function_form(key: str, called: str) -> str:
    return f"For a function, write {f'{key}.python={called}' if '.' in key else f'python:{called}'}."


def _class_named(name: str, kinds: Sequence[type], key: str) -> type | str | None:
    """Return a class by its path, or its name among the subclasses of some classes; an error, or ``None`` if unsure."""
    if "." not in name:
        bases = [kind for kind in kinds if kind.__subclasses__()]
        known = [kind for kind in _with_subclasses(kinds) if _is_offered(kind) and kind not in bases]
        matches = [kind for kind in known if kind.__name__ == name]
        if len(matches) == 1:
            return matches[0]
        by_name = {kind.__name__: kind.__name__ for kind in known}
        by_pipeline = {str(vars(kind).get("pipeline_class", "")): kind.__name__ for kind in known}
        meant = (by_pipeline | by_name).get(nearest(name, [*by_name, *by_pipeline]) or name, name)
        page = next((PAGES[kind.__name__] for kind in kinds if kind.__name__ in PAGES), "")
        hint = "Write it as package.module.Class." if matches else suggestion(meant, by_name, page)
        return f"={name} is not a known class. {hint}"
    try:
        found = resolve_name(name)
    except Exception as error:  # also of a module of the user
        owner: Any = getattr(error, "obj", None)  # the module that lacks the name
        names: Iterable[str] = getattr(owner, "__all__", getattr(owner, "__dict__", ()))
        fitting = [one for one in names if _fits(getattr(owner, one, None), kinds)]
        meant = f". {suggestion(getattr(error, 'name', name), fitting)}" if fitting else ""
        return f": {missing_module(error, name) or error_in_user_code(error) or one_line(error)}{meant}"
    try:
        if issubclass(found, tuple(kinds)):
            return found
    except TypeError:  # a protocol, or not a class
        if inspect.isclass(found) or "return" in getattr(found, "__annotations__", {}):
            return None
    wanted = next((kind.__name__ for kind in kinds if not is_dataclass(kind)), kinds[0].__name__)
    if wanted == "Reward" and inspect.isfunction(found):
        return f"={name} names no class. {_function_form(key, ':'.join(name.rsplit('.', 1)))}"
    return f"={name} is not {'an' if wanted[0] in 'AEIOU' else 'a'} {wanted}. Name one of its classes."


def _fits(value: Any, kinds: Sequence[type]) -> bool:
    with suppress(TypeError):  # a protocol, or not a class
        return issubclass(value, tuple(kinds)) and value not in kinds and not inspect.isabstract(value)
    return False


def _is_offered(kind: type) -> bool:
    """Return whether a class is public, and no base that only others are made from."""
    package = sys.modules.get(kind.__module__.rpartition(".")[0])
    is_public = kind.__name__ in getattr(package, "__all__", [kind.__name__]) and kind.__name__[0] != "_"
    return is_public and not inspect.isabstract(kind)


def _with_subclasses(kinds: Iterable[type]) -> Iterator[type]:
    for kind in kinds:
        yield from (kind, *_with_subclasses(kind.__subclasses__()))


def _parser_error(error: BaseException, tree: Mapping[str, Any]) -> str:
    text, reason = str(error), [*causes(error)][-1]
    key = ".".join(dict.fromkeys(KEY.findall(text))).replace(".init_args", "")
    if missing := REQUIRED.search(text):
        names = [f"{key}.{name}".removeprefix(".") for name in missing[1].split(", ")]
        node = _node(tree, key)
        if isinstance(node, list):  # the parser does not name the item, which is most often the last
            return (
                f"The recipe lacks {missing[1]} of one of {key}. Write it as {{class_path: NAME, init_args: {{...}}}}"
            )
        swapped = class_name(node) if len(names) == 1 else ""
        advice = "For a complete one: lightning init my_run"
        if swapped:  # naming another class drops the old one's options
            advice = f"{swapped} needs it: add {names[0]}=VALUE"
        return f"The recipe lacks {', '.join(names)}. {advice}"
    if message := OF_CONSTRUCTOR.search(text):
        return with_full_key(message[1], tree)
    if isinstance(reason, ValidationError):
        limit = reason.errors()[0]
        return f"{key}={limit['input']!r}: {should_be(limit['input'], [limit['msg']])}"
    value = GIVEN.search(text)  # of a union the errors of its types, then the value
    expected = [_type_name(kind) for kind in EXPECTED.findall(text[: value.start()] if value else "")]
    if literals := [kind for kind in expected if kind.startswith("'")]:
        expected = [*literals, "a mapping"] if "a dot import path" in text else expected
    if value is not None and expected and key:
        return f"{key}={value[1]}: {should_be(value[1], [f'{SHOULD}{kind}' for kind in expected])}"
    classes = {place: value.rpartition(".")[2] for place, value in leaves(tree) if isinstance(value, str)}
    named = [typed_key(place) for place, name in classes.items() if f".{name}'" in text]
    place, what = key or next(iter(named), ""), one_line(reason)
    if of_item := OF_ITEM.search(text):
        place, what = re.sub(r"\[\d+\]$", "", place), of_item[1]  # the text does not tell which item
    return f"{place}: {what}".removeprefix(": ")


def _type_name(kind: str) -> str:
    if choices := re.match(r"typing\.Literal(\[.*\])", kind):
        *others, last = map(repr, ast.literal_eval(choices[1]))
        return f"{', '.join(others)} or {last}" if others else last
    plain = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", kind)
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
