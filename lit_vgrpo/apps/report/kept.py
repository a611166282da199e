"""Files that a run keeps for its report, in ``RUN/report/``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_vgrpo.metrics.bootstrap import bootstrap_interval

REPORT_NAME, FOLDER_NAME = "report.html", "report"
SCORES_NAME, IMAGES_NAME = "scores.jsonl", "images.json"
PromptSums = dict[str, list[tuple[float, int]]]
"""By reward, the sum and the number of each prompt's scores."""


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % bootstrap interval over prompts."""

    mean: float
    low: float
    high: float


def folder_of(run: Path) -> Path:
    """Return the folder in which a run keeps what its report shows."""
    return run / FOLDER_NAME


def read_scores(run: Path) -> dict[int, PromptSums]:
    """Return the scores of each evaluation by its iteration, without those that a resumed run has made anew."""
    found: dict[int, PromptSums] = {}
    for line in _text(folder_of(run) / SCORES_NAME).splitlines():
        try:
            entry = json.loads(line)
            iteration = int(entry["iteration"])
            sums = {str(name): [(float(a), int(b)) for a, b in own] for name, own in entry["scores"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):  # cut off when the run was killed
            continue
        found = {before: own for before, own in found.items() if before < iteration}
        found[iteration] = sums
    return found


def read_images(run: Path) -> dict[str, Any]:
    """Return the table of the kept images; ``images`` is empty where there is none."""
    try:
        table = json.loads(_text(folder_of(run) / IMAGES_NAME))
    except ValueError:
        table = None
    return table if isinstance(table, dict) and isinstance(table.get("images"), list) else {"images": []}


def interval(sums: list[tuple[float, int]]) -> Interval | None:
    """Return the mean over images and its interval over prompts; ``None`` without scores.

    >>> interval([(1.0, 1), (1.0, 1)])
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    values = [total / count for total, count in sums if count for _ in range(count)]
    clusters = [number for number, (_, count) in enumerate(sums) for _ in range(count)]
    return None if not values else Interval(math.fsum(values) / len(values), *bootstrap_interval(values, clusters))


def difference(before: list[tuple[float, int]], after: list[tuple[float, int]]) -> Interval | None:
    """Return the change of the prompts' means and its interval; ``None`` for other prompts."""
    if len(before) != len(after):
        return None
    both = [(a / m, b / n) for (a, m), (b, n) in zip(before, after, strict=True) if m and n]
    return interval([(new - old, 1) for old, new in both])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
