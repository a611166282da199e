"""Results of a comparison: rewards, and the cost of reaching each target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lit_vgrpo.apps.compare.overlays import Budget
from lit_vgrpo.apps.compare.progress import Status
from lit_vgrpo.training.resume import read_summary

COSTS = ("iteration", "cpu_seconds", "train_seconds", "passes", "forward_equivalents", "images")
"""Costs up to an evaluation: cumulative, training only."""
RATIOS = {"cpu_ratio": "cpu_seconds", "equivalents_ratio": "forward_equivalents"}
"""Costs that are given relative to the base method's."""

Evaluation = Mapping[str, Any]


@dataclass
class Curve:
    """The evaluations of one run.

    Attributes:
        evaluations: In order, each with ``reward`` and the :data:`COSTS`.
        error: Why the run has none; empty for a finished run.
    """

    method: str
    settings: str
    seed: int
    evaluations: list[Evaluation]
    error: str = ""

    @property
    def rewards(self) -> list[float]:
        return [float(evaluation["reward"]) for evaluation in self.evaluations]


def curves_of(statuses: Sequence[Status]) -> list[Curve]:
    """Return the evaluations in the runs' summaries; a failed run has none."""
    curves = []
    for status in statuses:
        run = status.run
        summary = (read_summary(run.folder) or {}) if status.state != "failed" else {}
        scored = [e for e in summary.get("evaluations", []) if _is_number(e.get("reward"))]
        curves.append(Curve(run.method, run.settings, run.seed, scored, status.error))
    return curves


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def cost_of(evaluations: Sequence[Evaluation], target: float) -> dict[str, float] | None:
    """Return the cost of reaching a held-out reward for the first time.

    Between the last evaluation below the target and the first one at or above it, every cost is taken to grow linearly
    with the reward.

    Args:
        evaluations: in order, the first of them at the start.
        target: held-out reward.

    Returns:
        The :data:`COSTS`, or ``None`` where the target was never reached.

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
    return None


@dataclass
class Row:
    """One method with one set of settings, over all seeds.

    Attributes:
        curves: one a seed, failed ones included.
        start, final, best: mean over the finished seeds of a run's first, last and highest held-out reward; ``None``
            where no seed finished.
        final_range: lowest and highest last reward of the seeds.
        targets: target -> ``reached`` and ``of`` (numbers of seeds), ``seeds`` (each one's costs or ``None``), ``mean``
            (costs; ``None`` unless every seed reached it) and the :data:`RATIOS` to the base method with the same
            settings.
        found: the search that tuned settings come from, where their overlay says it.
    """

    method: str
    settings: str
    curves: list[Curve]
    start: float | None
    final: float | None
    best: float | None
    final_range: tuple[float, float] | None
    targets: dict[float, dict[str, Any]]
    found: Budget | None = None

    @property
    def name(self) -> str:
        return f"{self.method} {self.settings}"

    @property
    def finished(self) -> list[Curve]:
        return [curve for curve in self.curves if curve.evaluations]


def rows_of(
    curves: Sequence[Curve],
    targets: Sequence[float],
    base: str | None = None,
    found: Mapping[tuple[str, str], Budget | None] | None = None,
) -> list[Row]:
    """Group the seeds of each method and settings, in the given order.

    Args:
        curves: one a run.
        targets: held-out rewards.
        base: method whose costs the others' are divided by; the first by default.
        found: (method, settings) -> search that they come from.
    """
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.method, curve.settings), []).append(curve)
    searches = found or {}
    rows = [_row(*key, group, targets, searches.get(key)) for key, group in groups.items()]
    base = base or (rows[0].method if rows else None)
    for row in rows:
        yardstick = next((r for r in rows if r.method == base and r.settings == row.settings), None)
        for target, cost in row.targets.items():
            theirs = yardstick.targets[target]["mean"] if yardstick is not None else None
            for ratio, name in RATIOS.items():
                unit = theirs[name] if theirs is not None else 0.0
                cost[ratio] = cost["mean"][name] / unit if cost["mean"] is not None and unit > 0 else None
    return rows


def _row(method: str, settings: str, curves: list[Curve], targets: Sequence[float], found: Budget | None) -> Row:
    rewards = [curve.rewards for curve in curves if curve.evaluations]
    last = [values[-1] for values in rewards]
    return Row(
        method=method,
        settings=settings,
        curves=curves,
        start=fmean(values[0] for values in rewards) if rewards else None,
        final=fmean(last) if last else None,
        best=fmean(max(values) for values in rewards) if rewards else None,
        final_range=(min(last), max(last)) if last else None,
        targets={target: reached(curves, target) for target in targets},
        found=found,
    )


def reached(curves: Sequence[Curve], target: float) -> dict[str, Any]:
    """Return which of a row's seeds reached a target and at what cost, see :class:`Row`."""
    seeds = {curve.seed: cost_of(curve.evaluations, target) for curve in curves}
    costs = [cost for cost in seeds.values() if cost is not None]
    all_did = bool(costs) and len(costs) == len(curves)
    return {
        "reached": len(costs),
        "of": len(curves),
        "seeds": seeds,
        "mean": {name: fmean(cost[name] for cost in costs) for name in COSTS} if all_did else None,
    }
