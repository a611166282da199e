"""The plots of a report: matplotlib's SVG, made to take the page's colours and font."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lit_vgrpo.apps.report.curves import Panel, Series
from lit_vgrpo.apps.report.run_data import AXES
from lit_vgrpo.apps.report.wording import short

NUM_COLOURS = 8
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
WIDTH, HEIGHT = 440, 230
# Stand-ins that become the page's own colours, which differ between light and dark.
INK, GRID = "#fe0001", "#fe0002"
SERIES = [f"#fd00{number:02x}" for number in range(NUM_COLOURS)]
VARIABLES = {INK: "--quiet", GRID: "--line", **{colour: f"--s{n}" for n, colour in enumerate(SERIES)}}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "path.simplify": True,
}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
# Time in units that people read, by the largest value from which each is used.
TIMES = ((2 * 86400, 3600, "h"), (2 * 3600, 60, "min"), (0, 1, "s"))


@dataclass(frozen=True)
class Plot:
    """A panel as SVG, drawn against each cost.

    Attributes:
        drawings: SVG by the names of :data:`~lit_vgrpo.apps.report.run_data.AXES`; unknown costs are missing.
    """

    panel: Panel
    drawings: dict[str, str]


def draw(panel: Panel, name: str) -> Plot:
    """Draw a panel against every cost.

    Args:
        name: starts the ids in the SVG, which must be unique in the page.
    """
    with rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.095, 0.12, 0.89, 0.84))
        axes.patch.set_visible(False)
        figure.patch.set_visible(False)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0, pad=5)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        drawings = {}
        for axis in AXES:
            known = [series for series in panel.series if np.isfinite(series.xs[axis]).any()]
            if known:
                drawings[axis] = _drawn(figure, axes, known, axis, f"{name}-{axis}")
        return Plot(panel, drawings)


def _drawn(figure: Figure, axes: Any, known: list[Series], axis: str, name: str) -> str:
    for artist in (*axes.lines, *axes.collections):
        artist.remove()
    most = max(float(np.nanmax(series.xs[axis])) for series in known)
    scale, unit = 1.0, ""
    if axis == "seconds":
        scale, unit = next((step, f" {word}") for least, step, word in TIMES if most > least or not least)
    for series in known:
        _add(axes, series, series.xs[axis] / scale)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{short(value)}{unit if value else ''}"))
    axes.set_xlim(0, most / scale or 1)
    axes.autoscale(axis="y")
    axes.margins(y=0.08)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=NO_METADATA)
    return _adapted(text.getvalue(), name)


def _add(axes: Any, series: Series, xs: Any) -> None:
    colour = SERIES[series.colour % NUM_COLOURS]
    style = DASHES[(series.colour // NUM_COLOURS + series.colour) % len(DASHES)]
    if series.band is not None:
        axes.fill_between(xs, *series.band, color=colour, alpha=0.14, linewidth=0)
    marker = {"marker": "o", "markersize": 4, "markeredgewidth": 0} if series.marked else {}
    axes.plot(
        xs, series.ys, color=colour, linewidth=1.8, linestyle=style, solid_capstyle="round", clip_on=False, **marker
    )


def _adapted(svg: str, name: str) -> str:
    """Return matplotlib's SVG for use inside of an HTML page.

    Without what precedes and styles the whole document, with ids of its own, and the page's colours and font.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<style.*?</style>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(
        r"<svg[^>]*>", f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true" focusable="false">', body, count=1
    )
    body = re.sub(r"<metadata.*?</metadata>", "", body, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body).replace("xlink:href", "href")
    body = re.sub(r"font(-\w+)?: [^;\"]*;? ?", "", body)
    body = re.sub(r' transform="rotate\(-0 [^"]*"', "", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return re.sub(r"\s*\n\s*", " ", body)
