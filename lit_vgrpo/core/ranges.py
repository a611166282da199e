"""Ranges of numeric options and choices of words: type hints for pydantic, enforced by constructors.

A constructor declares ``num_times: Annotated[int, Range(least=1)] = 4``, and its class is :func:`checked`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, InstanceOf, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

T = TypeVar("T", bound=type)
SHOULD = "Input should be "


@dataclass(frozen=True)
class OnlyWith:
    """Annotation of an option that has no effect unless another has this value; None stands for any true value."""

    option: str
    value: Any = None


def Range(least: Any = None, most: Any = None, above: Any = None, below: Any = None) -> Any:
    """Return the annotation of a finite number from ``least`` to ``most``; ``above`` and ``below`` are exclusive."""
    return Field(ge=least, le=most, gt=above, lt=below)


Finite = Annotated[float, Range()]
PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
ClosedUnitInterval = Annotated[float, Range(0, 1)]
HalfOpenUnitInterval = Annotated[float, Range(least=0, below=1)]
GuidanceScale = Annotated[float, Range(1, 1000)]
BatchSize = Annotated[int, Range(1, 1_000_000)]
Count = Annotated[int, Range(1, 1_000_000)]
GroupSize = Annotated[int, Range(2, 10_000)]
Seed = Annotated[int, Range(0, 2**32 - 1)]


def checked(cls: T) -> T:
    """Make a class refuse arguments that do not fit the ranges, choices and classes that its constructor declares.

    Raises:
        TypeError: By the constructor, for an argument of another type.
        ValueError: By the constructor, for a number out of range, an unknown word, or an option without effect.

    >>> @checked
    ... class Timer:
    ...     def __init__(self, seconds: PositiveFloat | None = None) -> None: ...
    >>> Timer(seconds=0)
    Traceback (most recent call last):
    ValueError: seconds=0: Input should be greater than 0
    """
    init = vars(cls)["__init__"]
    signature = inspect.signature(init)

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError:
            given = {}  # the constructor raises Python's usual error
        for name, adapter in _adapters(cls).items():
            if name in given:
                _validate(name, given[name], adapter)
        _refuse_unused(cls, signature, given)
        init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _validate(name: str, value: Any, adapter: TypeAdapter[Any]) -> None:
    try:
        # Strict validation refuses a list for a tuple.
        adapter.validate_python(value, strict=not isinstance(value, list | tuple))
    except ValidationError as error:
        found = error.errors(include_url=False)
        words = [one["msg"].removeprefix(SHOULD) for one in found]
        kind = TypeError if all(one["type"].endswith(("_type", "is_instance_of")) for one in found) else ValueError
        raise kind(f"{name}={value!r:.100}: {SHOULD}{', or '.join(dict.fromkeys(words))}") from None


def _refuse_unused(cls: type, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    for name, value in given.items():
        for need in (note for note in _notes(_hints(cls).get(name)) if isinstance(note, OnlyWith)):
            other = given.get(need.option, defaults[need.option])
            if value != defaults[name] and (not other if need.value is None else other != need.value):
                wanted = need.option if need.value is None else f"{need.option}={need.value}"
                message = f"{name}={value!r} has no effect with {need.option}={other}. "
                raise ValueError(f"{message}Set {name}={defaults[name]}, or {wanted}.")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls if "__dataclass_fields__" in vars(cls) else cls.__init__, include_extras=True)  # type: ignore[misc]


@cache
def _adapters(cls: type) -> dict[str, TypeAdapter[Any]]:
    """Return the validators of the arguments that have a range, choices or ``InstanceOf``."""
    config, hints = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False), _hints(cls)
    return {
        name: TypeAdapter(hints[name], config=config)
        for kind in (FieldInfo, InstanceOf)  # numbers first
        for name in inspect.signature(cls).parameters
        if any(isinstance(note, kind) for note in _notes(hints.get(name)))
    }


def _notes(hint: Any) -> Iterator[Any]:
    """Yield the annotations of a hint and its members; a ``Literal`` counts as a range."""
    if typing.get_origin(hint) is Literal:
        yield Range()
        return
    yield from getattr(hint, "__metadata__", ())
    for member in typing.get_args(hint):
        yield from _notes(member)
