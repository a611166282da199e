"""Valid ranges of numeric options and choices of words, declared in type hints and checked by constructors.

A constructor declares ``num_times: Annotated[int, Range(least=1)] = 4``, and its class is :func:`checked`.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union

T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Range:
    """A range of finite numbers.

    Args:
        least: the smallest valid number.
        most: the largest valid number.
        above: exclusive lower bound.
        below: exclusive upper bound.
        example: a typical value, for the message.
        small: why a smaller number is wrong, if not obvious.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    example: float | None = None
    small: str = "is too small"

    def __str__(self) -> str:
        """Describe the range in words.

        >>> print(Range(least=1), Range(above=0, example=0.1), Range(least=0, below=1), Range(1, 95), sep=" / ")
        1 or more / a number above 0 such as 0.1 / a number in [0, 1) / 1 to 95
        """
        low, high = self.least if self.above is None else self.above, self.most if self.below is None else self.below
        if low is None and high is None:
            words = "a finite number"
        elif high is None:
            words = f"{low:g} or more" if self.above is None else f"a number above {low:g}"
        elif low is None:
            words = f"{high:g} or less" if self.below is None else f"a number below {high:g}"
        elif self.above is None and self.below is None:
            words = f"{low:,.10g} to {high:,.10g}" if high > 1 else f"a number from {low:g} to {high:g}"
        else:
            first, last = "[" if self.above is None else "(", "]" if self.below is None else ")"
            words = f"a number in {first}{low:g}, {high:g}{last}"
        return words if self.example is None else f"{words} such as {self.example:g}"

    def reason(self, value: float) -> str | None:
        """Return why a number is invalid, or ``None``."""
        if isinstance(value, float) and not math.isfinite(value):
            return "is not a finite number"
        if (self.least is not None and value < self.least) or (self.above is not None and value <= self.above):
            return self.small
        if (self.most is not None and value > self.most) or (self.below is not None and value >= self.below):
            return "is too large"
        return None


Finite = Annotated[float, Range()]
PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
ClosedUnitInterval = Annotated[float, Range(0, 1)]
OpenUnitInterval = Annotated[float, Range(above=0, below=1)]
HalfOpenUnitInterval = Annotated[float, Range(least=0, below=1)]
"""Decay rates: 1 would never change the average."""
GuidanceScale = Annotated[float, Range(1, 1000)]
BatchSize = Annotated[int, Range(1, 1_000_000)]
"""Batch sizes; a larger number is a typing error."""
Count = Annotated[int, Range(1, 1_000_000)]
GroupSize = Annotated[int, Range(2, 10_000, small="has no group to compare with")]
Seed = Annotated[int, Range(0, 2**32 - 1)]


def checked(cls: T) -> T:
    """Make a class refuse arguments outside the ranges, and words not among the choices, that its constructor declares.

    Raises:
        TypeError: by the constructor, for an argument that is not a number, or not a whole number if required.
        ValueError: by the constructor, for a number outside its range or not finite, or an unknown word.

    >>> @checked
    ... class Timer:
    ...     def __init__(self, seconds: PositiveFloat | None = None) -> None: ...
    >>> Timer(seconds=0)
    Traceback (most recent call last):
    ValueError: seconds=0 is too small. Use a number above 0, or null.
    """
    init = vars(cls)["__init__"]
    parameters = inspect.signature(init)

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = parameters.bind(self, *args, **kwargs).arguments
        except TypeError:
            given = {}  # the constructor raises Python's usual error
        hints = declared(cls if "__dataclass_fields__" in vars(cls) else init)
        for name, value in given.items():
            for error in (*range_errors(name, value, hints.get(name)), *choice_errors(name, value, hints.get(name))):
                raise error
        init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


RANGES_OF_OTHERS: dict[type, Mapping[str, Any]] = {}
"""Type hints with ranges for classes of other packages, by argument."""


@cache
def declared(source: Any) -> Mapping[str, Any]:
    """Return a constructor's or dataclass's type hints, including ranges."""
    return typing.get_type_hints(source, include_extras=True)


def range_errors(name: str, value: Any, hint: Any) -> Iterator[TypeError | ValueError]:
    """Yield at most one error of an argument's numbers.

    Args:
        name: the argument's name, for the message.
        value: a number, or a sequence of numbers.
        hint: its type hint; without a range there are no errors.
    """
    for kind, wrong, reason, advice in _errors(value, hint):
        shown = list(value) if isinstance(value, tuple) else value
        which = reason if wrong is value else f"holds {wrong}, which {reason}"
        yield kind(f"{name}={shown} {which}. Use {advice}{'' if wrong is value else ' for each'}.")
        return


def choice_errors(name: str, value: Any, hint: Any) -> Iterator[ValueError]:
    """Yield an error of an argument that is not among the choices of its type hint.

    Args:
        name: the argument's name, for the message.
        value: what was given.
        hint: its type hint; there are no errors unless it is a ``Literal``, or one of them or ``None``.

    >>> [str(error) for error in choice_errors("dtype", "int8", Literal["float32", "bfloat16"] | None)]
    ["dtype='int8' is unknown. Use one of: float32, bfloat16."]
    """
    options = options_of(hint)
    words = _words(options)
    others = [option for option in options if typing.get_origin(option) is not Literal]
    if words and others in ([], [type(None)]) and value not in [*words, *(None for _ in others)]:
        yield ValueError(f"{name}={value!r} is unknown. Use one of: {', '.join(map(str, words))}.")


def _errors(value: Any, hint: Any) -> Iterator[tuple[type[TypeError | ValueError], Any, str, str]]:
    """Yield the kind of error, the wrong number, the reason, and what to use."""
    options = options_of(hint)
    ranges = [(option.__origin__, limit) for option in options for limit in _limits(option)]
    words = _words(options)
    kinds = [typing.get_origin(option) or option for option in options]
    if any(isinstance(value, kind) for kind in kinds if kind in (bool, str, dict, type(None))):
        return
    if isinstance(value, list | tuple) and (list in kinds or tuple in kinds):
        for option in options:
            for item, item_hint in _items(value, option):
                yield from _errors(item, item_hint)
    elif ranges and value not in words:
        others = [*map(str, words), *(["null"] if type(None) in options else [])]
        advice = ", or ".join([*(str(limit) for _, limit in ranges), *others])
        fitting = [limit for kind, limit in ranges if _is_number(value, kind)]
        if not fitting:
            what = "number" if float in dict(ranges) else "whole number"
            yield TypeError, value, "has no value" if value == "" else f"is not a {what}", advice
        elif (reason := fitting[0].reason(value)) is not None:
            yield ValueError, value, reason, advice


def _items(values: Sequence[Any], hint: Any) -> list[tuple[Any, Any]]:
    """Return the entries of a list or tuple with their type hints."""
    hints = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and len(hints) == len(values):
        return list(zip(values, hints, strict=True))
    return [(value, hints[0]) for value in values] if len(hints) == 1 else []


def options_of(hint: Any) -> list[Any]:
    """Return the members of a union including ranges, or the hint itself."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return [option for argument in typing.get_args(hint) for option in options_of(argument)]
    return [hint]


def _words(options: Sequence[Any]) -> list[Any]:
    return [word for option in options if typing.get_origin(option) is Literal for word in typing.get_args(option)]


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)


def _limits(option: Any) -> list[Range]:
    return [limit for limit in getattr(option, "__metadata__", ()) if isinstance(limit, Range)]
