"""The runs of a comparison and their recipes."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_vgrpo.apps.compare.options import SETTINGS, CompareOptions
from lit_vgrpo.apps.compare.overlays import (
    Budget,
    Overlay,
    find_overlay,
    for_race,
    read_overlay,
    settings_of,
    with_overlay,
)
from lit_vgrpo.config.environment import unchanged_texts, with_texts
from lit_vgrpo.config.tree import Place, merged, set_value
from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.build import build


@dataclass
class Entrant:
    """A method with one set of settings, run once per seed.

    Attributes:
        settings: ``published`` or ``tuned``; in a sweep ``sweep0``, ``sweep1``, ...
        recipe: The merged recipe as plain values, without seed and folder.
        changed: The swept keys with their values.
        found: The search that tuned settings come from, where their overlay says it.
    """

    method: str
    settings: str
    recipe: dict[str, Any]
    changed: dict[str, Any] = field(default_factory=dict)
    found: Budget | None = None

    @property
    def name(self) -> str:
        return f"{self.method}-{self.settings}"


@dataclass(frozen=True)
class Run:
    """One process: an entrant with a seed.

    Attributes:
        fingerprint: Hash of everything that affects the results; a finished run with the same one is not repeated.
    """

    method: str
    settings: str
    seed: int
    iterations: int
    recipe: Path
    folder: Path
    log: Path
    fingerprint: str

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def fingerprint_file(self) -> Path:
        return self.folder.with_name(f"{self.name}.fingerprint")


def entrants(options: CompareOptions) -> list[Entrant]:
    """Return every method with every kind of settings, as merged recipes that build without errors.

    Raises:
        UserError: With every error in the recipe, the methods, the overlays and the sizes.
    """
    _check_base(options)
    overlays, errors = [], []
    for text in options.methods:
        try:
            overlays.append(read_overlay(find_overlay(text)))
        except UserError as error:
            errors += error.errors
    names = [overlay.name for overlay in overlays]
    errors += [
        f"Two methods are called {name}. Rename one of the files." for name in set(names) if names.count(name) > 1
    ]
    if not options.sweep and options.settings is not None and "tuned" in options.settings:
        errors += [
            f"{overlay.name} has no tuned settings: tuned: in its overlay is empty. Use --settings published, or find "
            f"some: lightning compare {options.command.recipe.stem} --methods {overlay.name} --sweep"
            for overlay in overlays
            if not overlay.tuned
        ]
    if options.sweep:
        errors += [f"{o.name} has nothing to try: sweep: in its overlay is empty." for o in overlays if not o.sweep]
    if errors:
        raise UserError(*errors)
    found = [entrant for overlay in overlays for entrant in _of_overlay(options, overlay)]
    errors = [*_lost_overrides(options, found), *_build_errors(found)]
    if errors:
        raise UserError(*dict.fromkeys(errors))
    return found


def _check_base(options: CompareOptions) -> None:
    base = options.base
    words = [str(options.command.recipe), *(f"{key}={text}" for key, text in options.command.overrides)]
    cli = build(words, make_folder=False)
    errors = cli.errors()
    if not cli.datamodule.has_heldout and not options.sweep:  # a sweep takes its own
        errors.append("The recipe has no data.heldout, so there is nothing to compare. Set data.heldout=PROMPT_FILE.")
    if base.get("ckpt_path") is not None:
        errors.append(
            f"ckpt_path={base['ckpt_path']} cannot be continued by other methods. Set model.policy.checkpoint to the "
            "weights that all of them start from."
        )
    if errors:
        raise UserError(*errors)


def _of_overlay(options: CompareOptions, overlay: Overlay) -> list[Entrant]:
    if options.sweep:
        return swept(options, overlay)
    settings = options.settings or [name for name in SETTINGS if name == "published" or overlay.tuned]
    return [
        Entrant(
            overlay.name,
            name,
            _recipe(options, overlay.part(name)),
            found=overlay.found if name == "tuned" else None,
        )
        for name in settings
    ]


def swept(options: CompareOptions, overlay: Overlay) -> list[Entrant]:
    """Return the points of an overlay's grid, each with the published settings for everything else."""
    found = []
    for number, changed in enumerate(overlay.points):
        part = overlay.part("published")
        for key, value in changed.items():
            set_value(part, key, value)
        found.append(Entrant(overlay.name, f"sweep{number}", _recipe(options, part), changed))
    return found


def _recipe(options: CompareOptions, part: Mapping[str, Any]) -> dict[str, Any]:
    return for_race(with_overlay(options.base, part), options.iterations, options.evaluate_every)


def tuned_part(changed: Mapping[str, Any], objective: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``tuned:`` block of an overlay that takes over the swept values."""
    part: dict[str, Any] = {"model": {"objective": {"class_path": objective["class_path"]}}}
    for key, value in changed.items():
        set_value(part, key, value)
    del part["model"]["objective"]["class_path"]  # stays that of published
    if not part["model"]["objective"]:
        del part["model"]["objective"]
    return part


def _lost_overrides(options: CompareOptions, found: Iterable[Entrant]) -> list[str]:
    """Return an error for each override that a method's overlay replaces."""
    errors = {}
    before = settings_of(options.base)
    for entrant in found:
        after = settings_of(entrant.recipe)
        for key, _ in options.command.overrides:
            full = _with_init_args(key.rstrip("+"))
            # The base rollout may be overridden, although a method may set its own solver.
            if full == "trainer.callbacks" or full.startswith("model.objective.init_args.rollout"):
                continue
            mine = [leaf for leaf in before if leaf == full or leaf.startswith(f"{full}.")]
            if any(before[leaf] != after.get(leaf) for leaf in mine):
                errors[key] = (
                    f"{key} has no effect: the overlay of {entrant.method} sets it. Leave it out, or give your own "
                    "overlay file as a method."
                )
    return list(errors.values())


def _with_init_args(key: str) -> str:
    """Return the key as it stands in a recipe, where ``init_args`` may have been left out."""
    rest = key.removeprefix("model.objective.")
    return (
        key if rest == key or rest.split(".")[0] in ("init_args", "class_path") else f"model.objective.init_args.{rest}"
    )


def _build_errors(found: Sequence[Entrant]) -> list[str]:
    """Return what keeps entrants from running: an error that all of a method share is one line."""
    errors: dict[tuple[str, str], list[Entrant]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for entrant in found:
            path = Path(folder) / f"{entrant.name}.yaml"
            path.write_text(recipe_text(entrant, str(path), {}))
            try:
                own = build([str(path)], make_folder=False).errors()
            except UserError as error:
                own = error.errors
            for message in own:
                errors.setdefault((entrant.method, message), []).append(entrant)
    lines = [
        f"{label}: {message}"
        for (method, message), having in errors.items()
        for label in _labels(method, having, found)
    ]
    sound = [name for name in dict.fromkeys(e.method for e in found) if not any(name == m for m, _ in errors)]
    if lines and sound:
        lines.append(f"Without these: --methods {','.join(sound)}")
    return lines


def _labels(method: str, having: Sequence[Entrant], found: Sequence[Entrant]) -> list[str]:
    if len(having) > 1 and len(having) == sum(entrant.method == method for entrant in found):
        return [method]
    return [" ".join([e.method, e.settings, *(f"({k}={v})" for k, v in e.changed.items())]) for e in having]


def recipe_text(entrant: Entrant, path: str, texts: Mapping[Place, str]) -> str:
    """Return the merged recipe as a file that ``lightning run`` takes.

    Args:
        texts: Values from the environment as written, see :func:`~lit_vgrpo.config.environment.environment_texts`.
    """
    what = ", ".join(f"{key}={value}" for key, value in entrant.changed.items()) or f"{entrant.settings} settings"
    body = yaml.safe_dump(with_texts(entrant.recipe, texts), sort_keys=False, width=120)
    return f"# {entrant.method}, {what}, merged for a comparison\n#   lightning run {path}\n{body}"


def runs_of(options: CompareOptions, found: Iterable[Entrant]) -> list[Run]:
    """Write the merged recipes and return a run per entrant and seed, seed by seed."""
    recipes = {}
    (options.out / "recipes").mkdir(parents=True, exist_ok=True)
    (options.out / "runs").mkdir(exist_ok=True)
    (options.out / "logs").mkdir(exist_ok=True)
    for entrant in found:
        path = options.out / "recipes" / f"{entrant.name}.yaml"
        texts = unchanged_texts(options.texts, options.base, entrant.recipe)
        path.write_text(recipe_text(entrant, str(path), texts))
        recipes[entrant.name] = (entrant, path)
    return [
        Run(
            method=entrant.method,
            settings=entrant.settings,
            seed=seed,
            iterations=options.iterations,
            recipe=path,
            folder=options.out / "runs" / f"{name}-seed{seed}",
            log=options.out / "logs" / f"{name}-seed{seed}.log",
            fingerprint=fingerprint(entrant.recipe, seed),
        )
        for seed in options.seeds
        for name, (entrant, path) in recipes.items()
    ]


def fingerprint(recipe: Mapping[str, Any], seed: int) -> str:
    """Return a hash of the recipe, including its iterations, and the seed."""
    text = json.dumps(merged(recipe, {"seed_everything": seed}), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
