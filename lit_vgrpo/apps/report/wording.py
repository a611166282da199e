"""Rewards, amounts, times and sizes as text."""

from __future__ import annotations

from lit_vgrpo.apps.report.run_data import Interval

NONE, MINUS = "\u2013", "\u2212"


def reward(value: float | None, sign: str = "") -> str:
    """Return a reward with three decimals, or five digits if it is large.

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
    """Return a count with a comma between thousands.

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


def short(value: float) -> str:
    """Return a number for the ticks of a plot, such as 120k."""
    for limit, divisor, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / divisor:.4g}{letter}"
    return f"{value:.4g}"
