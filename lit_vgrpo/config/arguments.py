"""The words after a verb: its own options, and those that go to the recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lit_vgrpo.errors import UserError, suggestion


def split_words(
    args: Sequence[str],
    verb: str,
    values: Collection[str],
    flags: Collection[str],
    taken: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], list[str]]:
    """A verb's options by name, and the words that are left, overrides as ``key=value``.

    Args:
        values: options that take a value, as ``--name VALUE`` or ``--name=VALUE``.
        flags: options that take none.
        taken: what to say of a setting that the verb makes itself.

    Raises:
        UserError: an unknown option, one without its value, or one that is given twice.

    >>> split_words(["tiny", "--out", "x", "--a.b=1"], "eval", ["out"], [])
    ({'out': 'x'}, ['tiny', 'a.b=1'])
    """
    given: dict[str, str] = {}
    rest = []
    pending = list(args)
    while pending:
        word = pending.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        name = key.replace("_", "-")
        if not word.startswith("--"):
            rest.append(word)
            continue
        if name in flags and not equals:
            given[name] = ""
            continue
        if name not in values and "." not in name:
            if taken is not None and key in taken:
                raise UserError(f"{word} {taken[key]}")
            raise UserError(f"--{name} is not an option of {verb}. {suggestion(name, (*values, *flags))}")
        if name in given:
            raise UserError(f"--{name} is given twice. Give it once, several values with commas where it takes them.")
        if not equals and not pending:
            raise UserError(f"--{name} has no value. Write --{name} VALUE.")
        text = text if equals else pending.pop(0)
        if name in values:
            given[name] = text
        else:
            rest.append(f"{key}={text}")
    return given, rest


def is_override(word: str) -> bool:
    """True for ``key=value``; a path may hold a ``=`` too, but no key a slash.

    >>> is_override("data.train=a/b.txt"), is_override("runs/lr=1e-4/config.yaml")
    (True, False)
    """
    key, equals, _ = word.partition("=")
    return bool(equals) and "/" not in key


def take_every(args: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """The values of an option that may be given several times, and the other words.

    Raises:
        UserError: it has no value.

    >>> take_every(["run", "--prompt", "a", "--prompt=b"], "prompt")
    (['a', 'b'], ['run'])
    """
    values: list[str] = []
    rest: list[str] = []
    pending = list(args)
    while pending:
        word = pending.pop(0)
        if word == f"--{name}":
            if not pending:
                raise UserError(f"--{name} has no value. Write --{name} VALUE.")
            values.append(pending.pop(0))
        elif word.startswith(f"--{name}="):
            values.append(word.partition("=")[2])
        else:
            rest.append(word)
    return values, rest


def whole_number(name: str, text: str, least: int, example: int, faults: list[str]) -> int:
    """The number that an option was given; a fault is added where it is none, or below ``least``, which is returned.

    >>> faults = []
    >>> whole_number("jobs", "two", 1, 3, faults), faults
    (1, ['--jobs two is not a whole number. Use an integer such as 3.'])
    """
    try:
        number = int(text)
    except ValueError:
        faults.append(f"--{name} {text} is not a whole number. Use an integer such as {example}.")
        return least
    if number < least:
        faults.append(f"--{name} {text} is too small. Use {least} or more.")
    return max(number, least)
