"""Checks of the runs that a report is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_vgrpo.apps.report.kept import REPORT_NAME
from lit_vgrpo.apps.report.run_data import RunData
from lit_vgrpo.apps.report.wording import reward
from lit_vgrpo.errors import UserError, counted
from lit_vgrpo.system.paths import CONFIG_NAME

HELDOUT_KEYS = ("heldout", "heldout_limit", "heldout_fraction")
"""Settings of the data that choose the held-out prompts."""


def refuse_without_evaluations(runs: Sequence[RunData]) -> None:
    """Check that every run has a held-out evaluation, of which a report tells.

    Raises:
        UserError: with a line for each run that has none.
    """
    errors = []
    for run in runs:
        if any("reward" in point.metrics for point in run.evaluations):
            continue
        if _data(run).get("heldout") or _data(run).get("heldout_fraction"):
            advice = f"Continue it: lightning run {run.folder / CONFIG_NAME} --resume"
        else:
            advice = "Train with data.heldout=prompts.txt."
        own = run.folder / REPORT_NAME
        kept = f" What it wrote itself is in {own}." if own.is_file() else ""
        errors.append(f"{run.folder} has no held-out evaluation yet. {advice}{kept}")
    if errors:
        raise UserError(*errors)


def refuse_different_tasks(runs: Sequence[RunData]) -> None:
    """Check that several runs have the same rewards and held-out prompts; else their numbers say nothing together.

    Raises:
        UserError: with the first difference.
    """
    first = runs[0]
    for other in runs[1:]:
        if first.folder.resolve() == other.folder.resolve():
            raise UserError(f"{other.folder} is given twice. Give two different runs.")
        for what, mine, its in (
            *((f"data.{key}", _data(first).get(key), _data(other).get(key)) for key in HELDOUT_KEYS),
            ("the rewards", _rewards(first), _rewards(other)),
        ):
            if mine != its:
                raise UserError(
                    f"{first.folder} and {other.folder} are different tasks: {what} is {_shown(mine)} in the first and "
                    f"{_shown(its)} in the second. Compare runs with the same held-out prompts and rewards."
                )


def summary_line(run: RunData) -> str:
    """Return a run's held-out reward at its first and its newest evaluation, for the terminal."""
    scored = [point for point in run.evaluations if "reward" in point.metrics]
    start, end = (reward(point.metrics["reward"]) for point in (scored[0], scored[-1]))
    number = counted(run.num_iterations, "iteration")
    return f"{run.folder}: held-out reward {start} before, {end} after {number}."


def _data(run: RunData) -> Mapping[str, Any]:
    data = run.recipe.get("data")
    return data if isinstance(data, Mapping) else {}


def _rewards(run: RunData) -> list[str]:
    """Return the names of the rewards, or where they are not known the class."""
    model = run.recipe.get("model")
    own = model.get("reward") if isinstance(model, Mapping) else None
    path = own.get("class_path") if isinstance(own, Mapping) else own
    return run.reward_names or [str(path).rpartition(".")[2]]


def _shown(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return "null" if value is None else str(value)


def existing_report(out: Path, mark: str) -> bool:
    """Return True if a file is a report, which may be overwritten."""
    try:
        with out.open(encoding="utf-8") as file:
            return file.readline().strip() == mark
    except (OSError, UnicodeDecodeError):
        return False
