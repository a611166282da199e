"""Plot of a comparison: held-out reward against three costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lit_vgrpo.commands.compare.results import Curve, Row

# Okabe and Ito's palette, told apart with any kind of colour vision; then two greys.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#B8A800", "#777777", "#AAAAAA")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
PANELS = (
    ("cpu_seconds", "process CPU time (s)"),
    ("passes", "network passes (1000 images)"),
    ("iteration", "iterations"),
)


def averaged(curves: Sequence[Curve], cost: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return mean cost, and mean, lowest and highest reward over seeds, at each evaluation that all have."""
    length = min(len(curve.evaluations) for curve in curves)
    columns = [[curve.evaluations[number] for curve in curves] for number in range(length)]
    scale = 1e-3 if cost == "passes" else 1.0
    x = [scale * fmean(e[cost] for e in column) for column in columns]
    rewards = [[e["reward"] for e in column] for column in columns]
    return x, [fmean(r) for r in rewards], [min(r) for r in rewards], [max(r) for r in rewards]


def draw(path: Path, rows: Sequence[Row], targets: Sequence[float], title: str) -> None:
    """Plot means with bands from the lowest to the highest seed; a row of panels per kind of settings.

    Args:
        path: a ``.png`` file.
        rows: methods whose runs all failed are left out.
        targets: drawn as thin lines.
    """
    shown = [row for row in rows if row.finished]
    methods = list(dict.fromkeys(row.method for row in rows))
    kinds = list(dict.fromkeys(row.settings for row in shown)) or [""]
    figure = Figure(figsize=(15, 0.8 + 4.1 * len(kinds)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(kinds), len(PANELS), sharex="col", sharey=True, squeeze=False)
    for axes, kind in zip(grid, kinds, strict=True):
        of_kind = [row for row in shown if row.settings == kind]
        for axis, (cost, _) in zip(axes, PANELS, strict=True):
            _draw_panel(axis, of_kind, cost, methods, targets)
        axes[0].set_ylabel(f"held-out reward, {kind}" if len(kinds) > 1 else "held-out reward")
        if of_kind:
            axes[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, handlelength=2.5)
    for axis, (_, label) in zip(grid[-1], PANELS, strict=True):
        axis.set_xlabel(label)
        axis.set_xlim(left=0)  # once all is drawn: it ends the automatic choice of the right edge
    figure.suptitle(title)
    draft = path.with_suffix(".tmp.png")
    figure.savefig(draft, dpi=130)
    draft.replace(path)


def _draw_panel(axis: Any, rows: Sequence[Row], cost: str, methods: Sequence[str], targets: Sequence[float]) -> None:
    for row in rows:
        number = methods.index(row.method)
        colour = COLOURS[number % len(COLOURS)]
        x, mean, low, high = averaged(row.finished, cost)
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        marker = MARKERS[number % len(MARKERS)]
        axis.plot(x, mean, color=colour, linewidth=1.8, marker=marker, markersize=4, label=_label(row))
    for target in targets:
        axis.axhline(target, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _label(row: Row) -> str:
    done, planned = len(row.finished), len(row.curves)
    return row.method if done == planned else f"{row.method} ({done} of {planned} seeds)"
