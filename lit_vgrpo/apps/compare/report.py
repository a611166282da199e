"""The files that a comparison writes: JSON, CSV, and Markdown tables."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lit_vgrpo.apps.compare.options import CompareOptions
from lit_vgrpo.apps.compare.results import COSTS, RATIOS, Curve, Row
from lit_vgrpo.callbacks.summary import versions
from lit_vgrpo.system.paths import write_atomically

CSV_COLUMNS = (
    "method",
    "settings",
    "seed",
    "iteration",
    "reward",
    "images",
    "passes",
    "forward_equivalents",
    "cpu_seconds",
    "train_seconds",
)
TARGET_COLUMNS = ("method", "settings", "target", "seed", *COSTS, *RATIOS)
NOTE = (
    "A cost is that of training alone, interpolated between two evaluations and averaged over the seeds; it is given "
    "only where every seed reached the target. A pass is one image through the network once, forward; guidance counts "
    "twice, a backward is not counted. In forward-pass equivalents a pass with gradient counts three times, since its "
    "backward takes twice the multiplications of its forward. CPU seconds are those of the process, and depend on the "
    "machine and on what else ran on it."
)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an aligned table; the first two columns are words, the others numbers.

    >>> print(markdown_table(["a", "b", "n"], [["x", "y", "1"]]))
    | a | b | n |
    |---|---|--:|
    | x | y | 1 |
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = ["-" * (w + 2) if column < 2 else "-" * (w + 1) + ":" for column, w in enumerate(widths)]
    body = [
        [
            cell.ljust(w) if column < 2 else cell.rjust(w)
            for column, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    shown = [f"| {' | '.join(line)} |" for line in body]
    return "\n".join([shown[0], f"|{'|'.join(rule)}|", *shown[1:]])


def reward_table(rows: Sequence[Row]) -> str:
    """Return each method's held-out reward: at the start, at the end with that of each seed, and the best."""
    header = ["method", "settings", "seeds", "start", "final", "each seed", "best", "CPU s", "passes", "equivalents"]
    spent = ("cpu_seconds", "passes", "forward_equivalents")
    lines = []
    for row in rows:
        done, planned = len(row.finished), len(row.curves)
        ends = [curve.evaluations[-1] for curve in row.finished]
        each = " / ".join(reward_cell(curve.rewards[-1] if curve.evaluations else None) for curve in row.curves)
        lines.append(
            [
                row.method,
                row.settings,
                str(done) if done == planned else f"{done}/{planned}",
                *(reward_cell(value) for value in (row.start, row.final)),
                each,
                reward_cell(row.best),
                *(amount(fmean(end[name] for end in ends) if ends else None) for name in spent),
            ]
        )
    return markdown_table(header, lines)


def target_table(rows: Sequence[Row], target: float, base: str) -> str:
    """Return the cost of each method to reach a held-out reward, and each seed's iterations."""
    header = ["method", "settings", "reached", "iterations", "each seed", "CPU s", "passes", "equivalents"]
    header += [f"CPU s / {base}'s", f"equivalents / {base}'s"]
    lines = []
    for row in rows:
        cost = row.targets[target]
        mean = cost["mean"] or {}
        each = [seed and seed["iteration"] for seed in cost["seeds"].values()]
        lines.append(
            [
                row.method,
                row.settings,
                f"{cost['reached']}/{cost['of']}",
                amount(mean.get("iteration")),
                " / ".join(map(amount, each)),
                *(amount(mean.get(name)) for name in ("cpu_seconds", "passes", "forward_equivalents")),
                *("-" if cost[ratio] is None else f"{cost[ratio]:.2f}" for ratio in RATIOS),
            ]
        )
    return markdown_table(header, lines)


def verdict(rows: Sequence[Row], target: float, base: str) -> str:
    """Return which methods were cheaper than the base with the same settings; empty without it or others."""
    yardsticks = {row.settings: row.targets[target] for row in rows if row.method == base}
    others = [row for row in rows if row.method != base and row.settings in yardsticks]
    if not others:
        return ""
    cheaper = []
    for row in others:
        ratio = row.targets[target]["cpu_ratio"]
        if ratio is not None and ratio < 1:
            cheaper.append(f"{row.name} ({ratio:.2f} of its CPU seconds)")
        elif row.targets[target]["mean"] is not None and yardsticks[row.settings]["mean"] is None:
            cheaper.append(f"{row.name} ({base} did not reach it with every seed)")
    if not cheaper:
        return f"No method reached it with every seed for less CPU time than {base} with the same kind of settings."
    return f"{base} lost to: {', '.join(cheaper)}."


def searches(rows: Sequence[Row]) -> str:
    """Return what the search for each method's tuned settings was given, a line each; empty without tuned settings."""
    tuned = [row for row in rows if row.settings == "tuned"]
    return "\n".join(f"- {row.method}: {row.found or 'its overlay does not say (found:)'}" for row in tuned)


def errors_text(curves: Sequence[Curve]) -> str:
    """Return the runs that failed, a line each; empty where none did."""
    lines = [f"{c.method} {c.settings}, seed {c.seed}, failed: {c.error}" for c in curves if c.error]
    return "\n".join(lines)


def tables(rows: Sequence[Row], targets: Sequence[float], base: str) -> str:
    """Return all tables with headings, and the failed runs."""
    parts = ["## Held-out reward", reward_table(rows)]
    for target in targets:
        parts += [f"## To reach {target:g}", target_table(rows, target, base), verdict(rows, target, base)]
    if search := searches(rows):
        parts += ["## Search for the tuned settings", search]
    failed = errors_text([curve for row in rows for curve in row.curves])
    if failed:
        parts += ["## Failed runs", failed]
    return "\n\n".join(part for part in [*parts, NOTE] if part)


def write_report(options: CompareOptions, rows: Sequence[Row]) -> str:
    """Write ``compare.json``, ``compare.csv``, ``targets.csv`` and ``compare.md``.

    Returns:
        The tables, to be printed.
    """
    text = tables(rows, options.targets, options.base_method)
    curves = [curve for row in rows for curve in row.curves]
    content = {**setting(options), "targets": options.targets, "base": options.base_method}
    content["methods"] = [as_plain(row) for row in rows]
    write_atomically(options.out / "compare.json", json.dumps(content, indent=2) + "\n")
    write_csv(options.out / "compare.csv", CSV_COLUMNS, csv_rows(curves))
    write_csv(options.out / "targets.csv", TARGET_COLUMNS, [line for row in rows for line in target_rows(row)])
    seeds = ", ".join(map(str, options.seeds))
    head = f"# {options.command.recipe.stem}: methods compared\n\n    {options.line}\n\n"
    head += f"{options.iterations} iterations, seeds {seeds}; evaluated every {options.evaluate_every} iterations.\n\n"
    write_atomically(options.out / "compare.md", f"{head}![held-out reward](compare.png)\n\n{text}\n")
    return text


def setting(options: CompareOptions) -> dict[str, Any]:
    """Return the requested settings and the machine."""
    return {
        "command": options.line,
        "recipe": options.command.recipe.stem,
        "overrides": dict(options.command.overrides),
        "seeds": options.seeds,
        "iterations": options.iterations,
        "evaluate_every": options.evaluate_every,
        "jobs": options.jobs,
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        "cpu_cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), **versions()},
    }


def as_plain(row: Row) -> dict[str, Any]:
    """Return a row as plain values."""
    return {
        "method": row.method,
        "settings": row.settings,
        "recipe": f"recipes/{row.method}-{row.settings}.yaml",
        "start": row.start,
        "found": row.found.as_dict() if row.found else None,
        "final": row.final,
        "final_range": row.final_range,
        "best": row.best,
        "targets": {f"{target:g}": cost for target, cost in row.targets.items()},
        "runs": [
            {"seed": curve.seed, "error": curve.error or None, "evaluations": curve.evaluations} for curve in row.curves
        ],
    }


def csv_rows(curves: Iterable[Curve]) -> list[dict[str, Any]]:
    """Return one row per evaluation."""
    return [
        {"method": c.method, "settings": c.settings, "seed": c.seed, **{k: e[k] for k in CSV_COLUMNS[3:]}}
        for c in curves
        for e in c.evaluations
    ]


def target_rows(row: Row) -> Iterator[dict[str, Any]]:
    """Yield each seed's costs to reach each target, and their mean with its ratios; empty if not reached."""
    for target, cost in row.targets.items():
        own = {"method": row.method, "settings": row.settings, "target": target}
        for seed, costs in cost["seeds"].items():
            yield {**own, "seed": seed, **(costs or {})}
        yield {**own, "seed": "mean", **(cost["mean"] or {}), **{ratio: cost[ratio] for ratio in RATIOS}}


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write a CSV file atomically."""
    lines = io.StringIO(newline="")
    writer = csv.DictWriter(lines, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, lines.getvalue())


def reward_cell(value: float | None) -> str:
    """Format a reward; a dash for none."""
    return "-" if value is None else f"{value:.3f}"


def amount(value: float | None) -> str:
    """Format a cost: one decimal below a hundred, thousands marked.

    >>> amount(12.345), amount(123456.7), amount(None)
    ('12.3', '123,457', '-')
    """
    if value is None:
        return "-"
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"
