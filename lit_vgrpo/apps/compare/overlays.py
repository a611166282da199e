"""Overlays: the changes that a method makes to a recipe."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeGuard

from lit_vgrpo import objectives
from lit_vgrpo.config.parts import options_of_class
from lit_vgrpo.config.recipe import loaded, resolved
from lit_vgrpo.config.tree import class_name, dotted, leaves, merged
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.errors import UserError, counted, nearest, suggestion, unknown_option
from lit_vgrpo.system.paths import shipped_root

PARTS = ("published", "tuned", "found", "sweep")
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
LEFT_OUT_CALLBACKS = ("SampleGrid", "Export", "SurrogateDiagnostics")
"""Callbacks that cost time or disk space and do not affect a comparison."""


OF_POLICY = ("scale_cap",)
"""Options of an objective that depend on the network, and so belong to the recipe for every method that has them."""


@dataclass(frozen=True)
class Budget:
    """Budget that a sweep gave one method: an overlay's ``found:`` block.

    Attributes:
        points: Number of settings tried.
        seeds: Runs of each.
        iterations: Iterations of each run.
        prompts: Which prompts they were chosen on, and on which task.
    """

    points: int
    seeds: int
    iterations: int
    prompts: str = ""

    def __str__(self) -> str:
        points, seeds = counted(self.points, "point"), counted(self.seeds, "seed")
        return f"{points} x {seeds} x {self.iterations} iterations" + (f", {self.prompts}" if self.prompts else "")

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value != ""}


@dataclass
class Overlay:
    """A method's file: its published settings, the tuned ones, and the grid they were found on.

    Attributes:
        name: the method's name in tables, the file's stem.
        published: recipe part that is merged over the base recipe.
        tuned: recipe part that is merged over ``published``; empty where nothing has been tuned.
        found: the search that ``tuned`` comes from; ``None`` where the file does not say.
        sweep: dotted recipe key -> values to try, all combined; or a list of points, each dotted key -> value.
    """

    name: str
    published: dict[str, Any]
    tuned: dict[str, Any] = field(default_factory=dict)
    found: Budget | None = None
    sweep: dict[str, list[Any]] | list[dict[str, Any]] = field(default_factory=dict)

    @property
    def points(self) -> list[dict[str, Any]]:
        """The settings that a sweep tries, each as dotted key -> value."""
        if isinstance(self.sweep, list):
            return self.sweep
        if not self.sweep:
            return []
        return [dict(zip(self.sweep, values, strict=True)) for values in itertools.product(*self.sweep.values())]

    def part(self, settings: str) -> dict[str, Any]:
        """Return the recipe part of ``published`` or ``tuned`` settings."""
        return copy.deepcopy(self.published) if settings == "published" else merged(self.published, self.tuned)


def shipped_methods() -> dict[str, Path]:
    """Return the overlays installed with the package, by name."""
    return {path.stem: path for path in sorted((shipped_root() / "compare").glob("*.yaml"))}


def find_overlay(text: str) -> Path:
    """Return the file of a method: a shipped name, or the path of one's own overlay.

    Raises:
        UserError: there is none of that name.
    """
    shipped = shipped_methods()
    if text in shipped:
        return shipped[text]
    path = Path(text).expanduser()
    if path.is_file():
        return path
    guess = nearest(text, shipped)
    hint = f"Did you mean {guess}? " if guess else ""
    raise UserError(f"{text} is not a method. {hint}Use one of {', '.join(shipped)}, or the path of an overlay file.")


def read_overlay(path: Path) -> Overlay:
    """Read an overlay file; with ``like:``, its ``published:`` is merged over that of the shipped method of this name.

    Raises:
        UserError: it is not YAML, has keys that no overlay has, or sets what must be the same for every method.
    """
    content = {key: value or {} for key, value in resolved(loaded(path), path).items()}
    like = str(content.pop("like", "") or "")
    if not isinstance(content.setdefault("published", {} if like else None), dict):
        raise UserError(f"{path} is not an overlay: it needs published: with model.objective, or like: with a method.")
    if like:
        shipped = shipped_methods()
        if like not in shipped:
            raise UserError(f"{path}: like={like} is not a shipped method. {suggestion(like, shipped)}")
        content["published"] = merged(read_overlay(shipped[like]).published, content["published"])
    errors = [unknown_option(key, f"the overlay {path}", ("like", *PARTS)) for key in content if key not in PARTS]
    errors += [
        f"{path}: {part} must be a mapping{', or a list of points' if part == 'sweep' else ''}."
        for part in PARTS
        if not isinstance(content.get(part, {}), Mapping)
        and not (part == "sweep" and isinstance(content[part], list) and all(map(_is_map, content[part])))
    ]
    search = content.get("found")
    errors += budget_errors(search, str(path)) if _is_map(search) else []
    if errors:
        raise UserError(*errors)
    overlay = Overlay(
        path.stem,
        content["published"],
        content.get("tuned", {}),
        Budget(**search) if search else None,
        content.get("sweep", {}),
    )
    errors = list(_overlay_errors(path, overlay))
    if errors:
        raise UserError(*errors)
    overlay.published["model"]["objective"] = as_component(overlay.published["model"]["objective"])
    return overlay


def budget_errors(found: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield what is wrong with an overlay's ``found:`` block, a line each."""
    names = [one.name for one in fields(Budget)]
    numbers = names[:-1]
    yield from (
        unknown_option(f"found.{key}", where, [f"found.{n}" for n in names]) for key in found if key not in names
    )
    for name in numbers:
        value = found.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{where}: found.{name}={value} must be a whole number such as 8: paste found: from sweep.md."
    if not isinstance(found.get("prompts", ""), str):
        yield f"{where}: found.prompts={found['prompts']} must be words that say what the settings were chosen on."


def _overlay_errors(path: Path, overlay: Overlay) -> Iterator[str]:
    model = overlay.published.get("model")
    objective = model.get("objective") if _is_map(model) else None
    if not isinstance(objective, str) and not (_is_map(objective) and "class_path" in objective):
        yield f"{path}: published.model.objective has no class_path. Add one, such as class_path: VGRPO."
    keys = {f"{part}.{key}": key for part in ("published", "tuned") for key in settings_of(getattr(overlay, part))}
    grids = overlay.sweep if isinstance(overlay.sweep, list) else [overlay.sweep]
    keys |= {f"sweep.{key}": key for grid in grids for key in grid}
    for shown, key in keys.items():
        if not any(key == allowed or key.startswith(f"{allowed}.") for allowed in MAY_SET):
            yield (
                f"{path}: {shown} cannot be set by an overlay: it must be the same for every method. "
                f"Set it in the recipe. {suggestion(key, MAY_SET)}"
            )
    for key, values in overlay.sweep.items() if isinstance(overlay.sweep, dict) else ():
        if not isinstance(values, list) or not values:
            yield f"{path}: sweep.{key}={values!r} must be a list of the values to try."


def settings_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting of a recipe by its dotted key; a list is one setting."""
    return {dotted(place): value for place, value in leaves(part, lambda *_: False)}


def as_component(value: Any) -> dict[str, Any]:
    """Return a class given by name as ``class_path`` and ``init_args``."""
    node: dict[str, Any] = {"class_path": value} if isinstance(value, str) else copy.deepcopy(dict(value))
    return {**node, "init_args": dict(node.get("init_args") or {})}


def common_rollout(base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base recipe's solver, steps and guidance without noise, which every method starts from.

    Raises:
        ValueError, TypeError: the recipe's ``model.objective.rollout`` is not one.
    """
    given = as_component(base["model"]["objective"])["init_args"].get("rollout") or {}
    spec = RolloutSpec(**given).as_ode()
    return {"solver": spec.solver, "steps": spec.steps, "guidance": spec.guidance}


def with_overlay(base: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base recipe with a method in it.

    The overlay's objective replaces the base's; its ``rollout`` is laid over the base's solver, steps and guidance, and
    it takes over the base's :data:`OF_POLICY` options. Everything else merges key by key. Held-out images are sampled
    with the base's evaluation, or else with its ODE.

    Args:
        base: a recipe as plain values, resolved.
        part: recipe part of one method, see :meth:`Overlay.part`.
    """
    rollout = common_rollout(base)
    result = merged(base, {key: value for key, value in part.items() if key != "model"})
    result["model"] = merged(base["model"], {k: v for k, v in part.get("model", {}).items() if k != "objective"})
    objective = as_component(part["model"]["objective"])
    objective["init_args"]["rollout"] = {**rollout, **(objective["init_args"].get("rollout") or {})}
    objective["init_args"] = {**_of_policy(base, objective["class_path"]), **objective["init_args"]}
    result["model"]["objective"] = objective
    result["model"]["evaluation"] = base["model"].get("evaluation") or rollout
    return result


def _of_policy(base: Mapping[str, Any], class_path: str) -> dict[str, Any]:
    cls = getattr(objectives, class_name(class_path), None)
    known = options_of_class(cls) if isinstance(cls, type) else []
    given = as_component(base["model"]["objective"])["init_args"]
    return {name: given[name] for name in OF_POLICY if name in given and name in known}


def for_race(recipe: Mapping[str, Any], iterations: int, evaluate_every: int) -> dict[str, Any]:
    """Return the recipe without what a comparison does not need: samples, exports, checkpoints, extra loggers."""
    result = copy.deepcopy(dict(recipe))
    for key in ("name", "run_dir", "seed_everything"):
        result.pop(key, None)
    result["model"]["evaluate_at_start"] = True
    trainer = result.setdefault("trainer", {})
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    kept = [c for c in callbacks if class_name(c) not in LEFT_OUT_CALLBACKS]
    trainer |= {
        "callbacks": kept,
        "max_epochs": iterations,
        "max_steps": -1,
        "check_val_every_n_epoch": evaluate_every,
        "logger": False,
        "enable_checkpointing": False,
    }
    return result


def _is_map(value: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping)
