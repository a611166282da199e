"""Ranges of numeric options and choices of words: type hints for pydantic, enforced by constructors.

A constructor declares ``num_times: Annotated[int, Range(least=1)] = 4``, and its class is :func:`checked`.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union

from annotated_types import Interval
from pydantic import ConfigDict, InstanceOf, TypeAdapter, ValidationError

from lit_vgrpo.errors import nearest, shortened, unknown_option

T = TypeVar("T", bound=type)
SHOULD = "Use "
WORDS = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "text"}
WORDS |= {"list": "a list", "tuple": "a list", "dictionary": "a mapping"}


class OnlyWith:
    """Annotation of an option that has no effect unless another has one of these values; any true one without them."""

    def __init__(self, option: str, *values: Any) -> None:
        self.option, self.values = option, values

    def __repr__(self) -> str:
        return f"OnlyWith({', '.join(map(repr, (self.option, *self.values)))})"


class Range(Interval):
    """Annotation of a finite number from ``least`` to ``most``; ``above`` and ``below`` are exclusive."""

    __module__ = Interval.__module__  # jsonargparse leaves the annotations of no other module to pydantic

    def __init__(self, least: Any = None, most: Any = None, above: Any = None, below: Any = None) -> None:
        super().__init__(ge=least, le=most, gt=above, lt=below)

    def __repr__(self) -> str:
        ends = {"least": self.ge, "most": self.le, "above": self.gt, "below": self.lt}
        return f"Range({', '.join(f'{name}={end}' for name, end in ends.items() if end is not None)})"


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
DTYPES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Other names of number types, for suggestions."""
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that a name may be given for."""


def checked(cls: T) -> T:
    """Make a class refuse arguments that do not fit the ranges, choices and classes that its constructor declares.

    The options of a dataclass may be given as a mapping, as in a recipe. pydantic's ``validate_call`` would pass
    converted copies on, and report in several lines.

    Raises:
        TypeError: By the constructor, for an argument of another type, or one that does not exist.
        ValueError: By the constructor, for a number out of range, an unknown word, or an option without effect.

    >>> @checked
    ... class Timer:
    ...     def __init__(self, seconds: PositiveFloat | None = None) -> None: ...
    >>> Timer(seconds=0)
    Traceback (most recent call last):
    ValueError: seconds=0: Use a number above 0.
    """
    init = vars(cls)["__init__"]
    signature = inspect.signature(init)

    @wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            _refuse_unknown(cls, signature, kwargs)
            _refuse_incomplete(cls, signature, (self, *args), kwargs)
            return init(self, *args, **kwargs)  # it raises Python's usual error
        for name, value in bound.arguments.items():
            kinds = [kind for kind in _members(_hints(cls).get(name)) if is_dataclass(kind)]
            if isinstance(value, Mapping) and len(kinds) == 1:
                bound.arguments[name] = kinds[0](**value)  # type: ignore[operator]
        for name, adapter in _adapters(cls).items():
            if name in bound.arguments:
                _validate(name, bound.arguments[name], adapter, _hints(cls)[name])
        _refuse_unused(cls, signature, bound.arguments)
        init(*bound.args, **bound.kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _validate(name: str, value: Any, adapter: TypeAdapter[Any], hint: Any) -> None:
    try:
        # Strict validation refuses a list for a tuple.
        adapter.validate_python(value, strict=not isinstance(value, list | tuple))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        kind = TypeError if all(one["type"].endswith(("_type", "is_instance_of")) for one in problems) else ValueError
        advice = "".join(f" {member.TO_PASS}" for member in _members(hint) if hasattr(member, "TO_PASS"))
        shown, message = shortened(repr(value), 100), should_be(value, [one["msg"] for one in problems])
        if advice and hasattr(type(value), "TO_PASS"):
            shown, advice = type(value).__name__, " The order is policy, objective, reward."
        raise kind(f"{name}={shown}: {message}{advice}") from None


def should_be(value: Any, messages: Iterable[str]) -> str:
    """Return pydantic's messages on a value as one sentence, and the word that was probably meant.

    >>> should_be("float6", ["Input should be 'float32' or 'float16'", "Input should be a valid integer"])
    "Use 'float32' or 'float16', or an integer. Did you mean float16?"
    """
    first, *others = dict.fromkeys(map(limit_in_words, messages))
    text = ", or ".join([first, *(message.removeprefix(SHOULD) for message in others)])
    guess = nearest(DTYPES.get(value, value), re.findall(r"'([^']+)'", text)) if isinstance(value, str) else None
    return f"{text}." if guess is None else f"{text}. Did you mean {guess}?"


def limit_in_words(message: str) -> str:
    """Return pydantic's message as a value to use.

    >>> limit_in_words("Input should be greater than or equal to 2")
    'Use 2 or more'
    >>> limit_in_words("Input should be a valid number, unable to parse string as a number")
    'Use a number'
    """
    if "Input should be " not in message:
        return message
    message = re.sub(r"greater than or equal to (\S+)", r"\1 or more", message)
    message = re.sub(r"less than or equal to (\S+)", r"\1 or less", message)
    message = message.replace("should be greater than ", "should be a number above ")
    message = message.replace("should be less than ", "should be a number below ")
    message = re.sub(r"(?:, unable to parse|; got|, got) .*", "", message)
    message = re.sub(r"a valid (\w+)", lambda found: WORDS.get(found[1], found[0]), message)
    return message.replace("Input should be ", SHOULD)


def _refuse_unknown(cls: type, signature: inspect.Signature, given: Iterable[str]) -> None:
    known = [*signature.parameters][1:]
    parts = {option: kind for option in known for kind in _members(_hints(cls).get(option)) if is_dataclass(kind)}
    for name in (name for name in given if name not in known):
        owners = [f"{option}={kind.__name__}" for option, kind in parts.items() if name in _hints(kind)]  # type: ignore[union-attr,arg-type]
        message = f"{name} is not an option of {cls.__name__}. Pass {owners[0]}({name}=...)." if owners else None
        raise TypeError(message or unknown_option(name, cls.__name__, known, "docs/reference")) from None


def _refuse_incomplete(cls: type, signature: inspect.Signature, args: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Name the arguments that are missing; those that come in excess are left to Python."""
    options = [*signature.parameters.values()][len(args) :]
    missing = [one.name for one in options if one.default is one.empty and one.kind in NAMED and one.name not in given]
    if missing:
        shown = ", ".join(f"{name}=..." for name in missing)
        raise TypeError(f"{cls.__name__} lacks {' and '.join(missing)}. Pass {cls.__name__}(..., {shown}).") from None


def _refuse_unused(cls: type, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    for name, value in given.items():
        for need in (note for note in _notes(_hints(cls).get(name)) if isinstance(note, OnlyWith)):
            other = given.get(need.option, defaults[need.option])
            if value != defaults[name] and (other not in need.values if need.values else not other):
                wanted = f"{need.option}={' or '.join(map(str, need.values))}" if need.values else need.option
                message = f"{name}={value!r} has no effect with {need.option}={other}. "
                raise ValueError(f"{message}Set {name}={defaults[name]}, or {wanted}.")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls if "__dataclass_fields__" in vars(cls) else cls.__init__, include_extras=True)  # type: ignore[misc]


@cache
def _adapters(cls: type) -> dict[str, TypeAdapter[Any]]:
    """Return the validators of the arguments, those with a range first."""
    config, hints = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False), _hints(cls)
    names = [name for name in inspect.signature(cls).parameters if name in hints]
    names.sort(key=lambda name: not any(isinstance(note, Interval) for note in _notes(hints[name])))
    validated = {name: _validated(hints[name]) for name in names}
    return {name: TypeAdapter(hint, config=config) for name, hint in validated.items() if hint is not Any}


def _validated(hint: Any) -> Any:
    """Return what is validated of a hint: all but ``Any``, for which Python takes more than a recipe can name."""
    origin = typing.get_origin(hint)
    if origin is Annotated and any(isinstance(note, Interval | InstanceOf) for note in hint.__metadata__):
        return hint
    members = tuple(map(_validated, _members(hint)))
    if origin in (Annotated, Union, UnionType):
        return Any if Any in members else Union[members]  # noqa: UP007
    if origin in (list, tuple):
        return origin[members]
    if is_dataclass(hint):  # an instance of its base class has the same options
        return InstanceOf[next(base for base in reversed(hint.__mro__) if is_dataclass(base))]  # type: ignore[misc,union-attr]
    return hint if origin is Literal or hint in (bool, NoneType, Ellipsis) else Any


def _members(hint: Any) -> tuple[Any, ...]:
    return (hint.__origin__,) if typing.get_origin(hint) is Annotated else typing.get_args(hint)


def _notes(hint: Any) -> Iterator[Any]:
    """Yield the annotations of a hint and its members; a ``Literal`` counts as a range."""
    if typing.get_origin(hint) is Literal:
        yield Range()
        return
    yield from getattr(hint, "__metadata__", ())
    for member in typing.get_args(hint):
        yield from _notes(member)
