"""Curves of a report: metrics against each cost, as matplotlib's SVG in the page's colours and font."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from lit_vgrpo.core.records import FINGERPRINT
from lit_vgrpo.report.run_data import AXES, RunData, interval

Numbers = npt.NDArray[np.float64]
FEWEST_ITERATIONS = 3
"""Shorter runs have no curves."""
MOST_BANDS = 3
"""More runs in a plot show no intervals, which would overlap."""
MOST_POINTS = 400
"""Longer curves show means of neighbouring iterations."""
LARGEST = 1e300
"""matplotlib fails on axes whose length overflows."""
PANELS: dict[str, dict[str, str]] = {
    "Training reward": {"reward/mean": "reward"},
    "Spread of rewards": {"reward/std": "standard deviation", "reward/no_spread": "groups without spread"},
    "Probability ratio: deviation from 1": {
        "policy/ratio_deviation": "all updates",
        "policy/ratio_deviation_before_update": "before the first",
    },
    "KL": {"policy/kl": "KL"},
    "Distance to the anchor": {"policy/anchor_distance": "to the anchor"},
    "Variation of the surrogate": {"surrogate/cv": "all images", "surrogate/cv_within": "within groups"},
    "Images per second": {"cost/images_per_second": "images/s", "cost/images_per_second_per_device": "per device"},
    "Model FLOPs utilisation": {"cost/mfu": "share of the device's peak"},
}
"""Metrics and their labels by the title of their plot."""
NOTES = {
    "Spread of rewards": "Groups without spread give no gradient. Near 1, nothing is left to learn from.",
    "Probability ratio: deviation from 1": "How far the updates of an iteration move the policy from its rollout. "
    "Above the clip for most images, the learning rate is too high.",
    "KL": "Small and flat is healthy. If it grows steadily, lower the learning rate or raise kl_weight.",
    "Distance to the anchor": "Small and flat is healthy. If it grows steadily, lower the learning rate or raise "
    "anchor_weight.",
    "Variation of the surrogate": "Coefficient of variation. Within groups it should be several times smaller: there, "
    "images share their pairs of time and noise.",
    "Images per second": "Over the whole iteration, with the rewards. Flat is healthy.",
    "Model FLOPs utilisation": "Operations of the network passes, relative to the device's peak.",
}
"""What to look for in a plot of diagnostics, by its title; docs/watch.md says the same of the metrics."""
HIDDEN = ("policy/updates", "policy/surrogate", "policy/skipped_updates")

NUM_COLOURS = 8
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
WIDTH, HEIGHT = 440, 230
# Replaced by the page's colours, which differ between light and dark.
INK, GRID = "#fe0001", "#fe0002"
SERIES = [f"#fd00{number:02x}" for number in range(NUM_COLOURS)]
VARIABLES = {INK: "--quiet", GRID: "--line", **{colour: f"--s{n}" for n, colour in enumerate(SERIES)}}
STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.edgecolor": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "path.simplify": False,  # every point has a value to show
}


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        xs: By the names of :data:`AXES`, as long as ``ys``; NaN if unknown.
        ys: NaN between evaluations that cannot be compared, where the curve breaks.
        band: Lower and upper ends of the intervals, NaN if missing; ``None`` for a curve of training.
    """

    label: str
    colour: int
    xs: dict[str, Numbers]
    ys: Numbers
    band: tuple[Numbers, Numbers] | None = None

    def is_like(self, other: Series) -> bool:
        """Return ``True`` if both curves cannot be told apart."""
        return len(self.ys) == len(other.ys) and bool(np.allclose(self.ys, other.ys, rtol=1e-3, equal_nan=True))


@dataclass
class Plot:
    """A plot of a few curves, with its SVG by the names of :data:`AXES`; unknown costs are missing."""

    title: str
    series: list[Series]
    drawings: dict[str, str] = field(default_factory=dict)

    @property
    def is_result(self) -> bool:
        """``True`` for rewards, ``False`` for diagnostics of the training."""
        return self.title.startswith(("Held-out", "Training reward"))

    @property
    def note(self) -> str:
        """What to look for, in a sentence or two; empty if unknown."""
        if self.title.startswith("Held-out"):
            band = "; the band is the reward's 95 % interval over prompts" if self.has_band else ""
            return f"On prompts that are not trained on{band}."
        return next((note for title, note in NOTES.items() if self.title.startswith(title)), "")

    @property
    def measured(self) -> str:
        """What the y-axis shows; plots of the same rewards, held-out and of training, share its limits."""
        return self.title.partition(" ")[2].removesuffix(": reward") if self.is_result else self.title

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest value, also of the intervals."""
        ys = np.concatenate([part for series in self.series for part in (series.ys, *(series.band or ()))])
        return float(np.nanmin(ys)), float(np.nanmax(ys))

    @property
    def has_band(self) -> bool:
        """``True`` if a curve shows its intervals."""
        return any(series.band is not None and np.isfinite(series.band[0]).any() for series in self.series)

    @property
    def description(self) -> str:
        """Text for readers who cannot see the plot."""
        parts = [(s.label, s.ys[np.append(-1, np.flatnonzero(np.isnan(s.ys)))[-1] + 1 :]) for s in self.series]
        ends = [f"{label}: from {ys[0]:.4g} to {ys[-1]:.4g}" for label, ys in parts]
        return f"{self.title}. {'; '.join(ends)}."


def plots(runs: Sequence[RunData], mark: str = "") -> list[Plot]:
    """Return the plots of a run, with several curves each, or of several runs, with a curve for each run.

    ``mark`` makes the ids in their SVGs unique in a page with others.
    """
    if max(len(run.iterations) for run in runs) < FEWEST_ITERATIONS:
        return []
    rewards = list(dict.fromkeys(name for run in runs for name in run.reward_names))
    parts = {name: name for name in rewards if len(rewards) > 1}
    result = _plots("Held-out reward", runs, {"reward": "reward", **parts, "untrained_reward": "untrained reward"})
    columns = {column for run in runs for point in run.iterations for column in point.metrics}
    with_std = (name for name in columns if name.startswith("source/") and name.endswith("/std"))
    sources = sorted(name.removeprefix("source/").removesuffix("/std") for name in with_std)
    for stage in ("Held-out", "Training"):
        result += _plots(f"{stage} reward by source", runs, {f"source/{name}": name for name in sources})
    tasks = list(dict.fromkeys(n for run in runs for point in run.evaluations for n in point.metrics if "/" in n))
    for benchmark in dict.fromkeys(name.partition("/")[0] for name in tasks if not name.startswith("source/")):
        own = {name: name.partition("/")[2] for name in tasks if name.startswith(f"{benchmark}/")}
        result += _plots(f"Held-out prompts of {benchmark}", runs, own)
    for title, metrics in PANELS.items():
        each = {f"reward/{name}": name for name in parts} if title == "Training reward" else {}
        result += _plots(title, runs, metrics | each)
    shown = {metric for metrics in PANELS.values() for metric in metrics} | set(HIDDEN)
    logged = {n for run in runs for point in run.iterations[-1:] for n in point.metrics if n.startswith("policy/")}
    for name in sorted(logged - shown):  # of the training method
        result += _plots(name.removeprefix("policy/").replace("_", " ").capitalize(), runs, {name: name})
    for number, plot in enumerate(result):
        lows, highs = zip(*(other.limits for other in result if other.measured == plot.measured), strict=True)
        for axis in AXES:
            known = [series for series in plot.series if np.isfinite(series.xs[axis]).any()]
            with rc_context({**STYLE, "svg.hashsalt": f"{mark}{number}-{axis}"}):
                plot.drawings.update({axis: _svg(known, axis, (min(lows), max(highs)))} if known else {})
    return result


def _plots(title: str, runs: Sequence[RunData], metrics: dict[str, str]) -> list[Plot]:
    """Return one plot of a run's metrics, or a plot of each metric of several runs, without empty ones."""
    several, result = len(runs) > 1, list[Plot]()
    groups = [{metric: label} for metric, label in metrics.items()] if several else [metrics]
    for group in groups:
        curves = [(run, metric, run.name if several else label) for run in runs for metric, label in group.items()]
        series: list[Series] = []
        for number, curve in enumerate(curves):
            one = _series(*curve, number, title.startswith("Held-out"), len(runs) <= MOST_BANDS)
            if one is not None and (several or not any(one.is_like(other) for other in series)):
                series.append(one)  # a sum of one reward is that reward
        name = title if len(groups) == 1 else f"{title}: {next(iter(group.values()))}"
        # A curve that is 0 throughout, such as that of a clip that is off, shows nothing.
        is_empty = not any(one.ys.any() and len(one.ys) > 1 for one in series)
        result += [] if is_empty or any(map(partial(_alike, series), result)) else [Plot(name, series)]
    return result


def _alike(series: list[Series], plot: Plot) -> bool:
    return len(series) == len(plot.series) and all(map(Series.is_like, series, plot.series))


def _series(run: RunData, metric: str, label: str, colour: int, heldout: bool, has_band: bool) -> Series | None:
    points = [point for point in (run.evaluations if heldout else run.iterations) if metric in point.metrics]
    if not points:
        return None
    ys = np.array([point.metrics[metric] for point in points], float)
    ys[np.abs(ys) > LARGEST] = np.nan
    xs = {axis: np.array([point.costs.get(axis, np.nan) for point in points], float) for axis in AXES}
    if heldout:
        sums = [run.scores_at(point).get(metric) if metric == "reward" and has_band else None for point in points]
        _, low, high = np.array([interval(each) or (np.nan,) * 3 for each in sums]).T
        marks = [point.metrics.get(FINGERPRINT) for point in points]
        changes = [number for number in range(1, len(marks)) if marks[number] != marks[number - 1]]
        ys, low, high, *places = (np.insert(part, changes, np.nan) for part in (ys, low, high, *xs.values()))
        return Series(label, colour, dict(zip(xs, places, strict=True)), ys, (low, high))
    return Series(label, colour, {axis: _shortened(values) for axis, values in xs.items()}, _shortened(ys))


def _shortened(values: Numbers) -> Numbers:
    return np.array([part.mean() for part in np.array_split(values, min(len(values), MOST_POINTS))])


def _svg(known: list[Series], axis: str, limits: tuple[float, float]) -> str:
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    FigureCanvasSVG(figure)
    axes = figure.add_axes((0.095, 0.12, 0.89, 0.84))
    axes.patch.set_visible(False)
    figure.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, pad=5)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    most = max(float(np.nanmax(series.xs[axis])) for series in known)
    scale = 60 if axis == "seconds" else 1
    for number, series in enumerate(known):
        xs, colour = series.xs[axis] / scale, SERIES[series.colour % NUM_COLOURS]
        style = DASHES[(series.colour // NUM_COLOURS + series.colour) % len(DASHES)]
        marker: Any = {}
        if series.band is not None:
            axes.fill_between(xs, *series.band, color=colour, alpha=0.14, linewidth=0)
            marker = {"marker": "o", "markersize": 4, "markeredgewidth": 0}
        axes.plot(
            xs, series.ys, color=colour, linewidth=1.8, linestyle=style, clip_on=False, gid=f"curve-{number}", **marker
        )
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    for side in (axes.xaxis, axes.yaxis):
        side.set_major_formatter(FuncFormatter(lambda x, _: EngFormatter(sep="")(x) if abs(x) >= 1e4 else f"{x:.4g}"))
    axes.set_xlim(0, most / scale or 1)
    margin = 0.08 * (limits[1] - limits[0]) or 0.05 * abs(limits[1]) or 1
    axes.set_ylim(limits[0] - margin, limits[1] + margin)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    # The page's script computes a point's values from its position, given where 0 and 1 of both axes are.
    (left, bottom), (right, top) = axes.transData.transform([(0, 0), (1, 1)]) * 72 / figure.dpi
    head = f'data-x="{left:.4f} {right - left:.6g}" data-y="{HEIGHT - bottom:.4f} {bottom - top:.6g}"'
    return _for_page(text.getvalue(), head, [series.label for series in known])


def _for_page(svg: str, attributes: str, labels: list[str]) -> str:
    """Return matplotlib's SVG without document-level parts, in the page's colours and font."""
    body = re.sub(r"<style.*?</style>|<metadata.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {attributes} aria-hidden="true" focusable="false">'
    body = re.sub(r"<svg[^>]*>", head, body, count=1).replace("xlink:href", "href")
    for number, label in enumerate(labels):
        body = body.replace(f'<g id="curve-{number}"', f'<g data-curve="{escape(label)}"')
    body = re.sub(r'<g id="[^"]+"', "<g", body)  # such as axes_1, in every plot
    body = re.sub(r"font(-\w+)?: [^;\"]*;? ?", "", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return re.sub(r"\s*\n\s*", " ", body)
