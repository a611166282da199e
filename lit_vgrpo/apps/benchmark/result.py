"""The result of a benchmark: means by task with intervals, paired differences, the protocol, and comparable papers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lit_vgrpo.apps.benchmark.scores import Subject
from lit_vgrpo.data.benchmark import Benchmark, differences
from lit_vgrpo.data.benchmark_prompts import TASK
from lit_vgrpo.data.prompts import Rows, text_of
from lit_vgrpo.errors import markdown_table, with_interval
from lit_vgrpo.metrics.statistics import LEVEL, RESAMPLES
from lit_vgrpo.system.process import versions

Numbers = npt.NDArray[Any]
OVERALL = "overall"


def by_task(values: Numbers, prompts: Numbers, tasks: Sequence[str], mean_of: str = "images") -> dict[str, Any]:
    """Return the overall mean and each task's, with bootstrap intervals that resample prompts within tasks.

    Args:
        values: Score of each image, ``(N,)``; NaN is left out and counted as failed.
        prompts: Each image's prompt, as text or number, ``(N,)``.
        tasks: Each image's task.
        mean_of: ``tasks`` takes the mean of the tasks' means, ``images`` that of all images.

    Returns:
        By ``overall`` and task: ``mean``, ``low``, ``high``, ``count`` and ``failed``. The mean is ``None`` without
        scores, and the interval if a task has a single prompt.

    >>> found = by_task(np.array([1.0, 1.0, 0.0]), np.array([0, 1, 2]), ["a", "a", "b"], "tasks")
    >>> {name: one["mean"] for name, one in found.items()}
    {'overall': 0.5, 'a': 1.0, 'b': 0.0}
    """
    random, labels, scored = np.random.default_rng(0), np.asarray(tasks), np.isfinite(values)
    task_draws: dict[str, Numbers] = {}
    shares: list[float] = []
    for task in dict.fromkeys(tasks):
        chosen = scored & (labels == task)
        _, clusters = np.unique(prompts[chosen], return_inverse=True)
        sums, counts = np.bincount(clusters, values[chosen]), np.bincount(clusters)
        draws = np.full(RESAMPLES + 1, math.nan)  # the first one is the mean
        if len(sums):
            draws[0] = sums.sum() / counts.sum()
        if len(sums) > 1:
            picks = random.integers(len(sums), size=(RESAMPLES, len(sums)))
            draws[1:] = sums[picks].sum(1) / counts[picks].sum(1)
        task_draws[task] = draws
        shares.append(float(chosen.sum()) if mean_of == "images" else float(chosen.any()))
    known = [draws * share for draws, share in zip(task_draws.values(), shares, strict=True) if share]
    overall = np.sum(known, axis=0) / sum(shares) if known else np.full(RESAMPLES + 1, math.nan)
    each = {task: _interval(draws, values[labels == task]) for task, draws in task_draws.items()}
    return {OVERALL: _interval(overall, values), **(each if len(each) > 1 else {})}


def _interval(draws: Numbers, values: Numbers) -> dict[str, Any]:
    numbers = (draws[0], *np.quantile(draws[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    plain = [float(number) if math.isfinite(number) else None for number in numbers]
    counts = {"count": int(np.isfinite(values).sum()), "failed": int(np.isnan(values).sum())}
    return {**dict(zip(("mean", "low", "high"), plain, strict=True)), **counts}


def results(benchmark: Benchmark, rows: Rows, subjects: Sequence[Subject]) -> dict[str, Any]:
    """Return the scores of all models by metric and task, and the differences of each to the first, image by image."""
    prompts = np.repeat([text_of(row) for row in rows], benchmark.images_per_prompt)
    tasks = [row[TASK] for row in rows for _ in range(benchmark.images_per_prompt)]
    result: dict[str, Any] = {"scores": {}, "differences": {}}
    for name in dict.fromkeys(name for subject in subjects for one in subject.scores.values() for name in one):
        first: Numbers | None = None
        for subject in subjects:
            scores = [subject.scores.get(image, {}).get(name, math.nan) for image in range(len(prompts))]
            values = benchmark.scale.get(name, 1.0) * np.array(scores)
            subject_scores = result["scores"].setdefault(subject.label, {})
            subject_scores[name] = by_task(values, prompts, tasks, benchmark.mean_of)
            if first is not None:
                paired = result["differences"].setdefault(subject.label, {})
                paired[name] = by_task(values - first, prompts, tasks, benchmark.mean_of)
            first = values if first is None else first
    return result


def report_of(benchmark: Benchmark, rows: Rows, subjects: Sequence[Subject]) -> dict[str, Any]:
    """Return the whole result as plain values."""
    protocols = [benchmark.protocol(len(rows), subject.solver) for subject in subjects]
    result = results(benchmark, rows, subjects)
    return {
        "benchmark": benchmark.name,
        "title": benchmark.title,
        "protocol": {
            **protocols[0],
            "solver": ", ".join(dict.fromkeys(subject.solver for subject in subjects)),
            "noise": f"seed {benchmark.seed} and the image's number, the same for every model",
            "files": benchmark.prompts.files,
            "from": benchmark.prompts.address,
            "scorer": benchmark.reward,
            "scale": benchmark.scale or 1,
            "overall": f"mean of {benchmark.mean_of}",
            "interval": f"{LEVEL:.0%}, {RESAMPLES} bootstrap samples of the prompts within tasks",
            "versions": versions(),
        },
        "models": {subject.label: subject.identity for subject in subjects},
        **result,
        "table": table(result),
        "errors": {subject.label: subject.errors for subject in subjects if subject.errors},
        "papers": {paper.name: differences(paper, benchmark, protocols) for paper in benchmark.papers},
        "otherwise": benchmark.otherwise,
    }


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Return the scores and differences of :func:`results` as text, a row for each metric and task, after a header."""
    labels, compared = list(result["scores"]), list(result["differences"])
    lines = [["", *labels, *(f"{label} minus {labels[0]}" for label in compared)]]
    for metric, tasks in result["scores"][labels[0]].items():
        for task in tasks:
            cells = [with_interval(result["scores"][label][metric][task]) for label in labels]
            cells += [with_interval(result["differences"][label][metric][task], "+") for label in compared]
            lines.append([metric if task == OVERALL else f"{metric}: {task}", *cells])
    return lines


def markdown(report: Mapping[str, Any]) -> str:
    """Return the result as Markdown: scores, comparable papers, what differs, and the whole protocol."""
    failed = [
        f"- {label}: {name} failed for {one[OVERALL]['failed']} images. "
        f"{report['errors'].get(label, {}).get(name, 'They were not scored.')}"
        for label, scores in report["scores"].items()
        for name, one in scores.items()
        if one[OVERALL]["failed"]
    ]
    papers = [f"- {name}: {'no: ' + '; '.join(why) if why else 'yes'}." for name, why in report["papers"].items()]
    protocol = [["part", "value"], *([name, str(x)] for name, x in (report["protocol"] | report["models"]).items())]
    parts = {
        f"# {report['title']}": [markdown_table(report["table"]), "", "In brackets: confidence intervals.", *failed],
        "## Is it comparable to a paper's result?": papers,
        "## How this preset differs": [f"- {line}" for line in report["otherwise"] or ["No known differences."]],
        "## Protocol": [markdown_table(protocol)],
    }
    return "\n\n".join("\n".join([title, "", *lines]) for title, lines in parts.items() if lines) + "\n"
