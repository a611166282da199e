"""The data of a run that its report shows, from the files in its folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lit_vgrpo.apps.report.kept import PromptSums, read_scores
from lit_vgrpo.config.recipe import loaded
from lit_vgrpo.errors import UserError
from lit_vgrpo.system.paths import CONFIG_NAME
from lit_vgrpo.training.loggers import read_table
from lit_vgrpo.training.resume import read_summary

AXES = {
    "iterations": "Iterations",
    "images": "Images",
    "seconds": "Seconds of training",
    "passes": "Network passes",
}
"""The costs against which curves are drawn."""
HELDOUT = "heldout/"
RUNNING, UNFINISHED = "running", "unfinished"


@dataclass(frozen=True)
class Point:
    """Metrics after a number of iterations, and the cost of training until then.

    Attributes:
        costs: by the names of :data:`AXES`; those that are not known are missing.
        metrics: by name; only numbers that are finite.
    """

    costs: dict[str, float]
    metrics: dict[str, float]

    @property
    def iteration(self) -> int:
        return int(self.costs["iterations"])


@dataclass
class RunData:
    """A run, finished or not.

    Attributes:
        folder: the run folder.
        recipe: its ``config.yaml`` as plain values; empty for a run of a Trainer of one's own, which has none.
        summary: ``summary.json``; empty if the run has not ended, or has gone on since it was written.
        iterations: one point per iteration of training.
        evaluations: one point per held-out evaluation, metrics without the prefix ``heldout/``.
        scores: by iteration, each prompt's scores; empty for a run that kept none.
        is_running: it is known to go on.
    """

    folder: Path
    recipe: dict[Any, Any]
    summary: dict[str, Any]
    iterations: list[Point]
    evaluations: list[Point]
    scores: dict[int, PromptSums] = field(default_factory=dict)
    is_running: bool = False

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def outcome(self) -> str:
        """State in which the run ended, in a word or two."""
        return RUNNING if self.is_running else str(self.summary.get("outcome", UNFINISHED))

    @property
    def num_iterations(self) -> int:
        """Iterations done."""
        known = [point.iteration for point in (*self.iterations[-1:], *self.evaluations[-1:])]
        return max([int(self.summary.get("iterations") or 0), *known])

    @cached_property
    def reward_names(self) -> list[str]:
        """Names of the rewards besides the weighted sum, as far as the metrics tell."""
        trained = [
            name.removeprefix("reward/")
            for point in self.iterations[-1:]
            for name in point.metrics
            if name.count("/") == 1 and f"{name}/std" in point.metrics
        ]
        scored = [name for own in self.scores.values() for name in own if name not in ("reward", "untrained_reward")]
        return list(dict.fromkeys([*self.summary.get("reward_parts_end", {}), *trained, *scored]))

    def total(self, cost: str) -> float | None:
        """Return a cost of the whole run; ``None`` where it is not known."""
        named = {"images": "images", "seconds": "train_seconds"}.get(cost)
        if named in self.summary:
            return float(self.summary[named])
        known = [point.costs[cost] for point in (*self.iterations, *self.evaluations) if cost in point.costs]
        return max(known, default=None)


def read_run(folder: Path, is_running: bool = False) -> RunData:
    """Return the data of a run folder; a run that was killed or resumed has what its files hold.

    Args:
        folder: the run folder.
        is_running: called by the run itself, whose summary is of an earlier part.

    Raises:
        UserError: a file of the folder cannot be read.
    """
    config = folder / CONFIG_NAME
    summary = ({} if is_running else read_summary(folder)) or {}
    iterations, evaluations = _points(_rows(folder / "metrics.csv"))
    last = max(iterations, default=0)
    if int(summary.get("iterations") or 0) < last:
        summary = {}
    for entry in summary.get("evaluations", []):
        _add_evaluation(evaluations, entry)
    if summary and evaluations:
        newest = evaluations[max(evaluations)].metrics
        newest |= _numbers({"reward": summary.get("heldout_reward_end"), **summary.get("reward_parts_end", {})})
        newest |= _numbers(summary.get("heldout_metrics_end", {}))
    return RunData(
        folder=folder,
        recipe=loaded(config) if config.exists() else {},
        summary=summary,
        iterations=[iterations[number] for number in sorted(iterations)],
        evaluations=[evaluations[number] for number in sorted(evaluations)],
        scores=read_scores(folder),
        is_running=is_running,
    )


def _rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of ``metrics.csv``; none where there is no such file, as with another logger.

    Raises:
        UserError: it cannot be read, or is not the table of a run.
    """
    try:
        return read_table(path)[1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not a run's table: {error}.") from error


def _points(rows: list[dict[str, str]]) -> tuple[dict[int, Point], dict[int, Point]]:
    """Return the points of training and of the evaluations, by iterations done; of equal ones the last counts."""
    iterations: dict[int, Point] = {}
    evaluations: dict[int, Point] = {}
    for row in rows:
        values = _numbers(row)
        done = int(values["epoch"]) + 1 if "epoch" in values else 0
        if "time/iteration_s" in values:
            passes = [value for name, value in values.items() if name.startswith("passes/")]
            costs = {"images": values.get("cost/images"), "seconds": values.get("cost/train_s")}
            known = {name: value for name, value in costs.items() if value is not None}
            iterations[done] = Point({"iterations": done, **known, "passes": sum(passes)}, values)
        held_out = {name.removeprefix(HELDOUT): own for name, own in values.items() if name.startswith(HELDOUT)}
        if held_out:
            evaluations[done] = Point({"iterations": done}, held_out)
    for done, point in evaluations.items():
        same = iterations.get(done)
        point.costs.update(dict.fromkeys(AXES, 0.0) if done == 0 else same.costs if same is not None else {})
    return iterations, evaluations


def _add_evaluation(evaluations: dict[int, Point], entry: Mapping[str, Any]) -> None:
    """Add an evaluation of the summary, which is more exact than the table and has the costs."""
    costs = {"iterations": "iteration", "images": "images", "seconds": "train_seconds", "passes": "passes"}
    numbers = _numbers({name: entry.get(key) for name, key in costs.items()})
    if "iterations" not in numbers:
        return
    point = evaluations.setdefault(int(numbers["iterations"]), Point({}, {}))
    point.costs.update(numbers)
    point.metrics.update(_numbers({"reward": entry.get("reward")}))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers."""
    found = {}
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            found[name] = number
    return found
