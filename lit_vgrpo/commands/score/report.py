"""Tables of scores, for the terminal and for files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_vgrpo.system.paths import write_whole

FAILED, NOT_ASKED = "failed", "-"


@dataclass
class PictureScores:
    """Scores of one image.

    Attributes:
        total: Weighted sum; NaN where the image failed.
        parts: Score of each reward that applies, by name; NaN where it failed.
        failures: Reasons by the reward's name.
    """

    image: str
    prompt: str
    total: float
    parts: dict[str, float]
    failures: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        parts = {name: _number(value) for name, value in self.parts.items()}
        return {
            "image": self.image,
            "prompt": self.prompt,
            "total": _number(self.total),
            "parts": parts,
            "failures": self.failures,
        }


def score_table(scores: Sequence[PictureScores], names: Sequence[str]) -> str:
    """Return a table with a row per image and a column per reward, followed by the reasons of failures."""
    header = ["image", *names, "total"]
    rows = [
        [own.image, *(_cell(own.parts[name]) if name in own.parts else NOT_ASKED for name in names), _cell(own.total)]
        for own in scores
    ]
    reasons = [f"{own.image}: {name} failed: {why}" for own in scores for name, why in own.failures.items()]
    return "\n".join([aligned([header, *rows]), *reasons])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of equal length in columns, the first to the left, the others to the right.

    >>> print(aligned([["image", "total"], ["a.png", "0.5"]]))
    image  total
    a.png    0.5
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_scores(
    path: Path, scores: Sequence[PictureScores], names: Sequence[str], described: Mapping[str, Any]
) -> None:
    """Write a JSON file, or a CSV file with failed cells empty and the reasons in the last column.

    Raises:
        OSError: It cannot be written.
    """
    if path.suffix == ".json":
        text = json.dumps({**described, "images": [own.as_dict() for own in scores]}, indent=2) + "\n"
        write_whole(path, text)
        return
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow(["image", "prompt", *names, "total", "failures"])
    for own in scores:
        values = [_number(own.parts.get(name, math.nan)) for name in names]
        why = "; ".join(f"{name}: {reason}" for name, reason in own.failures.items())
        table.writerow([own.image, own.prompt, *values, _number(own.total), why])
    write_whole(path, lines.getvalue())


def _cell(value: float) -> str:
    return FAILED if math.isnan(value) else f"{value:.4f}"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
