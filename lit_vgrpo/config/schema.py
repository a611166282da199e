"""Validation of a recipe against the constructors' signatures.

jsonargparse decides whether a recipe is valid, and stops at the first error. This module walks the plain recipe along
the same type hints and reports all errors at once, each with its dotted key and the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from importlib import import_module
from itertools import chain
from pathlib import PurePath
from typing import Any, Literal, Union

from jsonargparse import ArgumentParser

from lit_vgrpo.core.ranges import RANGES_OF_OTHERS, range_errors
from lit_vgrpo.errors import suggestion, unknown_option, with_key

UNBUILT = object()
"""Placeholder for a value with an error, or of a class from another package."""

CONSTRUCTOR_ERRORS = (ValueError, TypeError, RuntimeError, ModuleNotFoundError, OSError)


def recipe_errors(recipe: Mapping[str, Any], roots: Mapping[str, Any], linked: Mapping[str, str]) -> list[str]:
    """Return all errors of a recipe, one line each, in the order of its keys.

    Args:
        recipe: Plain recipe with overrides and interpolations applied.
        roots: Top-level key -> class or type hint.
        linked: Dotted keys that cannot be set -> the key to set instead.
    """
    return _walked(recipe, roots, linked).errors


def sound_parts(recipe: Mapping[str, Any], roots: Mapping[str, Any], linked: Mapping[str, str]) -> dict[str, Any]:
    """Build the valid parts of a recipe, by dotted key; arguments as in :func:`recipe_errors`."""
    return _walked(recipe, roots, linked).built


def early_errors(
    overrides: Sequence[tuple[str, str]], recipe: Mapping[str, Any], roots: Mapping[str, Any], linked: Mapping[str, str]
) -> list[str]:
    """Return all errors if the parser would miss one, else none.

    The parser accepts a number outside its range as another member of a union, and a forbidden null as a string.
    """
    walk = _walked(recipe, roots, linked)
    nulls = tuple(f"{key.replace('.init_args', '')}=null " for key, text in overrides if text in ("null", "~"))
    return walk.errors if walk.out_of_range or any(error.startswith(nulls) for error in walk.errors) else []


def options_of_class(cls: type) -> list[str]:
    """Return the names of the options of a class."""
    return list(_parameters(cls)[0])


def _walked(recipe: Mapping[str, Any], roots: Mapping[str, Any], linked: Mapping[str, str]) -> _Walk:
    walk = _Walk(linked)
    for key in recipe:
        if key not in roots:
            walk.errors.append(f"{key} is not an option of a recipe. {suggestion(key, roots)}")
    for key, hint in roots.items():
        if inspect.isclass(hint) and _is_component(hint):
            walk.arguments(hint, recipe.get(key) or {}, key)
        elif recipe.get(key) is not None:
            walk.value(recipe[key], hint, key)
    return walk


class _Walk:
    def __init__(self, linked: Mapping[str, str]) -> None:
        self.linked = linked
        self.errors: list[str] = []
        self.out_of_range: list[str] = []
        self.built: dict[str, Any] = {}

    def value(self, value: Any, hint: Any, key: str) -> Any:
        """Check one value; return the constructor's argument, or UNBUILT."""
        options = _options(hint)
        if value is None and (type(None) in options or Any in options):
            return None
        if value is None:
            self.errors.append(_wrong_value("null", hint, key))
            return UNBUILT
        bases = [option for option in options if inspect.isclass(option) and _is_component(option)]
        plain = [option for option in options if inspect.isclass(option) and dataclasses.is_dataclass(option)]
        is_text = isinstance(value, str) and bases == plain and str not in options
        if plain and (is_text or (isinstance(value, Mapping) and "class_path" not in value)):
            return self.arguments(plain[0], value, key)
        made = [cls for option in options for cls in _made_by(option)]
        if made and isinstance(value, Mapping) and "class_path" in value:
            self.component(value, [*bases, *made], key, made)
            return UNBUILT
        if bases and isinstance(value, str | Mapping) and not (isinstance(value, str) and str in options):
            return self.component(value, bases, key)
        item = _item_hint(options)
        if isinstance(value, list) and item is not None:
            items = [self.value(entry, item, f"{key}[{number}]") for number, entry in enumerate(value)]
            return UNBUILT if any(entry is UNBUILT for entry in items) else items
        return self.leaf(value, hint, key)

    def component(
        self, value: str | Mapping[str, Any], bases: Sequence[type], key: str, made: Sequence[type] = ()
    ) -> Any:
        """Check a class_path with its init_args; the first argument of ``made`` classes is passed later."""
        node: Mapping[str, Any] = {"class_path": value} if isinstance(value, str) else value
        known = {name: cls for base in bases for name, cls in _subclasses(base).items()}
        if "class_path" not in node:
            self.errors.append(f"{key} has no class_path. {suggestion('', known) if known else 'Add one.'}")
            return UNBUILT
        extra = set(node) - {"class_path", "init_args", "dict_kwargs"}
        path = str(node["class_path"])
        cls = _find_class(path, known)
        if cls is None or (made and not issubclass(cls, tuple(bases))):
            what = " or ".join(base.__name__ for base in bases)
            hint = suggestion(path, known) if known else "Write it as package.module.Class."
            self.errors.append(f"{key}={path} is not an importable {what}. {hint}")
            return UNBUILT
        for name in sorted(extra):
            self.errors.append(f"{key}.{name} is next to class_path. Put it under {key}.init_args.")
        return self.arguments(cls, node.get("init_args") or {}, key, issubclass(cls, tuple(made)))

    def arguments(self, cls: type, given: Any, key: str, is_made: bool = False) -> Any:
        """Check the arguments of a class; build it if it is from this package."""
        before = len(self.errors)
        parameters, open_ended = _parameters(cls)
        if is_made:
            parameters.pop(next(iter(parameters)))
        if not isinstance(given, Mapping):
            example = ", ".join(f"{name}: ..." for name in list(parameters)[:2])
            self.errors.append(f"{key}={given} is not a mapping of {cls.__name__}'s options. Write {{{example}}}.")
            return UNBUILT
        hints = _hints(cls)
        kwargs: dict[str, Any] = {}
        for name, value in given.items():
            dotted = f"{key}.{name}"
            if dotted in self.linked:
                self.errors.append(
                    f"{dotted} follows {self.linked[dotted]}. Set {self.linked[dotted]}={value} instead."
                )
            elif name in parameters:
                as_default = value is None and parameters[name].default is None  # allowed by any type hint
                kwargs[name] = None if as_default else self.value(value, hints.get(name, Any), dotted)
            elif not open_ended:
                self.errors.append(unknown_option(dotted, cls.__name__, parameters))
        for name, parameter in parameters.items():
            if (
                parameter.default is inspect.Parameter.empty
                and name not in given
                and f"{key}.{name}" not in self.linked
            ):
                self.errors.append(f"{key}.{name} is missing: {cls.__name__} needs it. {_advice(key, name, hints)}")
        ours = cls.__module__.split(".")[0] == "lit_vgrpo"
        if len(self.errors) > before or not ours or any(entry is UNBUILT for entry in kwargs.values()):
            return UNBUILT
        try:
            self.built[key] = cls(**kwargs)
        except CONSTRUCTOR_ERRORS as error:
            self.errors.append(with_key(key, parameters, error))
            return UNBUILT
        return self.built[key]

    def leaf(self, value: Any, hint: Any, key: str) -> Any:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--value", type=hint)
        try:
            parsed = parser.parse_object({"value": value}).value
        except (ArgumentError, TypeError, ValueError):
            found = [*range_errors(key, value, hint)]
            self.errors += [str(error) for error in found] or [_wrong_value(value, hint, key)]
        else:
            if not (found := [*range_errors(key, parsed, hint)]):
                return parsed
            self.errors.append(str(next(chain(range_errors(key, value, hint), found))))
        self.out_of_range += [key for _ in found]
        return UNBUILT


def _wrong_value(value: Any, hint: Any, key: str) -> str:
    if value == "":
        return f"{key}= has no value. Give {describe(hint)}."
    words = [option for option in _options(hint) if typing.get_origin(option) is Literal]
    choices = [str(choice) for option in words for choice in typing.get_args(option)]
    others = [option for option in _options(hint) if option not in words and option is not type(None)]
    if choices and others:
        return (
            f"{key}={value} has the wrong type. Give {' or '.join(map(describe, others))}, or {' or '.join(choices)}."
        )
    if choices:
        return f"{key}={value} is not a choice. {suggestion(str(value), choices)}"
    several = _takes_several(hint) if isinstance(value, list) else None
    if several is not None:
        return f"{key} is a list, but accepts one {several[0]}. Put them into {several[1]}."
    return f"{key}={value} has the wrong type. Give {describe(hint)}."


def _takes_several(hint: Any) -> tuple[str, str] | None:
    """Return the option's base class and, in recipe syntax, its subclass that combines several."""
    for base in _options(hint):
        if inspect.isclass(base) and _is_component(base):
            for cls in _subclasses(base).values():
                names = [name for name, option in _hints(cls).items() if option == list[base]]  # type: ignore[valid-type]
                if names:
                    return base.__name__, f"class_path: {cls.__name__}, init_args: {{{names[0]}: [...]}}"
    return None


def describe(hint: Any) -> str:
    """Describe a type hint in words.

    >>> describe(int | None)
    'an int or null'
    >>> describe(list[str])
    'a list of str'
    >>> describe(str | dict[str, int])
    'a text or a mapping'
    """
    names = {
        int: "an int",
        float: "a number",
        str: "a text",
        bool: "true or false",
        type(None): "null",
        dict: "a mapping",
    }
    words = []
    for option in _options(hint):
        item = _item_hint([option])
        if option in names:
            words.append(names[option])
        elif typing.get_origin(option) is dict:
            words.append(names[dict])
        elif item is not None:
            words.append(f"a list of {getattr(item, '__name__', None) or describe(item)}")
        else:
            name = getattr(option, "__name__", str(option))
            words.append(f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
    return " or ".join(words)


def _options(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [option for argument in typing.get_args(hint) for option in _options(argument)]
    if typing.get_origin(hint) is typing.Annotated:
        return _options(typing.get_args(hint)[0])
    return [hint]


def _made_by(option: Any) -> list[type]:
    """Return the classes that a hint such as ``Callable[[Iterable], Optimizer]`` returns."""
    if typing.get_origin(option) is not Callable or not typing.get_args(option):
        return []
    return [cls for cls in _options(typing.get_args(option)[1]) if inspect.isclass(cls) and _is_component(cls)]


def _item_hint(options: Sequence[Any]) -> Any:
    for option in options:
        origin = typing.get_origin(option)
        if inspect.isclass(origin) and origin is not str and issubclass(origin, Iterable):
            arguments = typing.get_args(option)
            if len(arguments) == 1 or (len(arguments) == 2 and arguments[1] is ...):
                return arguments[0]
    return None


def _is_component(cls: type) -> bool:
    """Return True for a class that a recipe names by class_path or describes by its options."""
    if typing.get_origin(cls) is not None or issubclass(cls, Enum | PurePath):
        return False
    return cls.__module__ not in ("builtins", "typing", "collections.abc", "datetime", "torch")


def _constructors(cls: type) -> Iterator[type]:
    """Yield the class, then each base class that its ``**kwargs`` reach."""
    for owner in cls.__mro__:
        if owner is cls or ("__init__" in vars(owner) and owner is not object):
            yield owner
            if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(owner).parameters.values()):
                return


def _parameters(cls: type) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters by name, and whether the constructor accepts others."""
    named: dict[str, inspect.Parameter] = {}
    open_ended = False
    for owner in _constructors(cls):
        own = inspect.signature(owner).parameters.values()
        plain = {p.name: p for p in own if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        named, open_ended = {**named, **{k: p for k, p in plain.items() if k not in named}}, len(plain) < len(own)
    return named, open_ended


def _hints(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for owner in _constructors(cls):
        function: Callable[..., Any] = inspect.unwrap(owner.__init__)  # type: ignore[misc]
        try:
            found = {**typing.get_type_hints(function, include_extras=True), **found}
        except (NameError, TypeError, AttributeError):  # a name imported only for type checkers
            continue
    return {**found, **RANGES_OF_OTHERS.get(cls, {})}


def _subclasses(base: type) -> dict[str, type]:
    """Return the concrete subclasses by short name; ours win over others of the same name."""
    found: dict[str, type] = {}
    pending = [base]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        private = cls.__name__.startswith("_") or any(part.startswith("_") for part in cls.__module__.split("."))
        general = cls is base and bool(cls.__subclasses__())
        abstract = general or inspect.isabstract(cls) or getattr(cls, "_is_protocol", False)
        if not abstract and not private and (cls.__name__ not in found or "lit_vgrpo" in cls.__module__):
            found[cls.__name__] = cls
    return dict(sorted(found.items(), key=lambda item: ("lit_vgrpo" not in item[1].__module__, item[0])))


def _find_class(path: str, known: Mapping[str, type]) -> type | None:
    if "." not in path:
        return known.get(path)
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name, None)
    except (ImportError, ValueError):
        return None
    return found if inspect.isclass(found) else None


def _advice(key: str, name: str, hints: Mapping[str, Any]) -> str:
    options = _options(hints.get(name, Any))
    names = [
        known
        for option in options
        if inspect.isclass(option) and _is_component(option)
        for known in _subclasses(option)
    ]
    if names:
        return f"Add {key}.{name} with class_path, one of: {', '.join(sorted(set(names)))}."
    return f"Add {key}.{name}=..."
