"""Data of a run that its report shows, read once from the files in its folder, and differences between recipes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from lit_vgrpo.config.recipe import FOUND_IN, SECTIONS, loaded
from lit_vgrpo.config.tree import class_name
from lit_vgrpo.core.ranges import Range
from lit_vgrpo.core.records import FINGERPRINT
from lit_vgrpo.errors import HIDDEN, PASSWORD_IN_ADDRESS, UserError
from lit_vgrpo.metrics import bootstrap_interval
from lit_vgrpo.system.paths import CONFIG_NAME
from lit_vgrpo.training.folder import REPORT_NAME as REPORT_NAME
from lit_vgrpo.training.loggers import read_table
from lit_vgrpo.training.resume import HELDOUT_PROMPTS, Number, Whole, checked_json, read_summary
from lit_vgrpo.training.saved_weights import AVERAGE, TRAINED

KEPT = "report"
"""Folder in the run folder with the scores and images that a run keeps for its report."""
BENCHMARKS = "benchmarks"
"""Folder in the run folder with the results of benchmarks."""
SCORES_NAME, IMAGES_NAME = "scores.jsonl", "images.json"
LAYOUT, TO_EDIT = "layout", "to edit"
"""In a sample grid's PNG, the text with the places of its images, and the label of the pictures that prompts edit.

A grid of moving videos is a WebP file, with this text as its EXIF image description.
"""
AXES = {"iterations": "Iterations", "images": "Images", "seconds": "Minutes of training", "passes": "Network passes"}
"""Costs on the curves' x axes."""
RUNNING, UNFINISHED = "running", "unfinished"
ABSENT = "not set"
SECRET = re.compile(
    r"([ -]*[\w\"'-]*(?:(?:token|secret|(?:api|access|private)[_-]?key|auth(?:orization)?|bearer|cookie|credentials?)"
    r"[\"']?: +(?!null *$|true *$|false *$|[\d.]+ *$)|passw(?:or)?d[\"']?: +(?!null *$))(?=\S)).*",
    re.IGNORECASE,
)
SECRET_IN_ADDRESS = re.compile(
    r"([?&][\w-]*(?:token|secret|passw(?:or)?d|key|auth|sig(?:nature)?)=)[^&\s\"']+", re.IGNORECASE
)
FOUND_LINE = re.compile(rf"^{FOUND_IN}:.*\n?", re.MULTILINE)
NOT_COMPARED = ("name", "run_dir", "ckpt_path", "allow_changes", "trainer.default_root_dir")
"""Settings of this machine or of the command."""
TASK_KEYS = ("heldout", "heldout_limit", "heldout_fraction")
"""Settings of the data that choose the held-out prompts."""
PromptSums = dict[str, list[tuple[Number, Annotated[int, Range(0, 1_000_000)]]]]
"""By reward, the sum and the number of each prompt's scores."""
Say = Callable[[str], None]


class ScoresLine(TypedDict):
    """A line of ``scores.jsonl``."""

    iteration: Whole
    scores: PromptSums


class Interval(NamedTuple):
    """A mean and its 95 % bootstrap interval over prompts."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """Finite metrics after a number of iterations, and the known costs until then, by the names of :data:`AXES`."""

    costs: dict[str, float]
    metrics: dict[str, float]

    @property
    def iteration(self) -> int:
        return int(self.costs["iterations"])


@dataclass
class RunData:
    """A run, finished or not.

    Attributes:
        recipe: Its ``config.yaml`` as plain values; empty for a run that was not started from a recipe.
        summary: ``summary.json``; empty if the run has not ended, or has continued since it was written.
        iterations: One point per training iteration.
        evaluations: One point per held-out evaluation, metrics without the prefix ``heldout/``.
        scores: Each prompt's scores, by iteration; empty for a run that kept none.
        is_running: The run itself writes this report.
        name_parts: Number of the last parts of the folder's path that are its name.
        left_out: A line for each damaged file, or part of one, that the report lacks.
    """

    folder: Path
    recipe: dict[Any, Any]
    summary: dict[str, Any]
    iterations: list[Point]
    evaluations: list[Point]
    scores: dict[int, PromptSums] = field(default_factory=dict)
    is_running: bool = False
    name_parts: int = 1
    left_out: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "/".join(self.folder.resolve().parts[-self.name_parts :])

    @property
    def config(self) -> str:
        """``config.yaml`` without values that look secret and ``found_in``; empty if there is none."""
        file = self.folder / CONFIG_NAME
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        return without_secrets(FOUND_LINE.sub("", text))

    @property
    def outcome(self) -> str:
        return RUNNING if self.is_running else str(self.summary.get("outcome", UNFINISHED))

    @property
    def num_iterations(self) -> int:
        """Finished iterations."""
        known = [point.iteration for point in (*self.iterations[-1:], *self.evaluations[-1:])]
        return max([self.summary.get("iterations", 0), *known])

    @cached_property
    def comparable(self) -> list[Point]:
        """The evaluations that can be compared with the newest one: of the same images, by the same rewards."""
        marks = [point.metrics.get(FINGERPRINT) for point in self.evaluations]
        return [point for point, mark in zip(self.evaluations, marks, strict=True) if mark == marks[-1]]

    def scores_at(self, point: Point) -> PromptSums:
        """Return each prompt's scores of an evaluation; those of a later one of the same iteration replaced them."""
        newest = [one for one in self.evaluations if one.iteration == point.iteration][-1:]
        return self.scores.get(point.iteration, {}) if newest == [point] else {}

    @cached_property
    def reward_names(self) -> list[str]:
        """Names of the rewards in the weighted sum and of the untrained ones, if they were logged."""
        newest = self.iterations[-1].metrics if self.iterations else {}
        parts = [name.split("/") for name in newest if name.startswith("reward/") and name.endswith("/std")]
        trained = [part[1] for part in parts if len(part) == 3]
        scored = [name for scores in self.scores.values() for name in scores]
        known = [*self.summary.get("rewards", ()), *self.summary.get("reward_parts_end", {})]
        names = dict.fromkeys([*known, *trained, *scored])
        return [name for name in names if name not in ("reward", "untrained_reward")]

    @property
    def weights(self) -> str:
        """Variant that the held-out evaluations used: the average if the run has one."""
        callbacks = (self.recipe.get("trainer") or {}).get("callbacks") or []
        names = map(class_name, callbacks if isinstance(callbacks, list) else [callbacks])
        return str(self.summary.get("weights", AVERAGE if AVERAGE in names else TRAINED))

    def total(self, cost: str) -> float | None:
        """Return a cost of the whole run; ``None`` if it is unknown."""
        key = {"images": "images", "seconds": "train_seconds"}.get(cost)
        if key in self.summary:
            return float(self.summary[key])
        return max((p.costs[cost] for p in (*self.iterations, *self.evaluations) if cost in p.costs), default=None)


def read_run(folder: Path, is_running: bool = False) -> RunData:
    """Return the data of a run folder, also of a killed or resumed run.

    Args:
        is_running: True if called by the run itself; its summary is then from an earlier part.

    Raises:
        UserError: ``config.yaml`` or ``metrics.csv`` cannot be read.
    """
    config, left_out = folder / CONFIG_NAME, list[str]()
    recipe = loaded(config) if config.exists() else {}
    recipe.pop(FOUND_IN, None)
    for section in SECTIONS:
        if not isinstance(recipe.get(section) or {}, dict):
            raise UserError(f"Cannot read {config}: {section} is not a mapping.")
    iterations, evaluations = _read_points(folder / "metrics.csv", left_out.append)
    summary = ({} if is_running else read_summary(folder, left_out.append)) or {}
    if summary.get("iterations", 0) < max(iterations, default=0):
        summary = {}
    for one in summary.get("evaluations", []):  # the last one may not be in the table
        costs = one.iteration, one.images, one.train_seconds, one.passes
        point = evaluations.setdefault((one.iteration, one.metrics.get(FINGERPRINT)), Point({}, {}))
        point.costs.update(_numbers(dict(zip(AXES, costs, strict=True))))
        point.metrics.update(_numbers({**one.metrics, "reward": one.reward}))
    return RunData(
        folder=folder,
        recipe=recipe,
        summary=summary,
        iterations=[iterations[number] for number in sorted(iterations)],
        evaluations=sorted(evaluations.values(), key=lambda point: point.iteration),
        scores=read_scores(folder, left_out.append),
        is_running=is_running,
        left_out=left_out,
    )


def _read_points(table: Path, say: Say) -> tuple[dict[int, Point], dict[tuple[int, float | None], Point]]:
    """Return the points of training by finished iterations, and of the evaluations also by their fingerprints.

    Later rows replace earlier ones.
    """
    try:
        columns, rows = read_table(table) if table.exists() else ([], [])  # another logger writes no table
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {table}: {error}.") from error
    if columns and not {"epoch", "step"} & set(columns):
        raise UserError(f"Cannot read {table}: it has neither a column epoch nor step.")
    iterations: dict[int, Point] = {}
    evaluations: dict[tuple[int, float | None], Point] = {}
    for row in rows:
        values = _numbers(row)
        for name, cell in row.items():
            if cell and name not in values and cell not in ("nan", "inf", "-inf"):
                say(f"{table} is damaged: {name} is {cell!r:.40}.")
        done = int(values.get("epoch", -1)) + 1
        if "time/iteration_s" in values:
            passes = sum(value for name, value in values.items() if name.startswith("passes/"))
            costs = {"images": values.get("cost/images"), "seconds": values.get("cost/train_s"), "passes": passes}
            iterations[done] = Point(_numbers({"iterations": done, **costs}), values)
        if heldout := {name[len("heldout/") :]: value for name, value in values.items() if name.startswith("heldout/")}:
            evaluations[done, heldout.get(FINGERPRINT)] = Point({}, heldout)
    for (done, _), point in evaluations.items():
        costs_then = iterations[done].costs if done in iterations else {"iterations": done}
        point.costs.update(dict.fromkeys(AXES, 0.0) if done == 0 else costs_then)
    return iterations, evaluations


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers."""
    numbers = {}
    for name, value in values.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(number):
            numbers[name] = number
    return numbers


def tell_apart(runs: Sequence[RunData]) -> None:
    """Lengthen the names of runs, such as ``runs/a`` of two folders, until they differ."""
    paths = [run.folder.resolve().parts for run in runs]
    differing = (n for n in range(1, max(map(len, paths))) if len({path[-n:] for path in paths}) == len(runs))
    parts = next(differing, 1)
    for run in runs:
        run.name_parts = parts


def by_task(runs: Sequence[RunData]) -> tuple[list[list[RunData]], str]:
    """Return runs in groups that compare, of the same held-out prompts and rewards, and a line on what does not."""
    tasks: dict[tuple[str, ...], list[RunData]] = {}
    evaluated = [run for run in runs if run.evaluations] or runs
    others = [run for run in runs if run not in evaluated]
    are_known = all(HELDOUT_PROMPTS in run.summary for run in evaluated)  # else compared as written in the recipes
    keys = ["the content of data.heldout"] if are_known else [f"data.{key}" for key in TASK_KEYS]
    for run in evaluated:
        data = run.recipe.get("data") or {}
        asked = [run.summary[HELDOUT_PROMPTS]] if are_known else [str(data.get(key)) for key in TASK_KEYS]
        tasks.setdefault((*asked, str(run.reward_names)), []).append(run)
    keys.append("model.reward")
    differing = [key for key, values in zip(keys, zip(*tasks, strict=True), strict=True) if len({*values}) > 1]
    groups = [*tasks.values(), *([run] for run in others)]
    reasons = [f"{' and '.join(differing)} differ{'s' * (len(differing) == 1)}"] if differing else []
    reasons += [f"{run.name} has no held-out evaluation yet" for run in others]
    names = " / ".join(", ".join(run.name for run in group) for group in groups)
    return groups, f"Not compared with each other, since {', and '.join(reasons)}: {names}"


def read_scores(run: Path, say: Say = lambda line: None) -> dict[int, PromptSums]:
    """Return each evaluation's scores by iteration, the latest of each; ``say`` names damaged lines, but no cut one."""
    file, shape = run / KEPT / SCORES_NAME, TypeAdapter(ScoresLine)
    by_iteration: dict[int, PromptSums] = {}
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True) if file.is_file() else [], start=1):
        try:
            entry = checked_json(line, shape, f"{file} line {number}")
        except UserError as error:
            if line.endswith(b"\n"):
                say(str(error))
            continue
        by_iteration = {done: scores for done, scores in by_iteration.items() if done < entry["iteration"]}
        by_iteration[entry["iteration"]] = entry["scores"]
    return by_iteration


def interval(sums: list[tuple[float, int]] | None) -> Interval | None:
    """Return the mean over images and its interval over prompts; ``None`` without scores.

    >>> interval([(1.0, 1), (1.0, 1)]), interval([(2.0, 2)])
    (Interval(mean=1.0, low=1.0, high=1.0), Interval(mean=1.0, low=nan, high=nan))
    """
    values = [total / count for total, count in sums or [] for _ in range(count)]
    clusters = [number for number, (_, count) in enumerate(sums or []) for _ in range(count)]
    return Interval(math.fsum(values) / len(values), *bootstrap_interval(values, clusters)) if values else None


def difference(before: list[tuple[float, int]] | None, after: list[tuple[float, int]] | None) -> Interval | None:
    """Return the change of the prompts' means and its interval; ``None`` if the prompts differ."""
    if not before or not after or len(before) != len(after):
        return None
    return interval([(b / n - a / m, 1) for (a, m), (b, n) in zip(before, after, strict=True) if m and n])


# --- recipes ----------------------------------------------------------------------------------------------------------


def differences(recipes: Sequence[Mapping[Any, Any]]) -> list[tuple[str, list[str]]]:
    """Return the settings in which several recipes differ, with the value of each."""
    settings = [flat_settings(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for each in settings for key in each)
    rows = [(key, [each.get(key, ABSENT) for each in settings]) for key in keys]
    return [(key, texts) for key, texts in rows if len(set(texts)) > 1]


def flat_settings(node: Any, key: str = "") -> dict[str, str]:
    """Return each setting's value as text, by its key as a user types it."""
    settings: dict[str, str] = {}
    if isinstance(node, Mapping):
        if "class_path" in node:
            return {key: _text(node["class_path"])} | flat_settings(node.get("init_args") or {}, key)
        for name, value in node.items():
            settings |= flat_settings(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, list) and any(isinstance(entry, Mapping | str) for entry in node):
        for number, entry in enumerate(node):
            settings |= flat_settings(entry, f"{key}[{number}]")
    elif key not in NOT_COMPARED:
        settings[key] = without_secrets(f"{key.rpartition('.')[2]}: {_text(node)}").partition(": ")[2]
    return settings


def _text(value: Any) -> str:
    """Return a value as in YAML; classes by their short names."""
    if isinstance(value, str):
        return re.sub(r"^(?:lit_vgrpo|lightning\.pytorch)\.(?:\w+\.)*", "", value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.10g}" if is_number else json.dumps(value, default=str)


def without_secrets(text: str) -> str:
    """Hide the values of keys such as ``token``, and passwords and keys in addresses, in a recipe's text.

    >>> print(without_secrets("headers:\\n  X-Api-Key: |-\\n    abc\\nurl: http://judge/score?api_key=abc&limit=2"))
    headers:
      X-Api-Key: (hidden)
    url: http://judge/score?api_key=(hidden)&limit=2
    """
    lines: list[str] = []
    hidden: int | None = None  # indentation of a hidden value's key
    for line in text.split("\n"):
        if hidden is not None and line.strip() and len(line) - len(line.lstrip(" ")) > hidden:  # the value continues
            continue
        secret = SECRET.fullmatch(line)
        hidden = None if secret is None else len(line) - len(line.lstrip(" -"))
        lines.append(line if secret is None else secret[1] + HIDDEN)
    shown = SECRET_IN_ADDRESS.sub(rf"\g<1>{HIDDEN}", "\n".join(lines))
    return PASSWORD_IN_ADDRESS.sub(rf"\g<1>{HIDDEN}@", shown)
