"""``--sweep``: the same small grid for every method, and the best of it as an overlay's ``tuned:`` block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import yaml

from lit_vgrpo.commands.compare.options import CompareOptions
from lit_vgrpo.commands.compare.plan import Entrant, tuned_part
from lit_vgrpo.commands.compare.report import faults_text, markdown_table, reward_cell, setting, write_csv
from lit_vgrpo.commands.compare.results import Curve
from lit_vgrpo.system.paths import write_atomically

LAST = 2
"""Number of evaluations averaged to the final reward, to smooth out oscillations."""
CSV_COLUMNS = ("method", "settings", "values", "seed", "start", "final", "best", "cpu_seconds", "passes")


@dataclass
class Trial:
    """One point of a method's grid.

    Attributes:
        final: mean over the seeds of the mean of a run's last two evaluations; ``None`` where a seed failed.
    """

    entrant: Entrant
    curves: list[Curve]
    final: float | None

    @property
    def values(self) -> str:
        """The point's values, by the last part of their keys."""
        return ", ".join(f"{key.rpartition('.')[2]}={_plain(value)}" for key, value in self.entrant.changed.items())


def final_reward(curve: Curve) -> float:
    """Return the mean of the last two evaluations, without the start if there are others."""
    return fmean((curve.rewards[1:] or curve.rewards)[-LAST:])


def trials_of(entrants: Sequence[Entrant], curves: Sequence[Curve]) -> list[Trial]:
    """Return each point with the runs of its seeds."""
    trials = []
    for entrant in entrants:
        own = [c for c in curves if (c.method, c.settings) == (entrant.method, entrant.settings)]
        done = bool(own) and all(curve.evaluations for curve in own)
        trials.append(Trial(entrant, own, fmean(final_reward(curve) for curve in own) if done else None))
    return trials


def best_of(trials: Sequence[Trial]) -> dict[str, Trial | None]:
    """Return each method's point of highest final reward, the first of equals; ``None`` if none finished."""
    best: dict[str, Trial | None] = {}
    for trial in trials:
        method = trial.entrant.method
        leader = best.setdefault(method, None)
        if trial.final is not None and (leader is None or leader.final is None or trial.final > leader.final):
            best[method] = trial
    return best


def tuned_block(trial: Trial) -> str:
    """Return the lines to paste into the overlay."""
    part = {"tuned": tuned_part(trial.entrant.changed, trial.entrant.recipe["model"]["objective"])}
    return yaml.safe_dump(part, sort_keys=False, width=120)


def write_sweep(options: CompareOptions, trials: Sequence[Trial]) -> str:
    """Write ``sweep.json``, ``sweep.csv`` and ``sweep.md``.

    Returns:
        The table and the blocks to paste.
    """
    best = best_of(trials)
    lines = []
    for trial in trials:
        done = [curve.rewards for curve in trial.curves if curve.evaluations]
        start = fmean(values[0] for values in done) if done else None
        top = fmean(max(values) for values in done) if done else None
        cpu = fmean(c.evaluations[-1]["cpu_seconds"] for c in trial.curves if c.evaluations) if done else None
        mark = "best" if best[trial.entrant.method] is trial else ""
        cells = [reward_cell(value) for value in (start, trial.final, top)]
        lines.append([trial.entrant.method, trial.values, *cells, "-" if cpu is None else f"{cpu:.0f}", mark])
    parts = [markdown_table(["method", "values", "start", "final", "best", "CPU s", ""], lines)]
    failed = faults_text([curve for trial in trials for curve in trial.curves])
    parts += [failed] if failed else []
    for method, winner in best.items():
        if winner is None:
            parts.append(f"{method}: no point was finished with all seeds.")
        else:
            indented = "".join(f"    {line}\n" for line in tuned_block(winner).splitlines())
            parts.append(f"{method}: {winner.values}, final reward {winner.final:.3f}\n\n{indented.rstrip()}")
    text = "\n\n".join(parts)
    seeds = ", ".join(map(str, options.seeds))
    head = f"# {options.command.recipe.stem}: sweep\n\n    {options.line}\n\n{options.iterations} iterations, seeds "
    head += f"{seeds}. The final reward is the mean of the last {LAST} evaluations on the held-out prompts.\n\n"
    write_atomically(options.out / "sweep.md", f"{head}{text}\n")
    write_csv(options.out / "sweep.csv", CSV_COLUMNS, [row for trial in trials for row in _csv_rows(trial)])
    content = {**setting(options), "trials": [_as_plain(trial, best) for trial in trials]}
    write_atomically(options.out / "sweep.json", json.dumps(content, indent=2) + "\n")
    return text


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
        }
        for curve in trial.curves
        if curve.evaluations
    ]


def _as_plain(trial: Trial, best: dict[str, Trial | None]) -> dict[str, Any]:
    return {
        "method": trial.entrant.method,
        "settings": trial.entrant.settings,
        "values": trial.entrant.changed,
        "final": trial.final,
        "is_best": best[trial.entrant.method] is trial,
        "runs": [{"seed": c.seed, "fault": c.fault or None, "evaluations": c.evaluations} for c in trial.curves],
    }


def _plain(value: Any) -> str:
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
