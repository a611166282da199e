"""Command-line options, declared as the fields of a dataclass."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from typing_extensions import Self

from lit_vgrpo.errors import RewardError, UserError, nearest, report, suggestion
from lit_vgrpo.system.process import is_first_process

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
SEVERAL = object()
"""Default of an option that may be given more than once."""


def option(default: Any = None, read: Callable[[str], Any] = str, name: str | None = None) -> Any:
    """Declare a field that is set by ``--name VALUE`` or ``--name=VALUE``.

    Args:
        default: Value without the option; ``SEVERAL`` collects the values of all its uses in a list.
        read: Turns the text into the value. Raises UserError with each error, without the option's name in front.
        name: Name on the command line; the field's by default.
    """
    stated: Any = {"default_factory": list} if default is SEVERAL else {"default": default}
    return field(**stated, metadata={"read": read, "name": name})


def flag() -> Any:
    """Declare a boolean field that ``--name`` sets to True."""
    return field(default=False, metadata={"read": None, "name": None})


def whole(default: int | None = None, least: int = 1, most: int | None = None, name: str | None = None) -> Any:
    """Declare an option that takes an integer from ``least`` to ``most``."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            example = 3 if default is None else default
            raise UserError(f"{text} is not a whole number. Use an integer such as {example}.") from None
        if number < least:
            raise UserError(f"{text} is too small. Use {least} or more.")
        if most is not None and number > most:
            raise UserError(f"{text} is too large. Use {most} or less.")
        return number

    return option(default, read, name)


def read_path(text: str) -> Path:
    """Return the path, with ``~`` replaced by the home directory."""
    return Path(text).expanduser()


@dataclass(kw_only=True)
class Options:
    """Arguments of a subcommand: a subclass declares its options; all others are positional words.

    ``__post_init__`` of a subclass computes derived fields. It raises UserError with every error.

    Attributes:
        subcommand: Name of the subcommand.
        takes_overrides: Whether an unknown ``--key VALUE`` without a dot is an override too, such as ``--name``.
        refused: Settings of a recipe that the subcommand sets itself, with the message for each.
        words: Everything that is not an option, in order: a recipe, a run, overrides as ``key=value``.
        typed: The arguments as they were typed.
    """

    subcommand: ClassVar[str]
    takes_overrides: ClassVar[bool] = False
    refused: ClassVar[Mapping[str, str]] = {}

    words: list[str]
    typed: Sequence[str] = ()

    @classmethod
    def parse(cls, args: Sequence[str]) -> Self:
        """Parse the arguments after the subcommand; an override is also taken as ``--key VALUE``.

        Raises:
            UserError: With every error, or with the first one that makes the other arguments ambiguous.
        """
        options = {(one.metadata["name"] or one.name).replace("_", "-"): one for one in fields(cls) if one.metadata}
        texts, words = cls._split(args, options)
        keys = [word.partition("=")[0] for word in words if is_override(word)]
        errors = [f"{key} {cls.refused[key]}" for key in keys if key in cls.refused]
        values: dict[str, Any] = {}
        for name, given in texts.items():
            try:
                values[options[name].name] = _value(options[name], given)
            except UserError as error:
                errors += [f"--{name} {message}" for message in error.errors]
        try:
            parsed = cls(words=words, typed=args, **values)
        except UserError as error:
            errors += error.errors
        if errors:
            raise UserError(*errors)
        return parsed

    @classmethod
    def _split(cls, args: Sequence[str], options: Mapping[str, Field[Any]]) -> tuple[dict[str, list[str]], list[str]]:
        """Return the texts of each option that was typed, and the words."""
        flags = [name for name, one in options.items() if one.metadata["read"] is None]
        texts: dict[str, list[str]] = {}
        words, pending = [], list(args)
        while pending:
            word = pending.pop(0)
            key, equals, text = word.removeprefix("--").partition("=")
            name = key.replace("_", "-")
            if not word.startswith("--"):
                words.append(word)
            elif name in flags and not equals:
                texts[name] = []
            elif name in flags:
                raise UserError(f"--{name} takes no value. Write --{name}.")
            elif name in options and (equals or pending):
                texts.setdefault(name, []).append(text if equals else pending.pop(0))
            elif name in options:
                raise UserError(f"--{name} has no value. Write --{name} VALUE.")
            elif key in cls.refused:
                raise UserError(f"{word} {cls.refused[key]}")
            elif cls.takes_overrides and not equals and get_close_matches(name, options, cutoff=0.75):
                raise UserError(f"{word} is not an option. Did you mean --{nearest(name, options)}?")
            elif not cls.takes_overrides and "." not in name:
                raise UserError(f"--{name} is not an option of {cls.subcommand}. {suggestion(name, options)}")
            elif not equals and not pending:
                raise UserError(f"{word} has no value. Write {key}=VALUE.")
            else:
                words.append(f"{key}={text if equals else pending.pop(0)}")
        return texts, words

    def has(self, name: str) -> bool:
        """Return True if ``--name`` was typed, whether or not its value is valid."""
        return any(word.partition("=")[0] == f"--{name}" for word in self.typed)


Given = TypeVar("Given", bound=Options)


def subcommand(
    options: type[Given], stopped: str | None = None
) -> Callable[[Callable[[Given], int]], Callable[[Sequence[str]], int]]:
    """Make a function of options one of arguments; turn errors into lines on stderr and an exit status.

    The status is the function's own; 2 for an error of the user, 1 for a failed reward or a full disk.

    Args:
        options: Class of its options.
        stopped: Line to report after Ctrl-C, with the status 130; ``None`` raises KeyboardInterrupt.
    """

    def decorate(body: Callable[[Given], int]) -> Callable[[Sequence[str]], int]:
        @wraps(body)
        def run(args: Sequence[str]) -> int:
            try:
                return body(options.parse(args))
            except UserError as error:
                errors, status = error.errors, 2
            except RewardError as error:
                errors, status = [str(error)], 1
            except KeyboardInterrupt:
                if stopped is None:
                    raise
                errors, status = [stopped], 130
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                where = f" {error.filename}" if error.filename else ""
                advice = "Free some space, or write to another disk (run_dir, TMPDIR)."
                report([f"Cannot write{where}: {error.strerror}. {advice}"])  # on any rank: each may have its own disk
                return 1
            if is_first_process():
                report(errors)
            return status

        return run

    return decorate


def _value(one: Field[Any], texts: list[str]) -> Any:
    if one.metadata["read"] is None:
        return True
    values = [one.metadata["read"](text) for text in texts]
    if one.default is MISSING:
        return values
    if len(values) > 1:
        raise UserError("is given twice. Give it once; separate several values by commas if it accepts them.")
    return values[0]


def is_override(word: str) -> bool:
    """Return True for ``key=value``; a path may also contain ``=``, but a key contains no slash.

    >>> is_override("data.train=a/b.txt"), is_override("runs/lr=1e-4/config.yaml")
    (True, False)
    """
    key, equals, _ = word.partition("=")
    return bool(key and equals) and "/" not in key
