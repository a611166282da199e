"""The methods of a comparison, given by overlays on a recipe, and their runs."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_vgrpo import objectives
from lit_vgrpo.apps.compare.options import SETTINGS, CompareOptions
from lit_vgrpo.config.environment import unchanged_texts
from lit_vgrpo.config.parts import options_of_class
from lit_vgrpo.config.recipe import loaded, resolved
from lit_vgrpo.config.tree import Place, class_name, dotted, leaves, merged, replaced, set_value
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.errors import UserError, counted, shell_line, suggestion, unknown_option
from lit_vgrpo.launch.build import build
from lit_vgrpo.system.paths import CONFIG_NAME, file_content, shipped, typed_path

KEYS = ("like", "published", "tuned", "found", "sweep")
MAY_SET = (
    *("model.objective", "model.optimizer", "model.advantage_std", "model.advantage_aggregate"),
    *("model.gradient_clip_val", "data.updates_per_iteration", "data.split_updates"),
)
"""Keys that may differ between methods; all share the recipe's task, images and evaluation."""
POLICY_OPTIONS = ("scale_cap", "teachers")
"""Options of an objective that depend on the network. The recipe sets them for every method that has them."""
LEFT_OUT_CALLBACKS = ("SampleGrid", "Export", "SurrogateDiagnostics", "Checkpoint")
"""Ends of the names of callbacks that cost time or disk space and do not affect a comparison."""
WEIGHTS = (".ckpt", ".safetensors", ".bin")


@dataclass(frozen=True)
class Budget:
    """An overlay's ``found:`` block: the settings that a sweep tried, the runs of each, and the task and prompts."""

    points: int
    seeds: int
    iterations: int
    prompts: str = ""

    def __str__(self) -> str:
        seeds = counted(self.seeds, "seed")
        return f"{counted(self.points, 'point')} x {seeds} x {self.iterations} iterations, {self.prompts or 'unknown'}"


@dataclass
class Overlay:
    """A method's file: its published settings, the tuned ones, and the grid of their search.

    Attributes:
        published: Recipe part that is merged over the base recipe.
        tuned: Recipe part that is merged over ``published``; empty if nothing was tuned.
        budget: The search that ``tuned`` comes from; ``None`` if unknown.
        points: The settings that a sweep tries, each as dotted recipe key -> value.
    """

    name: str
    published: dict[str, Any]
    tuned: dict[str, Any] = field(default_factory=dict)
    budget: Budget | None = None
    points: list[dict[str, Any]] = field(default_factory=list)

    def part(self, settings: str) -> dict[str, Any]:
        """Return the recipe part of ``published`` or ``tuned`` settings."""
        return copy.deepcopy(self.published) if settings == "published" else merged(self.published, self.tuned)


@dataclass
class Entrant:
    """A method with one set of settings, run once per seed.

    Attributes:
        settings: ``published`` or ``tuned``; in a sweep ``sweep0``, ``sweep1``, ...
        recipe: The merged recipe as plain values, without seed and folder.
        budget: The search that the overlay's tuned settings come from; ``None`` if unknown.
    """

    method: str
    settings: str
    recipe: dict[str, Any]
    changed: dict[str, Any] = field(default_factory=dict)
    budget: Budget | None = None

    @property
    def name(self) -> str:
        return f"{self.method}-{self.settings}"


@dataclass(frozen=True)
class Run:
    """One process: an entrant with a seed. A finished run with the same fingerprint is not repeated."""

    name: str
    method: str
    settings: str
    seed: int
    recipe: Path
    folder: Path
    log: Path
    fingerprint: str

    @property
    def fingerprint_file(self) -> Path:
        return self.folder.with_name(f".{self.name}.fingerprint")  # hidden, so that ``report runs/*`` works


def entrants(options: CompareOptions) -> list[Entrant]:
    """Return every method with every kind of settings, as recipes that build; raise UserError with all errors."""
    words = [str(options.command.recipe), *(f"{key}={text}" for key, text in options.command.overrides)]
    base = build(words, make_folder=False)
    errors = base.errors()
    if not base.datamodule.has_heldout and not options.sweep:  # a sweep holds out training prompts
        errors.append("The recipe has no data.heldout, so there is nothing to compare. Set data.heldout=PROMPT_FILE.")
    if errors:
        raise UserError(*errors)
    overlays = [read_overlay(find_overlay(text)) for text in options.methods]
    if errors := _lost_overrides(options, overlays):
        raise UserError(*errors)
    chosen = [entrant for overlay in overlays for entrant in _of_overlay(options, overlay)]
    if len({entrant.name for entrant in chosen}) < len(chosen):
        raise UserError("Two methods have the same name. Rename one of the files.")
    if errors := _build_errors(chosen):
        raise UserError(*errors)
    return chosen


def _of_overlay(options: CompareOptions, overlay: Overlay) -> list[Entrant]:
    if options.sweep:
        return swept(options, overlay)
    settings = options.settings or [name for name in SETTINGS if name == "published" or overlay.tuned]
    if "tuned" in settings and not overlay.tuned:
        advice = "Use --settings published, or search for them with --sweep."
        raise UserError(f"{overlay.name} has no tuned settings. {advice}")
    return [_entrant(options, overlay, name, overlay.part(name), {}) for name in settings]


def swept(options: CompareOptions, overlay: Overlay) -> list[Entrant]:
    """Return the points of an overlay's grid, each with the published settings for everything else."""
    if not overlay.points:
        raise UserError(f"{overlay.name} has nothing to search: sweep: in its overlay is empty.")
    points = []
    for number, changed in enumerate(overlay.points):
        part = overlay.part("published")
        for key, value in changed.items():
            set_value(part, key, value)
        points.append(_entrant(options, overlay, f"sweep{number}", part, changed))
    return points


def _entrant(options: CompareOptions, overlay: Overlay, settings: str, part: Any, changed: dict[str, Any]) -> Entrant:
    recipe = for_race(with_overlay(options.base, part), options.iterations, options.evaluate_every)
    return Entrant(overlay.name, settings, recipe, changed, overlay.budget)


def _lost_overrides(options: CompareOptions, overlays: Iterable[Overlay]) -> list[str]:
    """Return an error for each override that a method's overlay would replace silently."""
    errors = {}
    for overlay in overlays:
        replaced = {key for part in (overlay.part("tuned"), *overlay.points) for key in settings_of(part)}
        for typed, _ in options.command.overrides:
            key = typed.rstrip("+")
            if key.startswith("model.objective"):
                option = key.removeprefix("model.objective").removeprefix(".init_args").strip(".").partition(".")[0]
                is_lost = option not in ("rollout", *POLICY_OPTIONS)
            else:
                is_lost = any(f"{one}.".startswith(f"{key}.") for one in replaced)
            if is_lost:
                errors[key] = f"{key} has no effect: the overlay of {overlay.name} sets it. Set it in an overlay."
    return list(errors.values())


def _build_errors(chosen: Sequence[Entrant]) -> list[str]:
    """Return the errors that prevent methods from running, each once per method."""
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for entrant in chosen:
            path = Path(folder) / f"{entrant.name}.yaml"
            path.write_text(recipe_text(entrant, str(path), {}))
            try:
                messages = build([str(path)], make_folder=False).errors()
            except UserError as error:
                messages = error.errors
            errors += [f"{entrant.method}: {message}" for message in messages]
    return list(dict.fromkeys(errors))


def recipe_text(entrant: Entrant, path: str, texts: Mapping[Place, str]) -> str:
    """Return the merged recipe as a file; ``texts`` are values from the environment as written."""
    what = ", ".join(f"{key}={value}" for key, value in entrant.changed.items()) or f"{entrant.settings} settings"
    body = yaml.safe_dump(replaced(entrant.recipe, texts), sort_keys=False, width=120)
    return f"# {entrant.method}, {what}, merged for a comparison\n#   {shell_line('lightning', 'run', path)}\n{body}"


def runs_of(options: CompareOptions, chosen: Iterable[Entrant]) -> list[Run]:
    """Write the merged recipes and return a run per entrant and seed, seed by seed."""
    runs = []
    recipes, folders, logs = (typed_path(options.out) / name for name in ("recipes", "runs", "logs"))
    for folder in (recipes, folders, logs):
        folder.mkdir(parents=True, exist_ok=True)
    for seed, entrant in itertools.product(options.seeds, chosen):
        path, name = recipes / f"{entrant.name}.yaml", f"{entrant.name}-seed{seed}"
        path.write_text(recipe_text(entrant, f"{path}", unchanged_texts(options.texts, options.base, entrant.recipe)))
        files = path, folders / name, logs / f"{name}.log"
        mark = fingerprint(entrant.recipe, seed, options.command.recipe.parent)
        runs.append(Run(name, entrant.method, entrant.settings, seed, *files, mark))
    return runs


def fingerprint(recipe: Mapping[str, Any], seed: int, folder: Path = Path()) -> str:
    """Return a hash of the recipe, including its iterations, of the seed, and of the files that the recipe names.

    Those are files of prompts, modules such as a reward's, in the current folder or the recipe's, and the weights in
    folders of runs and pipelines, by size and date.
    """
    found: dict[str, Any] = {}
    for value in {value for _, value in leaves(recipe) if isinstance(value, str)}:
        module = value.partition(":")[0] if ":" in value else value.rpartition(".")[0]
        for file in (Path(value), *(place / f"{module.replace('.', '/')}.py" for place in (Path(), folder))):
            with suppress(OSError, ValueError, RuntimeError):  # a text that no file can have as its name
                if (typed := typed_path(file)).is_file():
                    found[str(file)] = file_content(typed)
                place = typed.parent if typed.name == CONFIG_NAME else typed
                if str(file) == value and place.is_dir():
                    stats = {path: path.stat() for path in sorted(place.rglob("*")) if path.suffix in WEIGHTS}
                    found[f"{value} weights"] = [(path.name, s.st_size, s.st_mtime_ns) for path, s in stats.items()]
    text = json.dumps([merged(recipe, {"seed_everything": seed}), found], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


# --- overlays ---------------------------------------------------------------------------------------------------------


def find_overlay(text: str) -> Path:
    """Return the file of a method, given a shipped name or a path; raise UserError if there is none."""
    methods = shipped("compare")
    path = methods.get(text, typed_path(text))
    if not path.is_file():
        raise UserError(f"{text} is neither a method nor an overlay file. {suggestion(text, methods)}")
    return path


def read_overlay(path: Path) -> Overlay:
    """Read an overlay file, merged over that of ``like:``; raise UserError if it is none, or sets other keys."""
    content = {key: value or {} for key, value in resolved(loaded(path), path).items()}
    if unknown := [key for key in content if key not in KEYS]:
        raise UserError(*(unknown_option(key, f"the overlay {path}", KEYS) for key in unknown))
    try:
        published = content.get("published", {})
        if "like" in content:
            published = merged(read_overlay(find_overlay(str(content["like"]))).published, published)
        objective = as_component(published["model"]["objective"])
        published["model"]["objective"] = {"class_path": objective["class_path"], **objective}
        budget = Budget(**content["found"]) if "found" in content else None
        points = content.get("sweep", [])
        if isinstance(points, dict):
            points = [dict(zip(points, values, strict=True)) for values in itertools.product(*points.values())]
        overlay = Overlay(path.stem, published, content.get("tuned", {}), budget, points)
        keys = {key for part in (published, overlay.tuned, *points) for key in settings_of(part)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        advice = "Add published: with a model.objective and its class_path, or like: with a method"
        raise UserError(f"{path} is not an overlay. {advice} ({type(error).__name__}: {error}).") from error
    refused = [key for key in sorted(keys) if not f"{key}.".startswith(tuple(f"{allowed}." for allowed in MAY_SET))]
    why = "cannot be set by an overlay: it must be the same for every method. Set it in the recipe."
    if refused:
        raise UserError(*(f"{path}: {key} {why} {suggestion(key, MAY_SET)}" for key in refused))
    return overlay


def settings_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting of a recipe by its dotted key; a list is one setting."""
    return {dotted(place): value for place, value in leaves(part, open_lists=False)}


def as_component(value: Any) -> dict[str, Any]:
    """Return a class given by name as ``class_path`` and ``init_args``."""
    node: dict[str, Any] = {"class_path": value} if isinstance(value, str) else copy.deepcopy(dict(value))
    return {**node, "init_args": dict(node.get("init_args") or {})}


def with_overlay(base: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base recipe with a method in it.

    The overlay's objective replaces the base's; its ``rollout`` is merged over the base's solver, steps and guidance,
    and the base's :data:`POLICY_OPTIONS` options are kept. Everything else merges key by key. Held-out images are
    sampled with the base's evaluation, or else with its ODE. Both are resolved plain values.
    """
    given = as_component(base["model"]["objective"])["init_args"]
    spec = RolloutSpec(**(given.get("rollout") or {})).as_ode()
    rollout = {"solver": spec.solver, "steps": spec.steps, "guidance": spec.guidance}
    objective = as_component(part["model"]["objective"])
    cls = getattr(objectives, class_name(objective), None)
    known = options_of_class(cls) if isinstance(cls, type) else []
    args = {name: given[name] for name in POLICY_OPTIONS if name in given and name in known} | objective["init_args"]
    objective["init_args"] = {**args, "rollout": {**rollout, **(args.get("rollout") or {})}}
    result = merged(base, {key: value for key, value in part.items() if key != "model"})
    result["model"] = merged(base["model"], {k: v for k, v in part["model"].items() if k != "objective"})
    result["model"]["objective"] = objective
    result["model"]["evaluation"] = base["model"].get("evaluation") or rollout
    return result


def for_race(recipe: Mapping[str, Any], iterations: int, evaluate_every: int) -> dict[str, Any]:
    """Return the recipe without parts that a comparison does not need: samples, exports, checkpoints, extra loggers."""
    result = copy.deepcopy(dict(recipe))
    for key in ("name", "run_dir", "seed_everything"):
        result.pop(key, None)
    result["model"]["evaluate_at_start"] = True
    trainer = result.setdefault("trainer", {})
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    trainer["callbacks"] = [callback for callback in callbacks if not class_name(callback).endswith(LEFT_OUT_CALLBACKS)]
    trainer |= {"max_epochs": iterations, "max_steps": -1, "check_val_every_n_epoch": evaluate_every}
    trainer |= {"logger": False, "enable_checkpointing": False}
    return result
