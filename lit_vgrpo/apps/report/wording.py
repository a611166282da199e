"""Numbers in words: rewards, amounts, times, sizes."""

from __future__ import annotations

import re

from lit_vgrpo.apps.report.kept import Interval

NONE, MINUS = "\u2013", "\u2212"


def reward(value: float | None, sign: str = "") -> str:
    """Return a reward with three decimals, or five digits where it is large.

    >>> reward(0.97049), reward(12345.6), reward(0.25, "+")
    ('0.970', '12346', '+0.250')
    """
    if value is None:
        return NONE
    return format(value, f"{sign}.3f" if abs(value) < 100 else f"{sign}.5g").replace("-", MINUS)


def brackets(found: Interval | None, sign: str = "") -> str:
    """Return an interval in brackets; empty for none."""
    return "" if found is None else f"[{reward(found.low, sign)}, {reward(found.high, sign)}]"


def amount(value: float | None) -> str:
    """Return a number of things, thousands marked.

    >>> amount(7680.0)
    '7,680'
    """
    return NONE if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Return a time in its two largest units.

    >>> duration(3.21), duration(73.3), duration(7500), duration(200000)
    ('3.2 s', '1 min 13 s', '2 h 5 min', '2 d 7 h')
    """
    if seconds is None:
        return NONE
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def size(count: float | None) -> str:
    """Return a number of bytes.

    >>> size(1_170_620_416)
    '1.2 GB'
    """
    if count is None:
        return NONE
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def short(value: float) -> str:
    """Return a number at most six letters long, for the ticks of a plot.

    >>> short(0.25), short(120000), short(2.5e6), short(0), short(0.00012).replace(MINUS, "-")
    ('0.25', '120k', '2.5M', '0', '1.2e-4')
    """
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.4g}{letter}".replace("-", MINUS)
    if 0 < abs(value) < 1e-3:
        digits, _, exponent = f"{value:.1e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}".replace("-", MINUS)
    return f"{value:.4g}".replace("-", MINUS)


def unbroken(text: str) -> str:
    """Return a text whose lines do not break between a number and its unit, or within an interval.

    >>> unbroken("1 min 13 s, 2 images, 0.5 [0.4, 0.6]").split(" ")
    ['1\\xa0min\\xa013\\xa0s,', '2', 'images,', '0.5\\xa0[0.4,\\xa00.6]']
    """
    text = re.sub(r"(?<=\d) (?=(?:s|min|h|d)\b|\[)|(?<=\d,) (?=[+\u2212\d])", "\u00a0", text)
    return re.sub("(\u00a0(?:min|h|d)) (?=\\d)", "\\1\u00a0", text)
