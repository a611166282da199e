"""Command line of a recipe, and the recipe files it names."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import Self

from lit_vgrpo.config.arguments import Options, flag, is_override
from lit_vgrpo.config.environment import environment_texts, numbers_in_lists, with_texts
from lit_vgrpo.config.parts import merged
from lit_vgrpo.config.shorthand import expanded_override, expanded_recipe
from lit_vgrpo.config.tree import Place, class_name, dotted
from lit_vgrpo.errors import UserError, nearest
from lit_vgrpo.system.paths import CONFIG_NAME, shipped_root

RESUME = "--resume"
STAGES = "stages"
"""Key that makes a file a curriculum, see :mod:`lit_vgrpo.apps.curriculum.curriculum`."""
NO_OVERLAYS = ("compare", "assets", "prompts", "starter")
"""Shipped folders without overlays: a comparison's have a different format, and the starter is copied."""
SECTIONS = ("model", "data", "trainer")
SUFFIXES = (".yaml", ".yml")
OBJECTIVE_KEYS = ("model.objective", "model.objective.class_path")
ENTRY = re.compile(r"\[(\d+)\]")
MISSING_VARIABLE = re.compile(r"Environment variable '(.+?)' not found")
KEPT_SETTINGS = ("rollout",)
"""Settings that mean the same for every method; a KL weight, for example, does not."""


@dataclass(kw_only=True)
class Command(Options):
    """Arguments that name a recipe: ``RECIPE [OVERLAY ...] key=value --key=value --key value [--resume]``.

    Attributes:
        resume: Continue in the run folder itself.
        recipe: The recipe's file.
        overlays: Files merged over the recipe in this order, before the overrides.
        overrides: ``(key, text)`` in the order they were typed.
    """

    subcommand: ClassVar[str] = "run"
    takes_overrides: ClassVar[bool] = True

    resume: bool = flag()
    recipe: Path = field(init=False)
    overlays: list[Path] = field(init=False)
    overrides: list[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        files = [word for word in self.words if not is_override(word)]
        self.overrides = []
        for word in filter(is_override, self.words):
            key, _, text = word.partition("=")
            if text == "None":
                raise UserError(f"{key}=None is Python syntax. Write {key}=null.")
            self.overrides.append((key, expanded_override(key, text)))
        if not files:
            raise UserError("No recipe given. Try: lightning run tiny_shapes")
        self.recipe = find_recipe(files[0])
        self.overlays = [find_overlay(name) for name in files[1:]]

    def in_folder(self, run: Path) -> Self:
        """Return the command that resumes a run folder from its own recipe."""
        settings = [*map(str, self.overlays), *(f"{key}={text}" for key, text in self.overrides)]
        return self.parse([str(run / CONFIG_NAME), *settings, f"run_dir={run}", RESUME])

    def parser_args(self, config: Path) -> list[str]:
        return [f"--config={config}", *(f"--{key}={text}" for key, text in self.plain_overrides)]

    @property
    def plain_overrides(self) -> list[tuple[str, str]]:
        """Overrides that the parser can apply."""
        return [override for override in self.overrides if override not in self.list_overrides]

    @property
    def list_overrides(self) -> list[tuple[str, str]]:
        """Overrides that the parser cannot apply: single list entries, and lists with such overrides.

        Also lists that read the environment, and a whole optimizer, whose settings it would mix with the recipe's.
        """
        lists = [key.partition("[")[0] for key, _ in self.overrides if "[" in key]
        return [
            (key, text)
            for key, text in self.overrides
            if "[" in key
            or (key == "model.optimizer" and text.lstrip().startswith("{"))
            or ("[" in text and "${" in text)
            or any(f"{name}.".startswith(f"{key.removesuffix('+')}.") for name in lists)
        ]

    @property
    def other_objective(self) -> str | None:
        """Training method named by an override, without its settings."""
        wanted = [text for key, text in self.overrides if key in OBJECTIVE_KEYS and not text.startswith("{")]
        return wanted[-1] if wanted else None


def look_at(word: str) -> None:
    """Check that a recipe exists and is a YAML mapping, before anything slow is imported.

    Raises:
        UserError: It does not exist or is not a mapping.
    """
    if not word.startswith("-") and not is_override(word):
        loaded(find_recipe(word))


def find_recipe(text: str) -> Path:
    """Return the file of a recipe: a path, a shipped name with or without ``recipes/`` and ``.yaml``, or a run folder.

    Raises:
        UserError: No recipe has that name.
    """
    shipped, of_run = shipped_recipes(), Path(text).expanduser() / CONFIG_NAME
    if of_run.is_file() and text not in shipped:
        return of_run
    return _find(text, shipped, "recipe", "")


def find_overlay(text: str) -> Path:
    """Return the file of an overlay: a path, or a shipped name such as ``strategy/zero2``.

    Raises:
        UserError: No overlay has that name.
    """
    if text.partition(".")[0] in SECTIONS and Path(text).suffix not in SUFFIXES:
        raise UserError(f"{text} is not an overlay. An override is a single argument: {text}=VALUE.")
    return _find(text, {**shipped_overlays(), **shipped_recipes()}, "overlay", " An override is written key=value.")


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that are installed with the package, by name."""
    return {file.stem: file for file in sorted(shipped_root().glob("*.yaml"))}


def shipped_overlays() -> dict[str, Path]:
    """Return the overlays that are installed with the package, by ``folder/stem``."""
    found = sorted(shipped_root().glob("*/*.yaml"))
    return {f"{file.parent.name}/{file.stem}": file for file in found if file.parent.name not in NO_OVERLAYS}


def _find(text: str, shipped: dict[str, Path], what: str, hint: str) -> Path:
    path = Path(text).expanduser()
    if path.is_file():
        return path
    name = text.removesuffix(".yaml").removeprefix("recipes/")
    if name in shipped:
        return shipped[name]
    why = "it is a folder" if path.is_dir() else "no such file, and not a shipped name"
    error = f"is not {'an' if what == 'overlay' else 'a'} {what}: {why}"
    # If only the last component was typed, compare that.
    parts = {known.rpartition("/")[2]: known for known in shipped}
    beside = {file.name: str(file) for suffix in SUFFIXES for file in path.parent.glob(f"*{suffix}") if file.is_file()}
    own = beside.get(nearest(path.name, beside) or "")
    guess = nearest(name, shipped) or parts.get(nearest(path.stem, parts) or "") or own
    guess = own or guess if path.suffix in SUFFIXES else guess
    meant = f"Did you mean {guess}?" if guess else f"Shipped: {', '.join(shipped)}."
    raise UserError(f"{text} {error}. {meant}{hint}")


def read_recipe(command: Command) -> dict[str, Any]:
    """Return the recipe as plain values, with overrides and interpolations applied.

    Raises:
        UserError: It is not YAML or not a mapping, or an interpolation names a missing key.
    """
    return resolved(_written_recipe(command), command.recipe)


def resolved(plain: dict[Any, Any], path: Path) -> dict[str, Any]:
    """Return the plain values of a file with interpolations applied; raise UserError if one names a missing key."""
    with _readable(path):
        found = OmegaConf.to_container(OmegaConf.create(plain), resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def texts_from_environment(command: Command) -> dict[Place, str]:
    """Return each value of the recipe that depends on the environment, as written."""
    with _readable(command.recipe):
        return environment_texts(_written_recipe(command))


def _written_recipe(command: Command) -> dict[Any, Any]:
    """Return recipe, overlays and overrides as plain values, not resolved."""
    plain, _ = _plain_recipe(command)
    with _readable(command.recipe):
        for key, text in command.plain_overrides:
            apply_override(plain, key, text)
    return plain


@contextmanager
def parser_config(command: Command) -> Iterator[tuple[Path, str | None]]:
    """Yield the file for the parser, and a note for the user if the training method was swapped.

    The settings of the recipe's method are then left out; the parser would keep those that both methods have.

    Raises:
        UserError: As in :func:`read_recipe`.
    """
    plain, swapped = _plain_recipe(command)
    if texts := texts_from_environment(command):  # the parser resolves none within lists
        plain = with_texts(plain, numbers_in_lists(texts, read_recipe(command)))
    if not swapped and not command.overlays and plain == loaded(command.recipe):
        yield command.recipe, None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / command.recipe.name
        OmegaConf.save(OmegaConf.create(plain), path)
        method = command.other_objective
        kept = f"{method} starts from its own defaults and keeps only rollout of the recipe's objective."
        yield path, kept if swapped else None


def _plain_recipe(command: Command) -> tuple[dict[Any, Any], bool]:
    """Return recipe and overlays as plain values, not resolved, and whether the training method was swapped."""
    plain = _plain_file(command.recipe)
    for overlay in command.overlays:
        plain = merged(plain, _plain_file(overlay))
    plain, swapped = _with_objective(plain, command.other_objective)
    for key, text in command.list_overrides:
        apply_override(plain, key, text)
    return plain, swapped


def _with_objective(plain: dict[Any, Any], wanted: str | None) -> tuple[dict[Any, Any], bool]:
    """Put the wanted training method in the recipe; return it and whether the method was swapped."""
    model = plain.get("model")
    if wanted is None or not isinstance(model, dict) or not isinstance(model.get("objective"), dict):
        return plain, False
    if class_name(model["objective"]) == class_name(wanted):
        return plain, False
    settings = model["objective"].get("init_args") or {}
    kept = {name: value for name, value in settings.items() if name in KEPT_SETTINGS}
    model["objective"] = {"class_path": wanted, "init_args": kept}
    return plain, True


def _plain_file(path: Path) -> dict[Any, Any]:
    plain = loaded(path)
    if STAGES in plain:
        raise UserError(f"{path} is a curriculum of several recipes. Use one of its stages, or the run of one.")
    return expanded_recipe(plain)


def loaded(path: Path) -> dict[Any, Any]:
    """Return the plain values of a file, not resolved.

    Raises:
        UserError: It cannot be read, is not YAML, or is not a mapping.
    """
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
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{recipe}{where} is not YAML: {getattr(error, 'problem', error)}.") from error
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "a value"
        if missing := MISSING_VARIABLE.search(str(error)):
            name = missing[1]
            raise UserError(f"{recipe}: {key}: the variable {name} is not set. Set it: export {name}=...") from error
        raise UserError(f"{recipe}: {key}: {str(error).splitlines()[0]}. Check the ${{...}} in it.") from error
    except OSError as error:
        raise UserError(f"Cannot read {recipe}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{recipe} is not a text file in UTF-8.") from error


def apply_override(recipe: dict[Any, Any], key: str, text: str) -> None:
    """Set a key of a recipe in place to the value that a text stands for, see :func:`set_value`."""
    try:
        value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)["value"]  # type: ignore[index,call-overload]
    except (yaml.YAMLError, OmegaConfBaseException):
        value = text
    set_value(recipe, key, text if text == "" else value)


def set_value(recipe: dict[Any, Any], key: str, value: Any) -> None:
    """Set a key of a recipe in place; the key may omit ``init_args``, as for the parser.

    >>> recipe = {"objective": {"class_path": "VGRPO"}}
    >>> set_value(recipe, "objective.clip", 0.01)
    >>> recipe
    {'objective': {'class_path': 'VGRPO', 'init_args': {'clip': 0.01}}}

    Raises:
        UserError: The key names a missing list entry.
    """
    append = key.endswith("+")
    steps = list(_steps(key.rstrip("+")))
    node: Any = recipe
    for number, step in enumerate(steps[:-1]):
        node, step = _holder(node, step, steps[:number])
        if isinstance(node[step], str) and isinstance(steps[number + 1], str):
            node[step] = {"class_path": node[step]}
        elif not isinstance(node[step], dict | list):
            node[step] = {}
        node = node[step]
    node, last = _holder(node, steps[-1], steps[:-1])
    old = node[last]
    if append:
        value = [*(old or []), *(value if isinstance(value, list) else [value])]
    elif isinstance(old, dict) and "class_path" in old and isinstance(value, str):
        value = {**old, "class_path": value}
    node[last] = value


def _steps(key: str) -> Iterator[str | int]:
    """Split a dotted key; ``[n]`` becomes the index of a list entry.

    >>> list(_steps("model.reward.rewards[1].checkpoint"))
    ['model', 'reward', 'rewards', 1, 'checkpoint']
    """
    for part in key.split("."):
        name, *entries = ENTRY.split(part)
        yield name
        yield from (int(entry) for entry in entries if entry)


def _holder(node: Any, step: str | int, before: Sequence[str | int]) -> tuple[Any, Any]:
    """Return the mapping or list that contains a step's value, and its key or index there."""
    if isinstance(step, int):
        if not isinstance(node, list) or step >= len(node):
            name = dotted(before)
            count = len(node) if isinstance(node, list) else 0
            held = f"has {count} entries, starting with {name}[0]" if count else "is not a list with entries"
            raise UserError(f"{name}[{step}] does not exist: {name} {held}. Append one with {name}+=VALUE.")
        return node, step
    if not isinstance(node, dict):
        name = dotted(before)
        raise UserError(f"{name} is a list and has no option {step}. Write {name}[0].{step}=...")
    if "class_path" in node and step not in ("class_path", "init_args", "dict_kwargs"):
        node = node.setdefault("init_args", {})
    node.setdefault(step, None)
    return node, step
