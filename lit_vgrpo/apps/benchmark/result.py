"""The result of a benchmark: means by task with intervals, paired differences, the protocol, and comparable rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_vgrpo.apps.benchmark.preset import Benchmark, differences
from lit_vgrpo.apps.benchmark.prompts import TASK
from lit_vgrpo.apps.benchmark.scores import Subject
from lit_vgrpo.data.prompts import Rows
from lit_vgrpo.system.process import versions

Numbers = npt.NDArray[np.float64]
OVERALL, LEVEL, RESAMPLES = "overall", 0.95, 2000


def by_task(values: Numbers, prompts: Numbers, tasks: Sequence[str], mean_of: str = "images") -> dict[str, Any]:
    """Return the overall mean and each task's, with bootstrap intervals that resample prompts within tasks.

    Args:
        values: Score of each image, ``(N,)``; NaN is left out and counted as failed.
        prompts: Number of each image's prompt, ``(N,)``.
        tasks: Each image's task.
        mean_of: ``tasks`` takes the mean of the tasks' means, ``images`` that of all images.

    Returns:
        By ``overall`` and task: ``mean``, ``low`` and ``high`` (``None`` without scores), ``count``, ``failed``.

    >>> found = by_task(np.array([1.0, 1.0, 0.0]), np.array([0, 1, 2]), ["a", "a", "b"], "tasks")
    >>> {name: one["mean"] for name, one in found.items()}
    {'overall': 0.5, 'a': 1.0, 'b': 0.0}
    """
    random, labels, scored = np.random.default_rng(0), np.asarray(tasks), np.isfinite(values)
    found: dict[str, Any] = {OVERALL: {}}
    means, draws, weights = [], [], []
    for task in dict.fromkeys(tasks):
        chosen = scored & (labels == task)
        _, clusters = np.unique(prompts[chosen], return_inverse=True)
        sums, counts = np.bincount(clusters, values[chosen]), np.bincount(clusters)
        mean, draw = math.nan, np.full(RESAMPLES, math.nan)
        if len(sums):
            picks = random.integers(len(sums), size=(RESAMPLES, len(sums)))
            mean, draw = sums.sum() / counts.sum(), sums[picks].sum(1) / counts[picks].sum(1)
        means.append(mean)
        draws.append(draw)
        weights.append(1.0 if mean_of == "tasks" else float(chosen.sum()))
        found[task] = _interval(mean, draw, values[labels == task])
    if sum(weights):
        shares = np.array(weights) / sum(weights)
        kept = shares > 0
        mean, draw = shares[kept] @ np.array(means)[kept], shares[kept] @ np.array(draws)[kept]
    found[OVERALL] = _interval(mean, draw, values)
    return found if len(means) > 1 else {OVERALL: found[OVERALL]}


def _interval(mean: float, draws: Numbers, values: Numbers) -> dict[str, Any]:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    numbers = {
        name: float(x) if math.isfinite(x) else None
        for name, x in zip(("mean", "low", "high"), (mean, low, high), strict=True)
    }
    return {**numbers, "count": int(np.isfinite(values).sum()), "failed": int(np.isnan(values).sum())}


def results(benchmark: Benchmark, rows: Rows, subjects: Sequence[Subject]) -> dict[str, Any]:
    """Return the scores of all models by metric and task, and the differences of each to the first, image by image."""
    per_prompt = benchmark.images_per_prompt
    images = range(len(rows) * per_prompt)
    prompts = np.array([image // per_prompt for image in images])
    tasks = [rows[number][TASK] for number in prompts]
    names = list(dict.fromkeys(name for subject in subjects for one in subject.scores.values() for name in one))
    found: dict[str, Any] = {"scores": {}, "differences": {}}
    for name in names:
        columns = [
            benchmark.scale.get(name, 1.0)
            * np.array([subject.scores.get(image, {}).get(name, math.nan) for image in images])
            for subject in subjects
        ]
        for number, (subject, values) in enumerate(zip(subjects, columns, strict=True)):
            of_subject = by_task(values, prompts, tasks, benchmark.mean_of)
            found["scores"].setdefault(subject.label, {})[name] = of_subject
            if number:
                paired = by_task(values - columns[0], prompts, tasks, benchmark.mean_of)
                found["differences"].setdefault(subject.label, {})[name] = paired
    return found


def report_of(benchmark: Benchmark, rows: Rows, subjects: Sequence[Subject]) -> dict[str, Any]:
    """Return the whole result as plain values."""
    protocols = [benchmark.protocol(len(rows), subject.solver) for subject in subjects]
    pinned, found = benchmark.prompts, results(benchmark, rows, subjects)
    return {
        "benchmark": benchmark.name,
        "title": benchmark.title,
        "protocol": {
            "prompts": f"{len(rows)}, from {', '.join(pinned.urls.values())}",
            "sha256": pinned.files,
            **{name: value for name, value in protocols[0].items() if name not in ("prompts", "solver")},
            "solver": list(dict.fromkeys(subject.solver for subject in subjects)),
            "noise": f"seed {benchmark.seed} and the image's number, the same for every model",
            "scorer": benchmark.reward,
            "overall": f"mean of {benchmark.mean_of}",
            "scale": benchmark.scale or 1,
            "interval": f"{LEVEL:.0%}, {RESAMPLES} bootstrap samples of the prompts within tasks",
            "versions": versions(),
        },
        "models": {subject.label: subject.identity for subject in subjects},
        **found,
        "table": table(found),
        "errors": {subject.label: subject.errors for subject in subjects if subject.errors},
        "papers": {paper.name: differences(paper, benchmark, protocols) for paper in benchmark.papers},
        "otherwise": benchmark.otherwise,
    }


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the scores and differences of :func:`results` as text, a row for each metric and task, after a header."""
    labels, compared = list(found["scores"]), list(found["differences"])
    lines = [["", *labels, *(f"{label} minus {labels[0]}" for label in compared)]]
    for metric, of_metric in found["scores"][labels[0]].items():
        for task in of_metric:
            cells = [with_interval(found["scores"][label][metric][task]) for label in labels]
            cells += [with_interval(found["differences"][label][metric][task], "+") for label in compared]
            lines.append([metric if task == OVERALL else f"{metric}: {task}", *cells])
    return lines


def markdown(report: Mapping[str, Any]) -> str:
    """Return the result as Markdown: scores, where they may be put, what differs, and every part of the protocol."""
    failed = [
        f'- {label}: "{name}" failed for {one[OVERALL]["failed"]} images'
        + (f", such as: {report['errors'][label][name]}" if name in report["errors"].get(label, {}) else "")
        for label in report["scores"]
        for name, one in report["scores"][label].items()
        if one[OVERALL]["failed"]
    ]
    papers = [f"- {name}: {'no: ' + '; '.join(why) if why else 'yes'}." for name, why in report["papers"].items()]
    otherwise = [f"- {line}" for line in report["otherwise"]] or ["- Nothing that is known."]
    protocol = [[name, str(value)] for name, value in (report["protocol"] | report["models"]).items()]
    parts = [
        f"# {report['title']}\n\n{_table(report['table'])}",
        "In brackets: intervals of the mean."
        + (" Differences are of the same prompt and noise." if report["differences"] else ""),
        *(["\n".join(failed)] if failed else []),
        "## May it be put beside a paper's row?\n\n" + "\n".join(papers),
        "## What this preset does otherwise\n\n" + "\n".join(otherwise),
        f"## Protocol\n\n{_table([['part', 'value'], *protocol])}",
    ]
    return "\n\n".join(parts) + "\n"


def with_interval(found: Mapping[str, Any], sign: str = "") -> str:
    """Return a mean and its interval as text.

    >>> with_interval({"mean": 0.5, "low": 0.25, "high": 1.0})
    '0.500 [0.250, 1.000]'
    """
    if found["mean"] is None:
        return "-"
    mean, low, high = (format(found[key], f"{sign}.3f") for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns, of which the last is not padded."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    widths[-1] = 3
    cells.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)
