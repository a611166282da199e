"""Mistakes of the user, said in one line: what is wrong, which value, what to type next."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

LONGEST_LIST = 12  # names shown where nothing is near
HARMLESS = "\n\t\u200c\u200d"


class UserError(Exception):
    """One or more mistakes in a recipe or on the command line; each is a line, shown without a traceback."""

    def __init__(self, *errors: str) -> None:
        super().__init__("\n".join(errors))
        self.errors = [one_line(error) for error in errors]


class RewardError(RuntimeError):
    """A reward broke its contract, or explains in one line why it cannot score; may quote a server."""

    def __init__(self, *words: object) -> None:
        super().__init__(*map(one_line, words))


def without_controls(text: object) -> str:
    """Return the text with ``?`` for escape sequences and changes of direction, which a terminal would obey.

    Line ends and tabs stay, and so do the joiners that some scripts and emoji need.

    >>> without_controls("a\\x1b[31mb\\r\\n")
    'a?[31mb?\\n'
    """
    return "".join(letter if letter.isprintable() or letter in HARMLESS else "?" for letter in str(text))


def one_line(text: object) -> str:
    """Return the text with every run of white space turned into one blank, and without control characters.

    >>> one_line("two\\n   lines")
    'two lines'
    """
    return without_controls(" ".join(str(text).split()))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in the singular or plural.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def printable(body: bytes, most: int) -> str:
    """Return the first letters of something that came from outside, in one line and safe to print.

    >>> printable(b"a\\n\\x1b[31mb", 9)
    'a ?[31mb'
    """
    return one_line(body[: 2 * most].decode("utf-8", errors="replace"))[:most]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, or ``None``.

    >>> nearest("num_mc_sample", ["clip", "num_mc_samples"])
    'num_mc_samples'
    """
    known = list(known)
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    folded = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """``Did you mean X?`` where something is near, else the list of what there is.

    >>> suggestion("grean", ["red", "green"])
    'Did you mean green?'
    >>> suggestion("xyz", ["red", "green"])
    'Use one of: red, green.'
    """
    known = list(dict.fromkeys(known))
    guess = nearest(word, known)
    if guess is not None:
        return f"Did you mean {guess}?"
    if not known:
        return "It takes no options."
    shown = ", ".join(known[:LONGEST_LIST])
    return f"Use one of: {shown}." if len(known) <= LONGEST_LIST else f"Use one of: {shown}, ..."


def unknown_option(key: str, owner: str, options: Iterable[str]) -> str:
    """Return the message for a key that ``owner`` does not have.

    >>> unknown_option("model.objective.num_mc_sample", "VGRPO", ["num_mc_samples", "clip"])
    'model.objective.num_mc_sample is not an option of VGRPO. Did you mean num_mc_samples?'
    >>> unknown_option("model.objective.rollout.steps:4", "RolloutSpec", ["steps"])
    'model.objective.rollout.steps:4 has no space after its colon. Write {steps: 4}.'
    """
    name = key.rsplit(".", 1)[-1]
    word, colon, value = name.partition(":")
    options = list(options)
    if colon and word in options:
        return f"{key} has no space after its colon. Write {{{word}: {value}}}."
    return f"{key} is not an option of {owner}. {suggestion(name, options)}"


def with_key(key: str, options: Iterable[str], error: object) -> str:
    """Return a constructor's own message, with the dotted key in front of the argument that it starts with.

    >>> with_key("data", ["group_size"], "group_size=1 has no spread. Use 2 or more.")
    'data.group_size=1 has no spread. Use 2 or more.'
    >>> with_key("model.rollout", ["steps"], "rollout.steps=0 samples nothing.")
    'model.rollout.steps=0 samples nothing.'
    >>> with_key("model.policy", ["alpha", "rank"], "alpha=8 has no effect. Set rank=8 too.")
    'model.policy.alpha=8 has no effect. Set model.policy.rank=8 too.'
    >>> with_key("model.reward", ["checkpoint"], "no such file")
    'model.reward: no such file'
    """
    message = one_line(error)
    if message.startswith(f"{key}.") or message.startswith(f"{key}="):
        return message
    parent, _, own = key.rpartition(".")
    if parent and re.match(rf"{re.escape(own)}[.=]", message):
        return f"{parent}.{message}"
    if not key:
        return message
    dotted = with_full_keys(key, options, message)
    word = re.match(r"\w+", message)
    if dotted.startswith(f"{key}.") or word is None:
        return dotted
    return f"{key}.{dotted}" if word.group() in set(options) else f"{key}: {dotted}"


def with_full_keys(key: str, options: Iterable[str], message: str) -> str:
    """Return a message that names options of a part, with the part's own key in front of each.

    >>> with_full_keys("data", ["limit", "heldout"], "limit=3 has no effect. Set heldout to a file.")
    'data.limit=3 has no effect. Set data.heldout to a file.'
    """
    names = "|".join(re.escape(option) for option in options)
    named = rf"(?<![\w.\[])(?=(?:{names})[.=\[]\S)|(?<=[Ss]et )(?=(?:{names}) to\b)"
    return re.sub(named, f"{key}.", message)


def from_parser(error: BaseException) -> str:
    """Return the innermost cause and its class, for an error that nothing explains better."""
    root = error
    while (inner := root.__cause__ or root.__context__) is not None:
        root = inner
    owner = re.search(r"class_path '?(?:[\w.]*\.)?(\w+)'?", str(error))
    text = one_line(str(root).split("\nGiven value")[0])
    text = re.sub(r"^Parser key \"?([\w.]+)\"?:", r"\1:", text)
    if owner is not None and root is not error:
        text = f"{owner.group(1)}: {text}"
    return text if text.endswith((".", "!", "?")) else f"{text}."


def error_in_own_code(error: BaseException) -> str | None:
    """Where the user's own code broke, in a line; ``None`` where it was not that, as far as the files tell."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename} line {error.lineno}: {type(error).__name__}: {error.msg}."
    package = Path(__file__).parent
    roots = (
        str(package),
        str(package.parent / "callbacks"),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    )
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file() and not frame.filename.startswith(roots)
    ]
    if not own:
        return None
    return f"{own[-1].filename} line {own[-1].lineno}: {type(error).__name__}: {error}."


def report(errors: Sequence[str]) -> None:
    """Write each error as a line on stderr."""
    for error in errors:
        say(one_line(error), error=True)


def say(text: object, error: bool = False) -> None:
    """Print text, some of which may come from a server, a file or a reward, without control characters.

    Args:
        error: on stderr.
    """
    print(without_controls(text), file=sys.stderr if error else sys.stdout, flush=True)
