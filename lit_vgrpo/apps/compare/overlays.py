"""Overlays: the changes that a method makes to a recipe."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_vgrpo import objectives
from lit_vgrpo.config.parts import options_of_class
from lit_vgrpo.config.recipe import loaded, resolved
from lit_vgrpo.config.tree import class_name, dotted, leaves, merged
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.errors import UserError, counted, nearest, suggestion, unknown_option
from lit_vgrpo.system.paths import shipped_root

KEYS = ("like", "published", "tuned", "found", "sweep")
MAY_SET = (
    "model.objective",
    "model.optimizer",
    "model.advantage_std",
    "model.advantage_aggregate",
    "data.updates_per_iteration",
    "data.split_updates",
    "trainer.gradient_clip_val",
)
"""Keys that may differ between methods; all share the recipe's task, images and evaluation."""
OF_POLICY = ("scale_cap",)
"""Options of an objective that depend on the network, and so belong to the recipe for every method that has them."""
LEFT_OUT_CALLBACKS = ("SampleGrid", "Export", "SurrogateDiagnostics")
"""Callbacks that cost time or disk space and do not affect a comparison."""


@dataclass(frozen=True)
class Budget:
    """Budget that a sweep gave one method: an overlay's ``found:`` block.

    Attributes:
        points: Number of settings tried.
        seeds: Runs of each.
        iterations: Iterations of each run.
        prompts: Task and prompts that they were chosen on.
    """

    points: int
    seeds: int
    iterations: int
    prompts: str = ""

    def __str__(self) -> str:
        seeds = counted(self.seeds, "seed")
        return f"{counted(self.points, 'point')} x {seeds} x {self.iterations} iterations, {self.prompts or 'unknown'}"


@dataclass
class Overlay:
    """A method's file: its published settings, the tuned ones, and the grid they were found on.

    Attributes:
        name: The method's name in tables, the file's stem.
        published: Recipe part that is merged over the base recipe.
        tuned: Recipe part that is merged over ``published``; empty where nothing has been tuned.
        found: The search that ``tuned`` comes from; ``None`` where the file does not say.
        points: The settings that a sweep tries, each as dotted recipe key -> value.
    """

    name: str
    published: dict[str, Any]
    tuned: dict[str, Any] = field(default_factory=dict)
    found: Budget | None = None
    points: list[dict[str, Any]] = field(default_factory=list)

    def part(self, settings: str) -> dict[str, Any]:
        """Return the recipe part of ``published`` or ``tuned`` settings."""
        return copy.deepcopy(self.published) if settings == "published" else merged(self.published, self.tuned)


def shipped_methods() -> dict[str, Path]:
    """Return the overlays installed with the package, by name."""
    return {path.stem: path for path in sorted((shipped_root() / "compare").glob("*.yaml"))}


def find_overlay(text: str) -> Path:
    """Return the file of a method, given a shipped name or a path; raise UserError if there is none."""
    shipped = shipped_methods()
    path = shipped.get(text, Path(text).expanduser())
    if path.is_file():
        return path
    guess = nearest(text, shipped)
    hint = f"Did you mean {guess}? " if guess else ""
    raise UserError(f"{text} is not a method. {hint}Use one of {', '.join(shipped)}, or the path of an overlay file.")


def read_overlay(path: Path) -> Overlay:
    """Read an overlay file; with ``like:``, its ``published:`` is merged over that of the method named there.

    Raises:
        UserError: It is not an overlay, or sets what must be the same for every method.
    """
    content = {key: value or {} for key, value in resolved(loaded(path), path).items()}
    if unknown := [key for key in content if key not in KEYS]:
        raise UserError(*(unknown_option(key, f"the overlay {path}", KEYS) for key in unknown))
    try:
        published = content.get("published", {})
        if "like" in content:
            published = merged(read_overlay(find_overlay(str(content["like"]))).published, published)
        objective = as_component(published["model"]["objective"])
        published["model"]["objective"] = {"class_path": objective["class_path"], **objective}
        found = Budget(**content["found"]) if "found" in content else None
        points = content.get("sweep", [])
        if isinstance(points, dict):
            points = [dict(zip(points, values, strict=True)) for values in itertools.product(*points.values())]
        overlay = Overlay(path.stem, published, content.get("tuned", {}), found, points)
        keys = {key for part in (published, overlay.tuned, *points) for key in settings_of(part)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        advice = "It needs published: with a model.objective and its class_path, or like: with a method"
        raise UserError(f"{path} is not an overlay. {advice} ({type(error).__name__}: {error}).") from error
    errors = [
        f"{path}: {key} cannot be set by an overlay: it must be the same for every method. Set it in the recipe. "
        f"{suggestion(key, MAY_SET)}"
        for key in sorted(keys)
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_SET)
    ]
    if errors:
        raise UserError(*errors)
    return overlay


def settings_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting of a recipe by its dotted key; a list is one setting."""
    return {dotted(place): value for place, value in leaves(part, lambda *_: False)}


def as_component(value: Any) -> dict[str, Any]:
    """Return a class given by name as ``class_path`` and ``init_args``."""
    node: dict[str, Any] = {"class_path": value} if isinstance(value, str) else copy.deepcopy(dict(value))
    return {**node, "init_args": dict(node.get("init_args") or {})}


def with_overlay(base: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base recipe with a method in it.

    The overlay's objective replaces the base's; its ``rollout`` is merged over the base's solver, steps and guidance,
    and it takes over the base's :data:`OF_POLICY` options. Everything else merges key by key. Held-out images are
    sampled with the base's evaluation, or else with its ODE.

    Args:
        base: A recipe as plain values, resolved.
        part: Recipe part of one method, see :meth:`Overlay.part`.
    """
    given = as_component(base["model"]["objective"])["init_args"]
    spec = RolloutSpec(**(given.get("rollout") or {})).as_ode()
    rollout = {"solver": spec.solver, "steps": spec.steps, "guidance": spec.guidance}
    objective = as_component(part["model"]["objective"])
    cls = getattr(objectives, class_name(objective), None)
    known = options_of_class(cls) if isinstance(cls, type) else []
    args = {name: given[name] for name in OF_POLICY if name in given and name in known} | objective["init_args"]
    objective["init_args"] = {**args, "rollout": {**rollout, **(args.get("rollout") or {})}}
    result = merged(base, {key: value for key, value in part.items() if key != "model"})
    result["model"] = merged(base["model"], {k: v for k, v in part["model"].items() if k != "objective"})
    result["model"]["objective"] = objective
    result["model"]["evaluation"] = base["model"].get("evaluation") or rollout
    return result


def for_race(recipe: Mapping[str, Any], iterations: int, evaluate_every: int) -> dict[str, Any]:
    """Return the recipe without what a comparison does not need: samples, exports, checkpoints, extra loggers."""
    result = copy.deepcopy(dict(recipe))
    for key in ("name", "run_dir", "seed_everything"):
        result.pop(key, None)
    result["model"]["evaluate_at_start"] = True
    trainer = result.setdefault("trainer", {})
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    trainer |= {
        "callbacks": [callback for callback in callbacks if class_name(callback) not in LEFT_OUT_CALLBACKS],
        "max_epochs": iterations,
        "max_steps": -1,
        "check_val_every_n_epoch": evaluate_every,
        "logger": False,
        "enable_checkpointing": False,
    }
    return result
