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
    OF_POLICY,
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
        found: The search that the overlay's tuned settings come from; ``None`` if unknown.
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
    found = [entrant for overlay in overlays for entrant in _of_overlay(options, overlay)]
    if len({entrant.name for entrant in found}) < len(found):
        raise UserError("Two methods have the same name. Rename one of the files.")
    if errors := _build_errors(found):
        raise UserError(*errors)
    return found


def _of_overlay(options: CompareOptions, overlay: Overlay) -> list[Entrant]:
    if options.sweep:
        return swept(options, overlay)
    settings = options.settings or [name for name in SETTINGS if name == "published" or overlay.tuned]
    if "tuned" in settings and not overlay.tuned:
        raise UserError(
            f"{overlay.name} has no tuned settings. Use --settings published, or find some: "
            f"lightning compare {options.command.recipe.stem} --methods {overlay.name} --sweep"
        )
    return [Entrant(overlay.name, name, _recipe(options, overlay.part(name)), {}, overlay.found) for name in settings]


def swept(options: CompareOptions, overlay: Overlay) -> list[Entrant]:
    """Return the points of an overlay's grid, each with the published settings for everything else."""
    if not overlay.points:
        raise UserError(f"{overlay.name} has nothing to try: sweep: in its overlay is empty.")
    found = []
    for number, changed in enumerate(overlay.points):
        part = overlay.part("published")
        for key, value in changed.items():
            set_value(part, key, value)
        found.append(Entrant(overlay.name, f"sweep{number}", _recipe(options, part), changed))
    return found


def _recipe(options: CompareOptions, part: Mapping[str, Any]) -> dict[str, Any]:
    return for_race(with_overlay(options.base, part), options.iterations, options.evaluate_every)


def _lost_overrides(options: CompareOptions, overlays: Iterable[Overlay]) -> list[str]:
    """Return an error for each override that a method's overlay would replace silently."""
    errors = {}
    for overlay in overlays:
        replaced = {key for part in (overlay.part("tuned"), *overlay.points) for key in settings_of(part)}
        for typed, _ in options.command.overrides:
            key = typed.rstrip("+")
            if key.startswith("model.objective"):
                option = key.removeprefix("model.objective").removeprefix(".init_args").strip(".").partition(".")[0]
                is_lost = option not in ("rollout", *OF_POLICY)
            else:
                is_lost = any(f"{one}.".startswith(f"{key}.") for one in replaced)
            if is_lost:
                errors[key] = f"{key} has no effect: the overlay of {overlay.name} sets it. Set it in your own overlay."
    return list(errors.values())


def _build_errors(found: Sequence[Entrant]) -> list[str]:
    """Return what keeps methods from running, each error once per method."""
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        for entrant in found:
            path = Path(folder) / f"{entrant.name}.yaml"
            path.write_text(recipe_text(entrant, str(path), {}))
            try:
                messages = build([str(path)], make_folder=False).errors()
            except UserError as error:
                messages = error.errors
            errors += [f"{entrant.method}: {message}" for message in messages]
    return list(dict.fromkeys(errors))


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
    for name in ("recipes", "runs", "logs"):
        (options.out / name).mkdir(parents=True, exist_ok=True)
    for entrant in found:
        path = options.out / "recipes" / f"{entrant.name}.yaml"
        texts = unchanged_texts(options.texts, options.base, entrant.recipe)
        path.write_text(recipe_text(entrant, str(path), texts))
        recipes[path] = entrant
    return [
        Run(
            method=entrant.method,
            settings=entrant.settings,
            seed=seed,
            recipe=path,
            folder=options.out / "runs" / f"{entrant.name}-seed{seed}",
            log=options.out / "logs" / f"{entrant.name}-seed{seed}.log",
            fingerprint=fingerprint(entrant.recipe, seed),
        )
        for seed in options.seeds
        for path, entrant in recipes.items()
    ]


def fingerprint(recipe: Mapping[str, Any], seed: int) -> str:
    """Return a hash of the recipe, including its iterations, and the seed."""
    text = json.dumps(merged(recipe, {"seed_everything": seed}), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
