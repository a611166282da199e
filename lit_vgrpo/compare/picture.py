"""The race as a picture: held-out reward against three costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lit_vgrpo.compare.results import Curve, Row

# Okabe and Ito's palette, told apart with any kind of colour vision; then two greys.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A800", "#777777", "#AAAAAA")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
DASHES: dict[str, Any] = {"published": (0, (4, 2)), "tuned": "solid"}
PANELS = (
    ("cpu_seconds", "process CPU time (s)"),
    ("passes", "network passes (1000 images)"),
    ("iteration", "iterations"),
)


def averaged(curves: Sequence[Curve], cost: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Mean cost, and mean, lowest and highest reward of the seeds, at every evaluation that all of them have."""
    length = min(len(curve.evaluations) for curve in curves)
    columns = [[curve.evaluations[number] for curve in curves] for number in range(length)]
    scale = 1e-3 if cost == "passes" else 1.0
    x = [scale * fmean(e[cost] for e in column) for column in columns]
    rewards = [[e["reward"] for e in column] for column in columns]
    return x, [fmean(r) for r in rewards], [min(r) for r in rewards], [max(r) for r in rewards]


def draw(path: Path, rows: Sequence[Row], targets: Sequence[float], title: str) -> None:
    """Draw mean lines with bands from the lowest to the highest seed.

    Args:
        path: a ``.png`` file.
        rows: methods whose runs all failed are left out.
        targets: drawn as thin lines.
    """
    shown = [row for row in rows if row.finished]
    dashes = DASHES if len({row.settings for row in shown}) > 1 else {}
    methods = list(dict.fromkeys(row.method for row in rows))
    legend_rows = -(-max(1, len(shown)) // 5)
    figure = Figure(figsize=(13.5, 4.6 + 0.25 * legend_rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for axis, (cost, label) in zip(axes, PANELS, strict=True):
        for row in shown:
            number = methods.index(row.method)
            colour = COLOURS[number % len(COLOURS)]
            x, mean, low, high = averaged(row.finished, cost)
            axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            axis.plot(
                x,
                mean,
                color=colour,
                linestyle=dashes.get(row.settings, "solid"),
                linewidth=1.8,
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
                label=_label(row),
            )
        for target in targets:
            axis.axhline(target, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out reward")
    figure.suptitle(title)
    handles, labels = axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(5, len(handles)), frameon=False, handlelength=3
        )
    draft = path.with_suffix(".tmp.png")
    figure.savefig(draft, dpi=130)
    draft.replace(path)


def _label(row: Row) -> str:
    done, planned = len(row.finished), len(row.curves)
    return row.name if done == planned else f"{row.name} ({done} of {planned} seeds)"
