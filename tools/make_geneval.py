"""Generates prompts for GenEval's six tasks, with the metadata that its rules need.

Classes, colours, positions, row format and "a photo of" follow GenEval (arXiv 2310.11513). Combinations are sampled
here, so these are not the prompts of the official evaluation, although short ones coincide. Plurals are correct,
unlike in the official generator: "two pairs of scissors", "three knives".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations, permutations
from typing import Any

from lit_vgrpo.rewards.geneval_rules import CLASSES, COLORS, RELATIONS

Row = dict[str, Any]
COUNTS = {"single_object": (64, 16), "counting": (192, 48)}
"""Numbers of training and held-out rows per task; small tasks use all combinations."""
OTHER_COUNTS = (300, 50)
NUMBERS = {2: "two", 3: "three", 4: "four"}
UNCOLOURED = ("person",)
MEASURES = {"skis": "pair", "scissors": "pair", "broccoli": "head"}
PLURALS = {"person": "people", "sheep": "sheep", "knife": "knives", "computer mouse": "computer mice"}


def geneval_rows() -> tuple[list[Row], list[Row]]:
    """Return training and held-out rows; no fact is in both, in any wording."""
    train: list[Row] = []
    heldout: list[Row] = []
    for tag, facts in FACTS.items():
        draw = random.Random(f"geneval {tag}")
        rows = facts()
        draw.shuffle(rows)
        wanted, aside = COUNTS.get(tag, OTHER_COUNTS)
        heldout += rows[:aside]
        train += rows[aside : aside + wanted]
    for side in (train, heldout):
        random.Random("geneval").shuffle(side)
    return train, heldout


def phrase(name: str, color: str = "") -> str:
    """Return an object with its article.

    >>> phrase("bench", "orange"), phrase("umbrella"), phrase("skis", "red")
    ('an orange bench', 'an umbrella', 'a pair of red skis')
    """
    thing = f"{color} {name}".strip()
    if name in MEASURES:
        return f"a {MEASURES[name]} of {thing}"
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"


def plural(name: str) -> str:
    """Return an object's plural.

    >>> [plural(name) for name in ("bus", "knife", "toothbrush", "wine glass", "scissors", "toy")]
    ['buses', 'knives', 'toothbrushes', 'wine glasses', 'pairs of scissors', 'toys']
    """
    if name in MEASURES:
        return f"{MEASURES[name]}s of {name}"
    ending = "es" if name.endswith(("s", "sh", "ch", "x")) else "s"
    return PLURALS.get(name, f"{name}{ending}")


def _row(tag: str, include: Sequence[Row], prompt: str, **more: Any) -> Row:
    return {"tag": tag, "include": list(include), **more, "prompt": f"a photo of {prompt}"}


def _thing(name: str, **more: Any) -> Row:
    return {"class": name, "count": 1, **more}


def _single_object() -> list[Row]:
    return [_row("single_object", [_thing(name)], phrase(name)) for name in CLASSES]


def _two_object() -> list[Row]:
    return [
        _row("two_object", [_thing(a), _thing(b)], f"{phrase(a)} and {phrase(b)}") for a, b in combinations(CLASSES, 2)
    ]


def _counting() -> list[Row]:
    return [
        _row(
            "counting",
            [{"class": name, "count": count}],
            f"{word} {plural(name)}",
            exclude=[{"class": name, "count": count + 1}],
        )
        for name in CLASSES
        for count, word in NUMBERS.items()
    ]


def _coloured() -> list[tuple[str, str]]:
    return [(name, color) for name in CLASSES if name not in UNCOLOURED for color in COLORS if color != name]


def _colors() -> list[Row]:
    return [_row("colors", [_thing(name, color=color)], phrase(name, color)) for name, color in _coloured()]


def _position() -> list[Row]:
    # "a left of b" and "b right of a" are the same fact, so only one wording is used
    draw = random.Random("geneval wordings of positions")
    rows = []
    for pair in permutations(CLASSES, 2):
        for place, opposite in zip(RELATIONS[::2], RELATIONS[1::2], strict=True):
            (a, b), said = (pair, place) if draw.random() < 0.5 else (pair[::-1], opposite)
            rows.append(_row("position", [_thing(b), _thing(a, position=[said, 0])], f"{phrase(a)} {said} {phrase(b)}"))
    return rows


def _color_attr() -> list[Row]:
    draw = random.Random("geneval pairs of colours")
    rows = []
    for a, b in combinations([name for name in CLASSES if name not in UNCOLOURED], 2):
        one, other = draw.sample(COLORS, 2)
        if one != a and other != b:
            things = [_thing(a, color=one), _thing(b, color=other)]
            rows.append(_row("color_attr", things, f"{phrase(a, one)} and {phrase(b, other)}"))
    return rows


FACTS: dict[str, Callable[[], list[Row]]] = {
    "single_object": _single_object,
    "two_object": _two_object,
    "counting": _counting,
    "colors": _colors,
    "position": _position,
    "color_attr": _color_attr,
}
