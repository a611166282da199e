"""Command line of a recipe, its files, and the resulting recipe."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_vgrpo.config.environment import environment_texts
from lit_vgrpo.config.tree import (
    Place,
    apply_override,
    class_name,
    expanded_logger,
    expanded_recipe,
    learn_without_class,
    leaves,
    logger_errors,
    merged,
    replace_trained,
    replaced,
    typed_key,
)
from lit_vgrpo.errors import UserError, nearest, one_line, shell_line, suggestion, unknown_option
from lit_vgrpo.system.paths import CONFIG_NAME, import_from_here, shipped, shipped_root, start_folder, typed_path

RESUME = "--resume"
STAGES = "stages"
"""Key that makes a file a curriculum, see :mod:`lit_vgrpo.apps.curriculum.curriculum`."""
NO_OVERLAYS = ("compare", "assets", "prompts", "starter", "benchmarks", "judges")
"""Shipped folders without overlays: a comparison's have a different format, and the starter is copied."""
RECIPE_NAME = "recipe.yaml"
"""The recipe in a folder that ``lightning init`` made."""
FOUND_IN = "found_in"
"""Key of a run's ``config.yaml``: folders, relative to it, in which the run found paths and modules."""
SECTIONS = {"model": "model.objective=VGRPO", "data": "data.group_size=8", "trainer": "trainer.max_epochs=20"}
"""Parts of a recipe, each a mapping, with an example of an option."""
RESULTS = ("metrics.csv", "summary.json")
"""Files of which a report can be made, also without a recipe."""
SUFFIXES = (".yaml", ".yml")
PATH_KEYS = ("train", "heldout", "exclude", "path", "checkpoint", "start_from", "embedding_cache")
"""Options whose value may be a file or folder name without a dot or slash."""
CALLBACK_KEYS = ("reference", "features")
"""Options of callbacks whose paths are read; other paths under ``trainer`` are written."""
OBJECTIVE_KEYS = ("model.objective", "model.objective.class_path")
MISSING_VARIABLE = re.compile(r"Environment variable '(.+?)' not found")


@dataclass(frozen=True)
class Command:
    """Arguments that name a recipe: ``RECIPE [OVERLAY ...] [key=value ...]``.

    Attributes:
        recipe: The recipe's file.
        overlays: Files merged over the recipe in this order, before the overrides.
        overrides: ``(key, text)`` in the order they were typed.
        resume: Continue in the run folder itself.
    """

    recipe: Path
    overlays: list[Path]
    overrides: list[tuple[str, str]]
    resume: bool = False

    @classmethod
    def parse(cls, words: Sequence[str], resume: bool = False) -> Self:
        """Find the files that the arguments name; raise UserError if one, or a logger's package, does not exist."""
        files = [word for word in words if not is_override(word)]
        overrides = [(key, text) for key, _, text in (w.partition("=") for w in words if is_override(w))]
        for key, text in overrides:
            if text == "None":
                raise UserError(f"{key}=None is Python syntax. Write {key}=null.")
            # Before the slow imports, unless it has options, which are checked with its class.
            has_options = any(other.startswith("trainer.logger.") for other, _ in overrides)
            if key == "trainer.logger" and not has_options and (found := logger_errors(text)):
                raise UserError(*found)
        if not files:
            raise UserError("No recipe given. Try: lightning run tiny_shapes")
        overlays = [find_overlay(name, files[rest:]) for rest, name in enumerate(files[1:], start=2)]
        return cls(find_recipe(files[0]), overlays, overrides, resume)

    @property
    def settings(self) -> list[str]:
        """The overlays and overrides as arguments."""
        return [*map(str, self.overlays), *(f"{key}={text}" for key, text in self.overrides)]

    def line(self, *more: str) -> str:
        """Return the command as a line of a shell, with more arguments."""
        return shell_line("lightning", "run", self.recipe, *self.settings, *["--resume"] * self.resume, *more)

    def in_folder(self, run: Path) -> Self:
        """Return the command that resumes a run folder from the recipe in it."""
        return self.parse([str(run / CONFIG_NAME), *self.settings, f"run_dir={run}"], resume=True)


@dataclass(frozen=True)
class Recipe:
    """A recipe with its overlays and overrides.

    Attributes:
        values: Plain values, interpolations applied.
        texts: By place, each value that depends on the environment, as written: it may be a secret.
        swapped: Training method that an override names instead of the file's; ``None`` if it is the file's.
        places: Folders of the files, in which paths and modules are found before the current folder.
        notes: Lines on what the overrides dropped or replaced.
    """

    command: Command
    values: dict[str, Any]
    texts: dict[Place, str]
    swapped: str | None
    places: list[Path]
    notes: list[str] = field(default_factory=list)


def is_override(word: str) -> bool:
    """Return True for ``key=value``; a path may also contain ``=``, but exists, or has a slash in the key.

    >>> is_override("data.train=a/b.txt"), is_override("runs/lr=1e-4/config.yaml"), is_override("name=" + 300 * "x")
    (True, False, True)
    """
    key, equals, _ = word.partition("=")
    return bool(key and equals) and "/" not in key and not os.path.exists(word)  # a Path refuses long names


def refuse_overrides(words: Sequence[str], refused: Mapping[str, str]) -> None:
    """Raise UserError for overrides of keys that a subcommand sets or does not use; their values end the message."""
    keys = [word.partition("=")[0] for word in words if is_override(word)]
    if errors := [f"{key} {why}" for key in keys for name, why in refused.items() if f"{key}.".startswith(f"{name}.")]:
        raise UserError(*errors)


def find_recipe(text: str) -> Path:
    """Return a recipe's file: a path, a shipped name, also with ``recipes/`` and ``.yaml``, or a folder with one."""
    recipes = shipped()
    for name in (CONFIG_NAME, RECIPE_NAME) if text not in recipes else ():
        if (file := Path(text).expanduser() / name).is_file():
            return file
    return _find(text, recipes, "a recipe", "")


def find_run(text: str) -> tuple[Path, Path | None]:
    """Return the run folder that a path belongs to, and the checkpoint if the path is one.

    Args:
        text: A run folder, its config.yaml, or one of its checkpoints; UserError is raised for anything else.
    """
    path = typed_path(text)
    if (path / CONFIG_NAME).is_file():
        return path, None
    if path.is_file() and path.name == CONFIG_NAME:
        return path.parent, None
    for folder in path.parents if path.is_file() and path.suffix == ".ckpt" else ():
        if (folder / CONFIG_NAME).is_file():
            return folder, path
    if text in shipped() or path.suffix in SUFFIXES:
        training = shell_line("lightning", "run", text)
        raise UserError(f"{text} is not a run. If it is a recipe, train it first: {training}")
    places = (path.parent, typed_path("runs"))
    known = {file.parent.name: f"{file.parent}" for place in places for file in sorted(place.glob(f"*/{CONFIG_NAME}"))}
    near = nearest(path.name, known)  # a shared runs/ makes no path alike
    advice = suggestion("", known.values()) if near is None else f"Did you mean {known[near]}?"
    advice = advice if known else "Train one first: lightning run tiny_shapes"
    error = f"is not a run folder: it has no {CONFIG_NAME}" if path.is_dir() else "is not a run"
    raise UserError(f"{text} {error}. {advice}")


def find_runs(text: str) -> list[Path]:
    """Return the run folder that a path belongs to, or the runs of a recipe below a folder that is none.

    The folder of a Trainer in Python is a run, too.
    """
    path = typed_path(text)
    if path.is_dir() and not (path / CONFIG_NAME).is_file():
        # a tracker's files may have this name too, and a FIFO would block
        files = [file for file in sorted(path.rglob(CONFIG_NAME)) if file.is_file()]
        if runs := [file.parent for file in files if f"\n{FOUND_IN}:".encode() in file.read_bytes()]:
            return runs
        if not (path / CONFIG_NAME).exists() and any((path / name).is_file() for name in RESULTS):
            return [path]
    return [find_run(text)[0]]


def find_overlay(text: str, after: Sequence[str] = ()) -> Path:
    """Return the file of an overlay: a path, or a shipped name such as ``strategy/zero2``.

    Args:
        after: The words typed after it, the first of which is the value if it is a key.
    """
    if text.partition(".")[0] in SECTIONS and Path(text).suffix not in SUFFIXES:
        key = text.partition(":")[0]
        override = f"{key}={next((word for word in after if word != '='), 'VALUE')}"
        raise UserError(f"{text} has no value. Write: {shell_line(override)}")
    hint = " An override is written key=value, without spaces or in quotes."
    return _find(text, {**shipped_overlays(), **shipped()}, "an overlay", hint)


def shipped_overlays() -> dict[str, Path]:
    """Return the overlays installed with the package, by ``folder/stem``."""
    found = sorted(shipped_root().glob("*/*.yaml"))
    return {f"{file.parent.name}/{file.stem}": file for file in found if file.parent.name not in NO_OVERLAYS}


def _find(text: str, names: dict[str, Path], what: str, hint: str) -> Path:
    """Return a file by its path or shipped name; raise UserError if there is none."""
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix in SUFFIXES:
            return path
        own = shell_line(f'model.reward={{python: "{path.stem}:NAME"}}')
        reward = f" To train on a function in it, add {own} to a recipe's name." if path.suffix == ".py" else ""
        raise UserError(f"{text} is not {what}: its name does not end with {' or '.join(SUFFIXES)}.{hint}{reward}")
    name = text.removesuffix(".yaml").removeprefix("recipes/")
    if name in names:
        return names[name]
    why = f"it is a folder without {RECIPE_NAME}" if path.is_dir() else "no such file, and not a shipped name"
    files = {str(file.with_suffix("")): str(file) for suffix in SUFFIXES for file in path.parent.glob(f"*{suffix}")}
    known = {**{short.rpartition("/")[2]: short for short in names}, **{short: short for short in names}, **files}
    guess = nearest(str(path.with_suffix("")) if path.suffix in SUFFIXES else name, known)
    overlays = ", ".join(name for name in names if "/" in name)
    listed = f"Shipped: {overlays}." if overlays else "To list the shipped ones, run: lightning recipes"
    meant = f"Did you mean {known[guess]}?" if guess else listed
    raise UserError(f"{text} is not {what}: {why}. {meant}{hint}")


def read_early(words: Sequence[str], resume: bool = False) -> tuple[Command, bool]:
    """Return the command and whether it names a curriculum; raise UserError if its recipe cannot be read."""
    command = Command.parse(words, resume)
    is_curriculum = STAGES in loaded(command.recipe)
    if not is_curriculum:
        read_recipe(command)
    return command, is_curriculum


def refuse_unreadable(words: Sequence[str]) -> None:
    """Raise UserError if a word names a YAML file that cannot be read as a mapping."""
    for word in words:
        if word.endswith(SUFFIXES) and os.path.isfile(file := os.path.expanduser(word)):
            loaded(Path(file))


def read_recipe(command: Command) -> Recipe:
    """Read a recipe's files and apply its overrides and interpolations.

    Paths and modules are found next to the file that names them, then in the current folder. Another training method
    starts from that method's defaults, and keeps only ``rollout`` of the recipe's objective.

    Raises:
        UserError: A file is not YAML or not a mapping, or an interpolation names a missing key.
    """
    plain: dict[Any, Any] = {}
    places: list[Path] = []
    for file in (command.recipe, *command.overlays):
        content = loaded(file)
        near = [file.parent / place for place in content.pop(FOUND_IN, None) or ["."]]
        near = [place.resolve() for place in near if shipped_root() not in (place, *place.parents)]
        places += near
        if STAGES in content:
            raise UserError(f"{file} is a curriculum of several recipes. Use one of its stages, or the run of one.")
        plain = merged(plain, expanded_recipe(with_found_paths(content, near)))
    import_from_here(*places)
    swapped, notes = None, list[str]()
    with _readable(command.recipe):
        # The method first: its settings may precede it on the command line.
        for key, text in sorted(command.overrides, key=lambda override: override[0] not in OBJECTIVE_KEYS):
            if "" in key.split("."):
                raise UserError(unknown_option(key, "a recipe", [typed_key(place) for place, _ in leaves(plain)]))
            old = model.get("objective") if isinstance(model := plain.get("model"), dict) else None
            dropped = apply_override(plain, key, text)
            if text.startswith("{"):
                continue
            if key in OBJECTIVE_KEYS and class_name(old) not in ("", class_name(text)):
                rollout = (old.get("init_args") or {}).get("rollout") if isinstance(old, dict) else None
                kept = {} if rollout is None else {"rollout": rollout}
                plain["model"]["objective"] = {"class_path": text, "init_args": kept}
                swapped = text
                notes.append(f"{text} uses its default options; only rollout is kept from the recipe's objective.")
            elif (
                isinstance(dropped, dict)
                and class_name(dropped) not in ("", class_name(text))
                and text != "null"
                and (options := ", ".join(dropped.get("init_args") or {}))
            ):
                notes.append(f"{key}={text} replaces {class_name(dropped)}, whose options are dropped: {options}.")
        learn_without_class(plain.get("model"))
        notes += replace_trained(plain.get("model"))
        if isinstance(trainer := plain.get("trainer"), dict) and "logger" in trainer:
            trainer["logger"] = expanded_logger(trainer["logger"])
        values = resolved(plain, command.recipe)
        for key, example in SECTIONS.items():
            if not isinstance(values.get(key) or {}, dict):
                raise UserError(f"{key}={values[key]} is not a mapping. Set an option of it, such as {example}.")
        return Recipe(command, values, environment_texts(plain), swapped, places, notes)


def with_found_paths(plain: Mapping[Any, Any], places: Sequence[Path], start: Path | None = None) -> dict[Any, Any]:
    """Return a recipe's values with the names of files and folders replaced by the paths where they are found.

    The path is relative if it is in ``start``, by default the folder of the command. What is not found stays as
    written.
    """
    here = start or start_folder()
    found: dict[Place, str] = {}
    for place, value in leaves({key: plain[key] for key in ("model", "data", "trainer", "ckpt_path") if key in plain}):
        option = next((step for step in reversed(place) if isinstance(step, str)), "")
        is_output = place[0] == "trainer" and option not in CALLBACK_KEYS
        is_path = isinstance(value, str) and ({"/", "."} & {*value} or (value and option in PATH_KEYS))
        if is_path and not is_output and not os.path.isabs(value):
            near = [path for folder in places if os.path.exists(path := os.path.abspath(folder / value))]
            if near:
                found[place] = str(Path(near[0]).relative_to(here)) if Path(near[0]).is_relative_to(here) else near[0]
    return dict(replaced(plain, found))


def as_found_from(start: Path, word: str) -> str:
    """Return the overlay or override for a command in the folder ``start`` that names the files found here."""
    if not is_override(word):
        return str(typed_path(word))
    if (here := start_folder()) == start:
        return word
    key, _, text = word.partition("=")
    steps, typed = re.findall(r"[^.+\[\]]+", key), dict[Any, Any]()
    apply_override(typed, "value", text)
    tree = typed["value"]
    for step in reversed(steps):
        tree = {step: tree}
    found: Any = with_found_paths(tree, [here], start)
    for step in steps:
        found = found[step]
    return word if found == typed["value"] else f"{key}={json.dumps(found, ensure_ascii=False)}"


def resolved(plain: dict[Any, Any], path: Path) -> dict[str, Any]:
    """Return the plain values of a file with interpolations applied; raise UserError if one names a missing key."""
    with _readable(path):
        found: Any = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    return {str(key): value for key, value in found.items()}


def loaded(path: Path) -> dict[Any, Any]:
    """Return the plain values of a file, not resolved; raise UserError if it is not a readable mapping in YAML."""
    with _readable(path):
        content = OmegaConf.load(path)
        if not OmegaConf.is_dict(content):
            raise UserError(f"{path} is not a recipe: its top level must be a mapping such as model: and data:.")
        plain = OmegaConf.to_container(content, resolve=False)
    assert isinstance(plain, dict)
    return plain


@contextmanager
def _readable(recipe: Path) -> Iterator[None]:
    """Convert errors in reading a recipe to a one-line UserError."""
    try:
        yield
    except yaml.YAMLError as error:
        raise UserError(_yaml_error(recipe, error)) from error
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "a value"
        if missing := MISSING_VARIABLE.search(str(error)):
            name = missing[1]
            raise UserError(f"{recipe}: {key}: the variable {name} is not set. Set it: export {name}=...") from error
        raise UserError(f"{recipe}: {key}: {str(error).splitlines()[0]}. Check the ${{...}} in it.") from error
    except OSError as error:
        raise UserError(f"Cannot read {recipe}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{recipe} is not a text file in UTF-8.") from error


def _yaml_error(recipe: Path, error: yaml.YAMLError) -> str:
    """Return a syntax error as one line, with the range of lines that contains the mistake."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{recipe} is not YAML: {one_line(error)}."
    first = last = error.problem_mark.line
    # The parser notices a missing colon, quote or bracket late. A block's context only marks where it begins.
    if error.context_mark is not None and re.match("while (scanning a|parsing a flow)", error.context or ""):
        first = error.context_mark.line
    lines = f"line {first + 1}" if first == last else f"lines {first + 1} to {last + 1}"
    text = "".join(recipe.read_text(encoding="utf-8").splitlines()[first : first + 1]).strip()[:60]
    is_syntax = isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError)
    advice = ' Write "key: value", indented with spaces like the other lines of its section.' if is_syntax else ""
    return f'{recipe} is not YAML at {lines}, "{text}": {error.problem}.{advice}'
