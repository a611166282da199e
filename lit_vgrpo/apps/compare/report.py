"""Results of a comparison or a sweep: rewards, costs to reach targets, and the files with them."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pydantic_core import to_json

from lit_vgrpo.apps.compare.options import CompareOptions
from lit_vgrpo.apps.compare.plan import Budget, Entrant, Run
from lit_vgrpo.config.tree import set_value
from lit_vgrpo.errors import markdown_table, score_text
from lit_vgrpo.system.paths import new_file, write_atomically
from lit_vgrpo.system.process import versions
from lit_vgrpo.training.resume import read_summary

COSTS = ("iteration", "cpu_seconds", "train_seconds", "passes", "forward_equivalents", "images")
"""Costs up to an evaluation: cumulative, training only."""
RATIOS = {"cpu_ratio": "cpu_seconds", "equivalents_ratio": "forward_equivalents"}
"""Costs that are given relative to the base method's."""
SHOWN = {"CPU s": "cpu_seconds", "passes": "passes", "equivalents": "forward_equivalents"}
"""Costs in the tables, by title."""
RANKING_COST = "forward_equivalents"
"""Cost that the points of a sweep are ranked by: the same on every machine and under any load."""
LAST = 2
"""Number of evaluations averaged to the final reward of a sweep, to smooth out oscillations."""
ENTRANT = ["method", "settings"]
# Okabe and Ito's palette without its yellow, then a brown and a grey; additional methods repeat them with other dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F4F24", "#888888")
LINES = ("-", (0, (5, 2)), (0, (1, 1.3)), (0, (5, 1.5, 1, 1.5)))
PANELS = {
    "cpu_seconds": "process CPU time (s)",
    "forward_equivalents": "forward-pass equivalents (images)",
    "iteration": "iterations",
    "passes": "network passes (images)",
}
ONE_SEED = "**One seed: no conclusion.** Methods differ by chance too. Use --seeds 3 or more."
OF_TARGETS = (
    "Costs to a target are interpolated between two evaluations and averaged over the seeds if all reached it. "
)
NOTE = (
    "Costs cover training only. A network pass is one forward pass of one image; guidance counts twice, backward "
    "passes do not count. In forward-pass equivalents, a pass with gradient counts three times. CPU seconds are "
    "measured for the process and depend on the machine and its load."
)


@dataclass
class Curve:
    """The evaluations of one run, each with ``reward`` and :data:`COSTS`; a failed run has none, but an ``error``."""

    method: str
    settings: str
    seed: int
    evaluations: Sequence[Mapping[str, Any]]
    error: str = ""

    @classmethod
    def of(cls, run: Run, error: str) -> Curve:
        """Read the evaluations from a run's summary."""
        summary = {} if error else read_summary(run.folder) or {}
        scored = [asdict(one) for one in summary.get("evaluations", []) if not math.isnan(one.reward)]
        return cls(run.method, run.settings, run.seed, scored, error)

    @property
    def labels(self) -> dict[str, Any]:
        return {"method": self.method, "settings": self.settings, "seed": self.seed}


def summaries(curves: Iterable[Curve], last: int = 1) -> pd.DataFrame:
    """Return a row per run, NaN if it failed: reward at the start, final and best, and the costs at the end.

    The final reward is the mean of the ``last`` evaluations.
    """
    rows = []
    for curve in curves:
        rows.append(curve.labels)
        if curve.evaluations:
            rewards = [evaluation["reward"] for evaluation in curve.evaluations]
            final = fmean((rewards[1:] or rewards)[-last:])
            rows[-1] |= {**curve.evaluations[-1], "start": rewards[0], "final": final, "best": max(rewards)}
    return pd.DataFrame(rows, columns=[*ENTRANT, "seed", "start", "final", "best", *COSTS])


def cost_of(evaluations: Sequence[Mapping[str, Any]], target: float) -> dict[str, float]:
    """Return the cost of reaching a held-out reward for the first time.

    Between the last evaluation below the target and the first one at or above it, every cost is interpolated
    linearly in the reward.

    Args:
        evaluations: Evaluations in order, the first at the start.

    Returns:
        The :data:`COSTS`; empty if the target was never reached.

    >>> steps = [dict.fromkeys(COSTS, 0.0) | {"reward": 0.5}, dict.fromkeys(COSTS, 10.0) | {"reward": 0.9}]
    >>> round(cost_of(steps, 0.6)["iteration"], 6)
    2.5
    """
    for number, after in enumerate(evaluations):
        if after["reward"] < target:
            continue
        if number == 0:
            return {name: float(after[name]) for name in COSTS}
        before = evaluations[number - 1]
        share = (target - before["reward"]) / (after["reward"] - before["reward"])
        return {name: before[name] + share * (after[name] - before[name]) for name in COSTS}
    return {}


def costs_by_seed(curves: Iterable[Curve], targets: Iterable[float]) -> pd.DataFrame:
    """Return a row per target and run with its :data:`COSTS`, NaN if it did not reach the target."""
    pairs = itertools.product(targets, curves)
    rows = [{**c.labels, "target": target, **cost_of(c.evaluations, target)} for target, c in pairs]
    return pd.DataFrame(rows, columns=[*ENTRANT, "target", "seed", *COSTS])


def mean_costs(each: pd.DataFrame, base: str) -> pd.DataFrame:
    """Return a row per target, method and settings, given the costs by seed.

    It has ``reached`` and ``of`` (numbers of seeds), the mean :data:`COSTS`, NaN unless every seed reached the target,
    and the :data:`RATIOS` to the base method with the same settings.
    """
    groups = each.groupby(["target", *ENTRANT], sort=False)
    mean = groups[list(COSTS)].mean()
    counts = groups["iteration"].agg(reached="count", of="size")
    mean = counts.join(mean.where(counts["reached"] == counts["of"])).reset_index()
    theirs = mean.loc[mean["method"] == base, ["target", "settings", *RATIOS.values()]]
    theirs = mean[["target", "settings"]].merge(theirs, how="left")
    for ratio, cost in RATIOS.items():
        mean[ratio] = mean[cost] / theirs[cost].where(theirs[cost] > 0)
    return mean


def reward_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return each method's held-out reward: at the start, at the end with that of each seed, and the best."""
    groups = runs.groupby(ENTRANT, sort=False)
    table = groups["final"].agg(lambda finals: f"{finals.count()}/{len(finals)}").to_frame("seeds")
    for column in ("start", "final", "best"):
        table[column] = groups[column].mean().map(reward_cell)
    table["each seed"] = groups["final"].agg(lambda finals: " / ".join(map(reward_cell, finals)))
    for title, cost in SHOWN.items():
        table[title] = groups[cost].mean().map(amount)
    return table.reset_index()


def differing_seeds(runs: pd.DataFrame) -> list[str]:
    """Return a sentence on the seeds of the method with the highest mean final reward, if another one finished."""
    finals = runs.dropna(subset="final").groupby(ENTRANT, sort=False)["final"]
    ends = finals.agg(["mean", "min", "max"]).sort_values("mean", ascending=False, kind="stable")
    if len(ends) < 2:
        return []
    best, lowest, highest = " ".join(ends.index[0]), ends["min"].iloc[0], ends["max"].iloc[0]
    close = [" ".join(entrant) for entrant in ends.index[1:] if ends["max"][entrant] >= lowest]
    seeds = f"The final reward of {best} is {reward_cell(lowest)} to {reward_cell(highest)} over its seeds"
    if not close:
        return [f"{seeds}; no seed of another method reaches this range."]
    return [f"**{seeds}; seeds of {', '.join(close)} reach this range, so their order may be chance.**"]


def target_table(each: pd.DataFrame, mean: pd.DataFrame, target: float, base: str) -> pd.DataFrame:
    """Return the cost of each method to reach a held-out reward, and each seed's iterations."""
    each, mean = (frame[frame["target"] == target] for frame in (each, mean))
    table = mean[ENTRANT].assign(reached=mean["reached"].astype(str) + "/" + mean["of"].astype(str))
    for title, cost in {"iterations": "iteration", **SHOWN}.items():
        table[title] = mean[cost].map(amount)
    for ratio, cost in RATIOS.items():
        title = next(title for title, name in SHOWN.items() if name == cost)
        table[f"{title} / {base}'s"] = ["-" if pd.isna(value) else f"{value:.2f}" for value in mean[ratio]]
    seeds = each.groupby(ENTRANT, sort=False)["iteration"].agg(lambda costs: " / ".join(map(amount, costs)))
    return table.assign(**{"iterations of each seed": seeds.to_list()})


def write_race(options: CompareOptions, entrants: Sequence[Entrant], curves: Sequence[Curve]) -> str:
    """Write ``compare.json``, ``.csv``, ``.md`` and ``.png``, and ``targets.csv`` for targets; return the tables."""
    runs, each = summaries(curves), costs_by_seed(curves, options.targets)
    mean = mean_costs(each, options.base_method)
    parts = ["## Held-out reward", _markdown(reward_table(runs))]
    for target in options.targets:
        table = target_table(each, mean, target, options.base_method)
        is_reached = bool(mean.loc[mean["target"] == target, "reached"].sum())
        best = f"The highest held-out reward is {reward_cell(runs['best'].max())}."
        never = f"No run reached it. {best} Choose a lower --target or more --iterations."
        parts += [f"## To reach {target:g}", _markdown(table) if is_reached else never]
        if (start := runs["start"].max()) >= target:
            parts.append(f"The start, {reward_cell(start)}, already reaches it. Choose a higher target.")
    tuned = {one.method: one.budget for one in entrants if one.settings == "tuned"}
    if tuned:
        searches = [f"- {method}: {budget or 'unknown'}" for method, budget in tuned.items()]
        parts += ["## Search for the tuned settings", "\n".join(searches)]
    if len({budget and budget.prompts for budget in tuned.values()}) > 1:
        parts.append("**The searches had different tasks.** Compare published settings, or search on this task.")
    about_seeds = [ONE_SEED] if len(options.seeds) == 1 else differing_seeds(runs)
    text = "\n\n".join([*about_seeds, *parts, *_failed(curves), bool(options.targets) * OF_TARGETS + NOTE])
    evaluations = evaluation_table(curves)
    _write_csv(options.out / "compare.csv", evaluations)
    if options.targets:
        _write_csv(options.out / "targets.csv", pd.concat([each, mean.assign(seed="mean")]))
    content = {"base": options.base_method, "final": runs.to_dict("records"), "costs": mean.to_dict("records")}
    _write(options, "compare", content, f"![held-out reward](compare.png)\n\n{text}", curves)
    if len(evaluations):
        draw(options.out / "compare.png", evaluations, options.targets, options.command.recipe.stem)
    return text


def evaluation_table(curves: Iterable[Curve]) -> pd.DataFrame:
    """Return a row per evaluation: method, settings, seed, reward and the :data:`COSTS`."""
    rows = [{**curve.labels, **evaluation} for curve in curves for evaluation in curve.evaluations]
    return pd.DataFrame(rows, columns=[*ENTRANT, "seed", "reward", *COSTS])


def sweep_points(entrants: Sequence[Entrant], curves: Sequence[Curve], targets: Iterable[float]) -> pd.DataFrame:
    """Return a row per point: means over its seeds, of the :data:`RANKING_COST` ``to TARGET``; NaN if one has none."""
    runs = summaries(curves, LAST)
    finished = runs.groupby(ENTRANT)["final"].transform(lambda finals: finals.notna().all())
    columns = ["start", "final", "best", "cpu_seconds", RANKING_COST]
    means = runs.where(finished.astype(bool), runs[ENTRANT]).groupby(ENTRANT, sort=False)[columns].mean()
    mean = mean_costs(costs_by_seed(curves, targets), "")
    for target in targets:
        means[f"to {target:g}"] = mean[mean["target"] == target].set_index(ENTRANT)[RANKING_COST]
    table = pd.DataFrame([{"method": e.method, "settings": e.settings, "values": _values(e)} for e in entrants])
    return table.join(means, on=ENTRANT)


def best_points(points: pd.DataFrame, targets: Sequence[float]) -> dict[str, int]:
    """Return the row of each method's best point, the first of equals; methods without a finished point are left out.

    Without targets, the best point has the highest final reward. With targets, its seeds all reached the highest
    target at the lowest mean cost in forward-pass equivalents. If none did, or costs are equal, the next target
    decides, and finally the final reward.
    """
    keys = [f"to {target:g}" for target in sorted(targets, reverse=True)]
    ascending = [True] * len(keys) + [False]
    ranked = points.dropna(subset="final").sort_values([*keys, "final"], ascending=ascending, kind="stable")
    return {method: row for row, method in ranked.drop_duplicates("method")["method"].items()}


def write_sweep(options: CompareOptions, entrants: Sequence[Entrant], curves: Sequence[Curve]) -> str:
    """Write ``sweep.json``, ``sweep.csv`` and ``sweep.md``; return the table and the blocks for the overlays."""
    points = sweep_points(entrants, curves, options.targets)
    best = best_points(points, options.targets)
    _write_csv(options.out / "sweep.csv", points)
    shown = points.drop(columns="settings")
    for column in shown.columns[2:]:
        shown[column] = shown[column].map(reward_cell if column in ("start", "final", "best") else amount)
    shown[""] = ["best" if row in best.values() else "" for row in points.index]
    about = f"Evaluated on {options.prompts}. The best point reached the highest target with all seeds for the least "
    about += f"{RANKING_COST}; then lower targets decide, then the final reward, a mean of {LAST} evaluations."
    parts = [_markdown(shown), about]
    for method, row in best.items():
        count = sum(entrant.method == method for entrant in entrants)
        prompts = f"{options.command.recipe.stem}, {options.prompts}"
        block = tuned_block(entrants[row], Budget(count, options.num_seeds, options.iterations, prompts))
        indented = "\n".join(f"    {line}" for line in block.splitlines())
        parts.append(
            f"{method}: {points['values'][row]}, final reward {score_text(points['final'][row])}\n\n{indented}"
        )
    text = "\n\n".join([*parts, *_failed(curves)])
    chosen = [{**record, "is_best": row in best.values()} for row, record in enumerate(points.to_dict("records"))]
    _write(options, "sweep", {"prompts": options.prompts, "points": chosen}, text, curves)
    return text


def tuned_block(point: Entrant, budget: Budget) -> str:
    """Return the lines to paste into the overlay: the settings, and the budget of their search."""
    # With its class, the objective takes options under init_args; the class itself stays that of published:
    tuned: dict[str, Any] = {"model": {"objective": {"class_path": point.recipe["model"]["objective"]["class_path"]}}}
    for key, value in point.changed.items():
        set_value(tuned, key, value)
    del tuned["model"]["objective"]["class_path"]
    if not tuned["model"]["objective"]:
        del tuned["model"]["objective"]
    return yaml.safe_dump({"tuned": tuned, "found": asdict(budget)}, sort_keys=False, width=120)


def _values(point: Entrant) -> str:
    return ", ".join(f"{key.rpartition('.')[2]}={json.dumps(value)}" for key, value in point.changed.items())


def _failed(curves: Iterable[Curve]) -> list[str]:
    """Return a heading and the failed runs; nothing if none failed."""
    lines = [f"- {c.method} {c.settings}, seed {c.seed}: {c.error}" for c in curves if c.error]
    return ["## Failed runs", "\n".join(lines)] if lines else []


def _write(options: CompareOptions, name: str, content: dict[str, Any], text: str, curves: Iterable[Curve]) -> None:
    """Write the Markdown and the JSON file, with the command, the machine and the evaluations of every run."""
    seeds = ", ".join(map(str, options.seeds))
    head = f"# {options.command.recipe.stem}: {name}\n\n    {options.line}\n\n{options.iterations} iterations, "
    head += f"seeds {seeds}; evaluated every {options.evaluate_every} iterations.\n\n"
    write_atomically(options.out / f"{name}.md", f"{head}{text}\n")
    setting = {
        "command": options.line,
        "task": options.task,
        "seeds": options.seeds,
        "iterations": options.iterations,
        "evaluate_every": options.evaluate_every,
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),
        "cpu_cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), **versions()},
        "targets": options.targets,
    }
    content = {**setting, **content, "runs": [asdict(curve) for curve in curves]}
    write_atomically(options.out / f"{name}.json", to_json(content, indent=2, inf_nan_mode="null").decode() + "\n")


def _write_csv(path: Path, table: pd.DataFrame) -> None:
    write_atomically(path, table.to_csv(index=False, lineterminator="\n"))


def _markdown(table: pd.DataFrame) -> str:
    return markdown_table([list(table.columns), *table.to_numpy().tolist()], left=2)


def reward_cell(value: float) -> str:
    """Format a reward; a dash for NaN."""
    return "-" if pd.isna(value) else score_text(value)


def amount(value: float) -> str:
    """Format a cost: one decimal below a hundred, thousands marked.

    >>> amount(12.345), amount(123456.7), amount(float("nan"))
    ('12.3', '123,457', '-')
    """
    if pd.isna(value):
        return "-"
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}"


def draw(path: Path, evaluations: pd.DataFrame, targets: Sequence[float], title: str) -> None:
    """Plot means over the seeds, with bands from the lowest to the highest seed; four panels per kind of settings."""
    seeds = evaluations["seed"].nunique()
    about = f"mean and range of {seeds} seeds" if seeds > 1 else "one seed: methods differ by chance too"
    ends = [*evaluations["reward"].agg(["min", "max"]), *targets]
    margin = 0.05 * (max(ends) - min(ends)) or 0.05
    label_of_target: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "bottom", "color": "#777777"}
    kinds = evaluations.groupby("settings", sort=False)
    styles = dict(zip(evaluations["method"].unique(), itertools.product(LINES, COLOURS), strict=False))
    figure = Figure(figsize=(14, 0.6 + 8.2 * len(kinds)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}, {about}")
    for part, (kind, kind_rows) in zip(figure.subfigures(len(kinds), squeeze=False)[:, 0], kinds, strict=True):
        axes = part.subplots(2, 2, sharey=True).flat
        for axis, (cost, label) in zip(axes, PANELS.items(), strict=True):
            for method, rows in kind_rows.groupby("method", sort=False):
                points = rows.groupby("iteration", as_index=False)
                x, reward = points[cost].mean()[cost], points["reward"].agg(["mean", "min", "max"])
                line, colour = styles[method]
                axis.fill_between(x, reward["min"], reward["max"], color=colour, alpha=0.1, linewidth=0)
                axis.plot(x, reward["mean"], color=colour, linestyle=line, label=method, marker=".")
            for target in targets:
                axis.axhline(target, color="#999999", linewidth=0.8, linestyle=":", zorder=0)
                axis.annotate(f"target {target:g}", (0.01, target), **label_of_target)
            axis.set(xlabel=label, ylabel=f"held-out reward, {kind}", ylim=(min(ends) - margin, max(ends) + margin))
            if cost == "iteration":
                axis.xaxis.set_major_locator(MaxNLocator(integer=True))
            axis.grid(alpha=0.25)
        part.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    with new_file(path) as file:
        figure.savefig(file, format="png", dpi=110)
