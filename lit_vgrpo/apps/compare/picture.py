"""Plot of a comparison: held-out reward against four costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lit_vgrpo.apps.compare.results import Curve, Row

# Okabe and Ito's palette without its yellow, told apart with any kind of colour vision; then a brown and a grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F4F24", "#888888")
LINES = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (5, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
PANELS = (
    ("cpu_seconds", "process CPU time (s)"),
    ("forward_equivalents", "forward-pass equivalents (1000 images)"),
    ("iteration", "iterations"),
    ("passes", "network passes (1000 images)"),
)
COLUMNS = 2
IN_THOUSANDS = ("passes", "forward_equivalents")
FEW = 6
"""Number of curves up to which bands and markers do not hide each other."""


def averaged(curves: Sequence[Curve], cost: str) -> tuple[list[float], list[float], list[float], list[float]]:
    """Return mean cost, and mean, lowest and highest reward over seeds, at each evaluation that all have."""
    length = min(len(curve.evaluations) for curve in curves)
    columns = [[curve.evaluations[number] for curve in curves] for number in range(length)]
    scale = 1e-3 if cost in IN_THOUSANDS else 1.0
    x = [scale * fmean(e[cost] for e in column) for column in columns]
    rewards = [[e["reward"] for e in column] for column in columns]
    return x, [fmean(r) for r in rewards], [min(r) for r in rewards], [max(r) for r in rewards]


def styles_of(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return each method's colour, line and marker, no two alike up to 36 methods.

    Variants of one method, whose names start with its name and an underscore, share its colour with other lines.

    >>> {name: style["color"] for name, style in styles_of(["vgrpo_anchor", "nft", "vgrpo"]).items()}
    {'nft': '#D55E00', 'vgrpo': '#0072B2', 'vgrpo_anchor': '#0072B2'}
    """
    used: set[tuple[int, int]] = set()
    names = list(dict.fromkeys(method.partition("_")[0] for method in methods))
    styles = {}
    for method in sorted(methods, key=lambda name: "_" in name):  # the method itself before its variants
        number, colour = methods.index(method), names.index(method.partition("_")[0]) % len(COLOURS)
        free = [place for place in range(len(LINES)) if (colour, place) not in used]
        line = free[0] if free else number % len(LINES)
        used.add((colour, line))
        marker = MARKERS[number % len(MARKERS)]
        styles[method] = {"color": COLOURS[colour], "linestyle": LINES[line], "marker": marker}
    return styles


def draw(path: Path, rows: Sequence[Row], targets: Sequence[float], title: str) -> None:
    """Plot means over the seeds, with bands from the lowest to the highest seed; four panels per kind of settings.

    Each legend is in the order of the final rewards.

    Args:
        path: a ``.png`` file.
        rows: methods whose runs all failed are left out.
        targets: drawn as thin lines.
    """
    shown = [row for row in rows if row.finished]
    styles = styles_of(list(dict.fromkeys(row.method for row in rows)))
    kinds = list(dict.fromkeys(row.settings for row in shown)) or [""]
    figure = Figure(figsize=(14, 0.6 + 8.2 * len(kinds)), layout="constrained")
    FigureCanvasAgg(figure)
    parts = figure.subfigures(len(kinds), 1, squeeze=False)[:, 0]
    for part, kind in zip(parts, kinds, strict=True):
        of_kind = [row for row in shown if row.settings == kind]
        grid = part.subplots(-(-len(PANELS) // COLUMNS), COLUMNS, sharey=True)
        for axis, (cost, label) in zip(grid.flat, PANELS, strict=True):
            _draw_panel(axis, of_kind, cost, styles, targets)
            axis.set_xlabel(label)
            axis.set_xlim(left=0)  # once all is drawn: it ends the automatic choice of the right edge
        for axis in grid[:, 0]:
            axis.set_ylabel(f"held-out reward, {kind}" if len(kinds) > 1 else "held-out reward")
        if of_kind:
            lines, names = grid.flat[0].get_legend_handles_labels()
            order = sorted(range(len(of_kind)), key=lambda n: -(of_kind[n].final or 0.0))
            part.legend(
                [lines[n] for n in order],
                [names[n] for n in order],
                loc="outside right center",
                frameon=False,
                handlelength=3.2,
                title="by final reward",
                alignment="left",
            )
    figure.suptitle(title)
    draft = path.with_suffix(".tmp.png")
    figure.savefig(draft, dpi=110)
    draft.replace(path)


def _draw_panel(
    axis: Any, rows: Sequence[Row], cost: str, styles: dict[str, dict[str, Any]], targets: Sequence[float]
) -> None:
    few = len(rows) <= FEW
    for row in rows:
        style = styles[row.method]
        x, mean, low, high = averaged(row.finished, cost)
        axis.fill_between(x, low, high, color=style["color"], alpha=0.14 if few else 0.05, linewidth=0)
        step = 1 if few else max(1, len(x) // 4)
        places = slice((len(x) - 1) % step, None, step)  # always one at the end
        axis.plot(x, mean, linewidth=1.8, markersize=4.5, markevery=places, label=_label(row), **style)
    for target in targets:
        axis.axhline(target, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _label(row: Row) -> str:
    done, planned = len(row.finished), len(row.curves)
    return row.method if done == planned else f"{row.method} ({done} of {planned} seeds)"
