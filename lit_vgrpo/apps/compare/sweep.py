"""``--sweep``: the same small grid for every method, and the best of it as an overlay's ``tuned:`` block."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import yaml

from lit_vgrpo.apps.compare.options import CompareOptions
from lit_vgrpo.apps.compare.overlays import Budget
from lit_vgrpo.apps.compare.plan import Entrant, tuned_part
from lit_vgrpo.apps.compare.report import amount, errors_text, markdown_table, reward_cell, setting, write_csv
from lit_vgrpo.apps.compare.results import Curve, Row, rows_of
from lit_vgrpo.system.paths import write_atomically

LAST = 2
"""Number of evaluations averaged to the final reward, to smooth out oscillations."""
CSV_COLUMNS = (
    "method",
    "settings",
    "values",
    "seed",
    "start",
    "final",
    "best",
    "cpu_seconds",
    "passes",
    "forward_equivalents",
)
RANKING_COST = "forward_equivalents"
"""Cost that points are ranked by: the same on every machine, busy or not."""


@dataclass
class Trial:
    """One point of a method's grid, with the results of its seeds."""

    entrant: Entrant
    row: Row

    @property
    def final(self) -> float | None:
        """Mean over the seeds of the mean of a run's last two evaluations; ``None`` where a seed failed."""
        curves = self.row.finished
        return fmean(map(final_reward, curves)) if len(curves) == len(self.row.curves) else None

    def cost(self, target: float) -> float:
        """Return the mean cost of a target over the seeds, in forward passes; infinite unless all reached it."""
        mean = self.row.targets[target]["mean"]
        return math.inf if mean is None else float(mean[RANKING_COST])

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key of a point, higher is better: the cost of each target from the highest down, then reward."""
        final = -math.inf if self.final is None else self.final
        return (*(-self.cost(target) for target in sorted(self.row.targets, reverse=True)), final)

    @property
    def values(self) -> str:
        """The point's values, by the last part of their keys."""
        return ", ".join(f"{key.rpartition('.')[2]}={_plain(value)}" for key, value in self.entrant.changed.items())


def final_reward(curve: Curve) -> float:
    """Return the mean of the last two evaluations, without the start if there are others."""
    return fmean((curve.rewards[1:] or curve.rewards)[-LAST:])


def trials_of(entrants: Sequence[Entrant], curves: Sequence[Curve], targets: Sequence[float] = ()) -> list[Trial]:
    """Return each point with the runs of its seeds, and its cost to reach each target."""
    rows = {(row.method, row.settings): row for row in rows_of(curves, targets)}
    return [Trial(entrant, rows[entrant.method, entrant.settings]) for entrant in entrants]


def best_of(trials: Sequence[Trial]) -> dict[str, Trial | None]:
    """Return each method's best point, the first of equals; ``None`` if none finished with all seeds.

    Without targets it is that of the highest final reward. With targets, it is the one whose seeds all reached the
    highest target at the least mean cost in forward passes; if none did, or at the same cost, the next target decides,
    and the final reward in the end.
    """
    best: dict[str, Trial | None] = {}
    for trial in trials:
        method = trial.entrant.method
        leader = best.setdefault(method, None)
        if trial.final is not None and (leader is None or trial.rank > leader.rank):
            best[method] = trial
    return best


def tuned_block(trial: Trial, budget: Budget) -> str:
    """Return the lines to paste into the overlay: the settings, and what the search for them was given."""
    tuned = tuned_part(trial.entrant.changed, trial.entrant.recipe["model"]["objective"])
    return yaml.safe_dump({"tuned": tuned, "found": budget.as_dict()}, sort_keys=False, width=120)


def budgets_of(options: CompareOptions, trials: Sequence[Trial]) -> dict[str, Budget]:
    """Return what each method was given."""
    points = Counter(trial.entrant.method for trial in trials)
    prompts = f"{options.command.recipe.stem}, {options.heldout_kind}"
    return {name: Budget(count, options.num_seeds, options.iterations, prompts) for name, count in points.items()}


def write_sweep(options: CompareOptions, trials: Sequence[Trial]) -> str:
    """Write ``sweep.json``, ``sweep.csv`` and ``sweep.md``.

    Returns:
        The table and the blocks to paste.
    """
    best, budgets = best_of(trials), budgets_of(options, trials)
    lines = []
    for trial in trials:
        row, ends = trial.row, [curve.evaluations[-1] for curve in trial.row.finished]
        spent = (amount(fmean(end[name] for end in ends) if ends else None) for name in ("cpu_seconds", RANKING_COST))
        mark = "best" if best[trial.entrant.method] is trial else ""
        cells = [reward_cell(value) for value in (row.start, trial.final, row.best)]
        costs = [_target_cell(cost) for cost in row.targets.values()]
        lines.append([trial.entrant.method, trial.values, *cells, *spent, *costs, mark])
    header = ["method", "values", "start", "final", "best", "CPU s", "equivalents"]
    parts = [markdown_table([*header, *(f"to {target:g}" for target in options.targets), ""], lines)]
    parts.append("\n".join(f"{method} was given {budget}." for method, budget in budgets.items()))
    parts.append(_note(options))
    failed = errors_text([curve for trial in trials for curve in trial.row.curves])
    parts += [failed] if failed else []
    for method, winner in best.items():
        if winner is None:
            parts.append(f"{method}: no point was finished with all seeds.")
        else:
            indented = "".join(f"    {line}\n" for line in tuned_block(winner, budgets[method]).splitlines())
            parts.append(f"{method}: {winner.values}, final reward {winner.final:.3f}\n\n{indented.rstrip()}")
    text = "\n\n".join(parts)
    seeds = ", ".join(map(str, options.seeds))
    head = f"# {options.command.recipe.stem}: sweep\n\n    {options.line}\n\n{options.iterations} iterations, seeds "
    head += f"{seeds}.\n\n"
    write_atomically(options.out / "sweep.md", f"{head}{text}\n")
    columns = [*CSV_COLUMNS, *(_column(target) for target in options.targets)]
    write_csv(options.out / "sweep.csv", columns, [row for trial in trials for row in _csv_rows(trial)])
    content = {
        **setting(options),
        "targets": options.targets,
        "heldout": options.heldout_text,
        "budgets": {method: budget.as_dict() for method, budget in budgets.items()},
        "trials": [_as_plain(trial, best) for trial in trials],
    }
    write_atomically(options.out / "sweep.json", json.dumps(content, indent=2) + "\n")
    return text


def _note(options: CompareOptions) -> str:
    """Return how the points were evaluated and ranked."""
    lines = [
        f"Chosen on {options.heldout_text}. The final reward is the mean of the last {LAST} evaluations. "
        "Equivalents are forward-pass equivalents: network passes in images, a pass with gradient counted three times."
    ]
    if options.targets:
        highest = options.targets[-1]
        lines.append(
            f"The best point reached {highest:g} with all seeds for the fewest equivalents (to {highest:g}: mean over "
            "the seeds); where none did, lower targets decide, then the final reward."
        )
    return " ".join(lines)


def _target_cell(cost: Mapping[str, Any]) -> str:
    """Format a target's mean cost, or how many seeds reached it if not all."""
    if cost["mean"] is None:
        return f"{cost['reached']} of {cost['of']}"
    return amount(cost["mean"][RANKING_COST])


def _column(target: float) -> str:
    return f"equivalents_to_{target:g}"


def _csv_rows(trial: Trial) -> list[dict[str, Any]]:
    return [
        {
            "method": curve.method,
            "settings": curve.settings,
            "values": trial.values,
            "seed": curve.seed,
            "start": curve.rewards[0],
            "final": final_reward(curve),
            "best": max(curve.rewards),
            "cpu_seconds": curve.evaluations[-1]["cpu_seconds"],
            "passes": curve.evaluations[-1]["passes"],
            RANKING_COST: curve.evaluations[-1][RANKING_COST],
            **{_column(target): _seed_cost(cost, curve.seed) for target, cost in trial.row.targets.items()},
        }
        for curve in trial.row.finished
    ]


def _seed_cost(cost: Mapping[str, Any], seed: int) -> float | None:
    own = cost["seeds"][seed]
    return None if own is None else round(own[RANKING_COST])


def _as_plain(trial: Trial, best: dict[str, Trial | None]) -> dict[str, Any]:
    return {
        "method": trial.entrant.method,
        "settings": trial.entrant.settings,
        "values": trial.entrant.changed,
        "final": trial.final,
        "targets": {f"{target:g}": cost for target, cost in trial.row.targets.items()},
        "is_best": best[trial.entrant.method] is trial,
        "runs": [{"seed": c.seed, "error": c.error or None, "evaluations": c.evaluations} for c in trial.row.curves],
    }


def _plain(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
