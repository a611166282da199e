"""Tables of scores, for the terminal and for files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_vgrpo.rewards import Scores
from lit_vgrpo.system.paths import write_atomically

FAILED, NOT_ASKED = "failed", "-"


def image_scores(batch: Scores, index: int, file: Path, prompt: str) -> dict[str, Any]:
    """Return the scores of one image of a batch as plain values.

    Returns:
        ``image`` and ``prompt``; ``total``, the weighted sum; ``parts``, the score of each reward that applies, by
        name; ``failures``, reasons by name. A score that failed is ``None``.
    """
    parts = {name: _number(part[index]) for name, part in batch.parts.items() if batch.applies_to(name)[index]}
    failures = {name: batch.errors.get(name, "no reason given") for name, value in parts.items() if value is None}
    total = _number(batch.total[index])
    return {"image": str(file), "prompt": prompt, "total": total, "parts": parts, "failures": failures}


def score_table(scores: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return a table with a row per image and a column per reward, followed by the reasons of failures."""
    rows = [["image", *names, "total"]]
    for own in scores:
        cells = [_cell(own["parts"][name]) if name in own["parts"] else NOT_ASKED for name in names]
        rows.append([own["image"], *cells, _cell(own["total"])])
    reasons = [f"{own['image']}: {name} failed: {why}" for own in scores for name, why in own["failures"].items()]
    return "\n".join([aligned(rows), *reasons])


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
    path: Path, scores: Sequence[Mapping[str, Any]], names: Sequence[str], described: Mapping[str, Any]
) -> None:
    """Write a JSON file, or a CSV file with failed cells empty and the reasons in the last column.

    Raises:
        UserError: The file cannot be written.
    """
    if path.suffix == ".json":
        write_atomically(path, json.dumps({**described, "images": scores}, indent=2) + "\n")
        return
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow(["image", "prompt", *names, "total", "failures"])
    for own in scores:
        why = "; ".join(f"{name}: {reason}" for name, reason in own["failures"].items())
        table.writerow([own["image"], own["prompt"], *map(own["parts"].get, names), own["total"], why])
    write_atomically(path, lines.getvalue())


def _number(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)


def _cell(value: float | None) -> str:
    return FAILED if value is None else f"{value:.4f}"
