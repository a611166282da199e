"""Which curves a report draws, and their points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lit_vgrpo.apps.report.kept import interval
from lit_vgrpo.apps.report.run_data import AXES, Point, RunData

Numbers = npt.NDArray[np.float64]
MOST_POINTS = 400
"""Longer curves show means of neighbouring iterations."""
MOST_OTHERS = 12
RATIO = "Probability ratio"
PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Training reward", "Mean over the images of an iteration; its prompts change.", {"reward/mean": "reward"}),
    (
        "Spread of rewards",
        "Standard deviation over an iteration's images, and the share of groups without any.",
        {"reward/std": "standard deviation", "reward/no_spread": "groups without spread"},
    ),
    (
        RATIO,
        "Deviation of the ratio from 1; before an iteration's first update it should be near 0.",
        {"policy/ratio_deviation": "all updates", "policy/ratio_deviation_before_update": "before the first"},
    ),
    ("Clipped", "Share of the surrogate's terms that the clip cuts off.", {"policy/clip_fraction": "share"}),
    (
        "KL",
        "Distance from the weights that the method regularises to.",
        {"policy/kl": "KL", "policy/anchor_distance": "to the anchor"},
    ),
    ("Gradient norm", "Before clipping.", {"policy/grad_norm": "norm"}),
    (
        "Variance of the surrogate",
        "Coefficient of variation; within a group, what exceeds that of the images is noise.",
        {"surrogate/cv": "all images", "surrogate/cv_within": "within groups"},
    ),
    ("Loss", "As optimised; it need not fall.", {"policy/loss": "loss"}),
    ("Speed", "Images per second of training.", {"cost/images_per_second": "images/s"}),
)
HIDDEN = ("policy/updates", "policy/surrogate", "policy/skipped_updates")


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        xs: by the names of :data:`~lit_vgrpo.apps.report.run_data.AXES`, as long as ``ys``; NaN where not known.
        band: lower and upper ends of the intervals, NaN where there is none.
        marked: every point is marked.
    """

    label: str
    colour: int
    xs: dict[str, Numbers]
    ys: Numbers
    band: tuple[Numbers, Numbers] | None = None
    marked: bool = False


@dataclass(frozen=True)
class Panel:
    """A plot of a few curves."""

    title: str
    about: str
    series: list[Series]

    @property
    def description(self) -> str:
        """The plot in words, for those who do not see it."""
        ends = [f"{s.label}: from {s.ys[0]:.4g} to {s.ys[-1]:.4g}" for s in self.series]
        return f"{self.title}. {'; '.join(ends)}."


def panels(runs: Sequence[RunData]) -> list[Panel]:
    """Return the plots of a run, with several curves each, or of several runs, with a curve for each run."""
    found = list(_one(runs[0]) if len(runs) == 1 else _several(runs))
    return [panel for panel in found if any(len(series.ys) > 1 for series in panel.series) and not _is_idle(panel)]


def _is_idle(panel: Panel) -> bool:
    """Return True for a plot that is 0 throughout, such as that of a clip that is off; of a ratio that says much."""
    return not panel.title.startswith(RATIO) and not any(series.ys.any() for series in panel.series)


def _one(run: RunData) -> Iterator[Panel]:
    rewards = run.reward_names
    held = [("reward", "reward"), ("untrained_reward", "untrained reward")]
    about = "The weighted sum on prompts that are not trained on; the band is its 95 % interval over prompts."
    yield _panel("Held-out reward", about, [run], dict(held), heldout=True)
    if len(rewards) > 1:
        parts = {name: name for name in rewards}
        yield _panel("Held-out rewards, each", "The parts of the weighted sum.", [run], parts, heldout=True)
    for title, about, metrics in PANELS:
        shown = {**metrics, **{f"reward/{name}": name for name in rewards if len(rewards) > 1}}
        yield _panel(title, about, [run], shown if title == "Training reward" else metrics)
    yield from _others([run])


def _several(runs: Sequence[RunData]) -> Iterator[Panel]:
    about = "On the same prompts, which are not trained on; bands are 95 % intervals over prompts."
    yield _panel("Held-out reward", about, runs, {"reward": "reward"}, heldout=True)
    rewards = list(dict.fromkeys(name for run in runs for name in run.reward_names))
    for name in ["untrained_reward", *(rewards if len(rewards) > 1 else [])]:
        yield _panel(f"Held-out {name.replace('_', ' ')}", "", runs, {name: name}, heldout=True)
    for title, about, metrics in PANELS:
        for metric, label in metrics.items():
            own = title if len(metrics) == 1 else f"{title}: {label}"
            yield _panel(own, about if len(metrics) == 1 else "", runs, {metric: label})
    yield from _others(runs)


def _others(runs: Sequence[RunData]) -> Iterator[Panel]:
    """Yield a plot for each metric of the training method that no other plot shows."""
    shown = {metric for _, _, metrics in PANELS for metric in metrics} | set(HIDDEN)
    names = {n for run in runs for point in run.iterations[-1:] for n in point.metrics if n.startswith("policy/")}
    for name in sorted(names - shown)[:MOST_OTHERS]:
        yield _panel(name.removeprefix("policy/").replace("_", " ").capitalize(), "", runs, {name: name})


def _panel(title: str, about: str, runs: Sequence[RunData], metrics: dict[str, str], heldout: bool = False) -> Panel:
    series = []
    for number, run in enumerate(runs):
        for place, (metric, label) in enumerate(metrics.items()):
            points = [point for point in (run.evaluations if heldout else run.iterations) if metric in point.metrics]
            if not points:
                continue
            several = len(runs) > 1
            names = run.reward_names
            part = metric.removeprefix("reward/")
            # A reward has the same colour in every plot.
            colour = number if several else names.index(part) + 1 if part in names and len(names) > 1 else place
            made = _series(run, points, metric, run.name if several else label, colour, heldout)
            series.append(made)
    return Panel(title, about, series)


def _series(run: RunData, points: list[Point], metric: str, label: str, colour: int, heldout: bool) -> Series:
    ys = np.array([point.metrics[metric] for point in points])
    xs = {axis: np.array([point.costs.get(axis, np.nan) for point in points]) for axis in AXES}
    if heldout:
        found = [run.scores.get(point.iteration, {}).get(metric) for point in points]
        ends = [interval(own) if own else None for own in (found if metric == "reward" else [])]
        low = np.array([np.nan if own is None else own.low for own in ends])
        high = np.array([np.nan if own is None else own.high for own in ends])
        band = (low, high) if len(low) and np.isfinite(low).any() else None
        return Series(label, colour, xs, ys, band, marked=True)
    if len(ys) > MOST_POINTS:
        ys, *means = _shortened([ys, *xs.values()])
        xs = dict(zip(xs, means, strict=True))
    return Series(label, colour, xs, ys)


def _shortened(columns: list[Numbers]) -> list[Numbers]:
    """Return the means of equally many neighbours, at most :data:`MOST_POINTS`, the last perhaps of fewer."""
    step = -(-len(columns[0]) // MOST_POINTS)
    starts = np.arange(0, len(columns[0]), step)
    counts = np.diff([*starts, len(columns[0])])
    return [np.add.reduceat(column, starts) / counts for column in columns]
