"""One-line errors for the user, and printing of untrusted text."""

from __future__ import annotations

import inspect
import json
import math
import re
import shlex
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

LONGEST_LIST, CLOSEST = 12, 5
HIDDEN = "(hidden)"
"""Replacement for values that may be secret."""
PASSWORD_IN_ADDRESS = re.compile(r"(\w+://)[^/?#\s]+@")
OWN_FOLDERS = str(Path(__file__).parent), str(Path(__file__).parent.parent / "callbacks")
LAST_WORD = re.compile(r"(?<=.)[A-Z][a-z]+$")
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


class RaisedOnAllRanks(Exception):
    """An error that all ranks raise together, so that they can still save."""


class RewardErrorOfAll(RaisedOnAllRanks, RewardError):
    """A reward failed on every image, or on one where none may fail, so that every rank ends the run."""


class NotFiniteError(RaisedOnAllRanks, FloatingPointError):
    """A loss or gradient is not finite; the weights were not changed."""


def without_controls(text: object) -> str:
    """Return the text with ``?`` for control characters except line ends and tabs, which a terminal would interpret.

    >>> without_controls("a\\x1b[31mb\\r\\n")
    'a?[31mb?\\n'
    """
    return "".join(letter if letter.isprintable() or letter in HARMLESS else "?" for letter in str(text))


def one_line(text: object) -> str:
    """Return the text with each run of white space replaced by one space, and without control characters.

    >>> one_line("two\\n   lines")
    'two lines'
    """
    return without_controls(" ".join(str(text).split()))


def shortened(text: object, most: int = 80) -> str:
    """Return a text in one line, and its start if it is longer than ``most`` characters.

    >>> shortened("a very\\nlong prompt", most=12)
    'a very lo...'
    """
    line = one_line(text)
    return line if len(line) <= most else f"{line[: most - 3]}..."


def shell_line(*words: object) -> str:
    """Return a command as one types it in a shell, with words such as paths quoted where necessary.

    >>> shell_line("lightning", "eval", "my runs/demo")
    "lightning eval 'my runs/demo'"
    """
    return shlex.join(f"{word}" for word in words)


def wrapped(text: str, width: int = 100) -> str:
    """Return a paragraph, on a terminal in lines of at most ``width`` characters; intervals stay whole.

    Elsewhere, it stays one line, which ``grep`` finds. Lines after the first are indented.
    """
    if not sys.stdout.isatty():
        return text
    text = re.sub(r"(\[\S+,) (?=\S+\])", "\\1\u00a0", text)
    lines = textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return lines.replace("\u00a0", " ")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``3 seeds``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def score_text(value: float, sign: str = "", decimals: int = 3) -> str:
    """Return a reward with some decimals, or with digits that count if it is large or small; rounding errors are 0.

    >>> [score_text(value) for value in (0.97049, -1.86e-09, 12345.6, 0.00032, 1e28)]
    ['0.970', '0.000', '12346', '0.000320', '1e+28']
    """
    value = 0.0 if abs(value) < 1e-7 else value
    size = abs(value)
    return format(
        value, f"{sign}.{decimals}f" if 0.01 <= size < 100 or not size else f"{sign}.5g" if size > 1 else f"{sign}#.3g"
    )


def decimals_of(values: Iterable[float | None]) -> int | None:
    """Return the decimals for all of some rewards, by the largest: 3, or as many as give it 3 to 5 digits that count.

    ``None`` if it is shown in powers of ten.

    >>> [decimals_of([value, None]) for value in (0.0104, 0.4, 97.1, 100.0, 12346.0, 1e28)]
    [4, 3, 3, 2, 0, None]
    """
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    if largest < 1e-7 or 0.1 <= largest < 100:
        return 3
    if not 1e-4 <= largest < 1e5:
        return None
    exponent = math.floor(math.log10(largest))
    return 4 - exponent if exponent > 0 else 2 - exponent


def score_with(value: float, sign: str, decimals: int | None) -> str:
    """Return a reward as text with the decimals of :func:`decimals_of`.

    >>> score_with(-0.0001, "+", 3), score_with(1e28, "", None)
    ('+0.000', '1e+28')
    """
    if decimals is None:
        return score_text(value, sign)
    return f"{round(value, decimals) + 0.0:{sign}.{decimals}f}"


def with_interval(estimate: Mapping[str, Any], sign: str = "") -> str:
    """Return a mean and its interval as text.

    >>> with_interval({"mean": 0.0098, "low": 0.004, "high": 0.0156})
    '0.0098 [0.0040, 0.0156]'
    """
    if estimate["mean"] is None:
        return "-"
    numbers = [estimate[key] for key in ("mean", "low", "high") if estimate[key] is not None]
    of = decimals_of(numbers)
    mean, *ends = (score_with(number, sign, of) for number in numbers)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def markdown_table(rows: Sequence[Sequence[str]], left: int | None = None) -> str:
    """Return an aligned table, heads first; ``left`` columns are left-aligned, or all, of which the last is not padded.

    >>> print(markdown_table([["a", "n"], ["x|y", "10"]], left=1))
    | a   |  n |
    |-----|---:|
    | x/y | 10 |
    """
    cells = [[cell.replace("|", "/") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if left is None:
        left, widths[-1] = len(widths), 1
    pads = [(str.ljust if number < left else str.rjust, width) for number, width in enumerate(widths)]
    shown = [" | ".join(pad(cell, width) for cell, (pad, width) in zip(row, pads, strict=True)) for row in cells]
    rule = "|".join("-" * (width + 2) if pad is str.ljust else "-" * (width + 1) + ":" for pad, width in pads)
    return "\n".join([f"| {shown[0]} |", f"|{rule}|", *(f"| {line} |" for line in shown[1:])])


def printable(body: bytes, most: int) -> str:
    """Return the first characters of a response in one line and without control characters."""
    return one_line(body[: 2 * most].decode("utf-8", errors="replace"))[:most]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, or ``None``; case and a common file ending are ignored."""
    known = list(known)
    if starts := [name for name in known if name.startswith(f"{word}_")]:
        return starts[0]
    if ends := [name for name in known if name.endswith(f".{word}")]:
        return ends[0]
    ending = next((name.suffix for name in map(Path, known) if name.suffix == Path(word).suffix), "")
    for change in (str, str.lower):
        scores = {name: _likeness(word.removesuffix(ending), name.removesuffix(ending), change) for name in known}
        if (best := max(scores, key=scores.__getitem__, default=None)) is not None and scores[best] > 0:
            return best
    return next((name for name in known if len(word) > 2 and word.lower() in name.lower()), None)  # NFT: DiffusionNFT


def _likeness(word: str, name: str, change: Callable[[str], str]) -> float:
    """Return how alike two words are, 0 if they are not.

    The last word of both is left out: in ``NoSuchReward`` and ``OCRReward`` it is most of what they share.
    """
    last = LAST_WORD.search(word)
    if last is not None and name.endswith(last[0]) and len(name) > len(last[0]):
        word, name = word.removesuffix(last[0]), name.removesuffix(last[0])
    score = SequenceMatcher(None, change(name), change(word)).ratio()
    return score if score >= (0.7 if len(word) > 3 else 0.66) else 0.0  # one letter of three may differ


def suggestion(word: str, known: Iterable[str], page: str = "") -> str:
    """Return ``Did you mean X?`` if a known word is similar, else the known words, or the closest and a page.

    >>> suggestion("PPO", ["DDPO", *(f"Method{n}" for n in range(30))], "docs/all.md")
    'Use one of: DDPO, Method0, Method1, Method2, Method3, ... All 31 are in docs/all.md.'
    """
    known = list(dict.fromkeys(known))
    guess = nearest(word, known)
    if guess is not None:
        return f"Did you mean {guess}?"
    if not known:
        return "It takes no options."
    if len(known) <= LONGEST_LIST:
        return f"Use one of: {', '.join(known)}."
    known.sort(key=lambda name: -SequenceMatcher(None, name.lower(), word.lower()).ratio())
    rest = f"All {len(known)} are in {page}." if page else f"There are {len(known)}."
    return f"Use one of: {', '.join(known[:CLOSEST])}, ... {rest}"


def unknown_option(key: str, owner: str, options: Iterable[str], page: str = "") -> str:
    """Return the message for a key that ``owner`` does not have.

    >>> unknown_option("model.objective.num_mc_sample", "VGRPO", ["num_mc_samples", "clip"])
    'model.objective.num_mc_sample is not an option of VGRPO. Did you mean num_mc_samples?'
    """
    return f"{key} is not an option of {owner}. {suggestion(key.rsplit('.', 1)[-1], options, page)}"


def setting(section: str, **options: Any) -> str:
    """Return how to set options of the data or the model, on the command line and in Python.

    >>> setting("data", deduplicate=True)
    'data.deduplicate=true (in Python: PromptDataModule(deduplicate=True))'
    """
    name = {"data": "PromptDataModule", "model": "VGRPOModule"}[section]
    recipe = " ".join(f"{section}.{key}={json.dumps(value)}" for key, value in options.items()).replace('"', "")
    python = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"{recipe} (in Python: {name}({python}))"


def error_in_user_code(error: BaseException) -> str | None:
    """Return the place in the user's code that raised an error, in one line; ``None`` if only packages are involved."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_shown(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}."
    roots = (*OWN_FOLDERS, sysconfig.get_path("stdlib"))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file()
        and not frame.filename.startswith(roots)
        and not {"site-packages", "dist-packages"} & set(Path(frame.filename).parts)
    ]
    if not frames:
        return None
    message = one_line(f"{type(error).__name__}: {error}").rstrip(".: ")
    return f"{_shown(frames[-1].filename)}:{frames[-1].lineno}: {message}."


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then what caused each."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def place_of(code: Any) -> str:
    """Return file and line of a function, of the ``func`` of an object or of its ``__call__``, or an empty text."""
    code = inspect.unwrap(getattr(code, "func", code))
    found = getattr(code, "__code__", None) or getattr(type(code).__call__, "__code__", None)
    return "" if found is None else f"{_shown(found.co_filename)}:{found.co_firstlineno}: "


def _shown(file: str) -> str:
    """Return a file's path relative to the current folder if it is in it."""
    return str(Path(file).relative_to(Path.cwd())) if Path(file).is_relative_to(Path.cwd()) else file


def is_deliberate(error: BaseException) -> bool:
    """Return True if this package raised the error for a wrong value, so that its message is enough."""
    if not isinstance(error, ValueError):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(__file__).parent in Path(last.filename).parents and str(last.line).startswith("raise ")


def report(errors: Sequence[str]) -> None:
    """Write each error as a line on stderr."""
    for error in errors:
        say(one_line(error), error=True)


def say(text: object, error: bool = False) -> None:
    """Print text, which may come from a server, a file or a reward, without control characters; an error on stderr."""
    bars = sys.modules.get("tqdm")
    with nullcontext() if bars is None else bars.tqdm.external_write_mode():  # above the bars
        print(without_controls(text), file=sys.stderr if error else sys.stdout, flush=True)
