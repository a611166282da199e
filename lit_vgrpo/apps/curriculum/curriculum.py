"""A curriculum: recipes that run one after the other, each from the final weights of the one before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_vgrpo.config.recipe import RESUME, STAGES, Command, find_recipe, is_override, loaded
from lit_vgrpo.errors import UserError, nearest, unknown_option
from lit_vgrpo.system.paths import shipped_root, write_atomically
from lit_vgrpo.training.folder import CONFIG_NAME
from lit_vgrpo.training.resume import read_summary

EXAMPLES = {"overlays": "[strategy/zero2]", "overrides": "[trainer.devices=8]"}
KEYS = (STAGES, "name", "run_dir", *EXAMPLES)
START = "model.policy.start_from"
OF_A_STAGE = re.compile(r"stage(\d+)\.([^=]+=.*)", re.DOTALL)
MEANT_FOR_A_STAGE = re.compile(r"stages?[._-]?(\d+)(?:[._-](.+))?")
FIXED = {
    STAGES: "the stages are those of the file. Write a file of your own.",
    "name": "name is that of the curriculum; its stages are numbered and named after their recipes.",
    "run_dir": "run_dir is that of the curriculum, whose stages are folders in it.",
    "ckpt_path": "ckpt_path is of one run alone. Use --resume.",
    START: f"stages start from the one before. Only stage1.{START} is free.",
}
"""Keys of a recipe that its place in a curriculum decides."""


@dataclass(frozen=True)
class Stage:
    """One run of a curriculum.

    Attributes:
        number: Its position, from 1.
        recipe: Its recipe's file.
    """

    number: int
    recipe: Path

    @property
    def name(self) -> str:
        return self.recipe.stem

    @property
    def folder(self) -> str:
        """Name of its run folder."""
        return f"{self.number}_{self.name}"

    def outcome(self, run: Path) -> str | None:
        """Return how its run ended, in a curriculum's run folder; ``None`` without a ``summary.json``."""
        return (read_summary(run / self.folder) or {}).get("outcome")

    def is_done(self, run: Path) -> bool:
        """Return ``True`` if it has run to its end."""
        return self.outcome(run) == "finished"

    def own(self, settings: Iterable[str]) -> list[str]:
        """Return the overrides for this stage alone, as they were typed."""
        return [word for word in settings if _for_stage(word)[0] == self.number]

    def words(self, settings: Sequence[str]) -> list[str]:
        """Return the settings that apply to this stage; those for it alone come last."""
        shared = [word for word in settings if _for_stage(word)[0] is None]
        return [*shared, *(_for_stage(word)[1] for word in self.own(settings))]


@dataclass(frozen=True)
class Curriculum:
    """A curriculum's file and the command line that runs it.

    Settings are overlays, then overrides as ``key=value``; ``stage2.key=value`` is for the second stage alone.

    Attributes:
        file: The curriculum's file.
        name: Name of the run folder.
        run_dir: Run folder to ask for.
        stages: In the order they run.
        saved: Settings in the file.
        typed: Settings on the command line, which apply after those in the file.
    """

    file: Path
    name: str
    run_dir: Path
    stages: list[Stage]
    saved: list[str]
    typed: list[str]

    @classmethod
    def of(cls, command: Command) -> Curriculum:
        """Read the file that a command names; raise UserError with every error in the file and the overrides."""
        file, content, given = command.recipe, loaded(command.recipe), dict(command.overrides)
        errors = [unknown_option(str(key), "a curriculum", KEYS) for key in content if key not in KEYS]
        stages = [] if errors and STAGES not in content else _stages(content.get(STAGES), file, errors)
        saved = _saved(content, file, errors)
        typed = [word for word in _settings(command) if not word.startswith(("name=", "run_dir="))]
        if stages:
            errors += [error for word in (*saved, *typed) for error in _misplaced(word, len(stages))]
        if errors:
            raise UserError(*errors)
        name = str(given.get("name") or content.get("name") or file.stem)
        run_dir = Path(given.get("run_dir") or content.get("run_dir") or Path("runs") / name).expanduser()
        return cls(file, name, run_dir, stages, saved, typed)

    def check_words(self, stage: Stage) -> list[str]:
        """Return the arguments that check a stage before any has run: everything but its initial weights."""
        settings = [*stage.words(self.saved), *stage.words(self.typed)]
        return [str(stage.recipe), *settings, f"run_dir={self.run_dir / stage.folder}"]

    def run_words(self, stage: Stage, run: Path) -> list[str]:
        """Return the arguments of ``lightning run`` that start a stage or resume it.

        Args:
            stage: One of the stages.
            run: The curriculum's run folder, absolute.
        """
        folder, typed = run / stage.folder, stage.words(self.typed)
        start = [f"{START}={run / self.stages[stage.number - 2].folder}"] if stage.number > 1 else []
        if (folder / CONFIG_NAME).is_file():  # which holds what the file says already
            return [str(folder / CONFIG_NAME), *typed, *start, RESUME]
        # A folder without a recipe was made by a start that failed; it is not to become a second one.
        resume = [RESUME] if folder.is_dir() else []
        return [str(stage.recipe), *stage.words(self.saved), *typed, f"run_dir={folder}", *start, *resume]

    def write(self, run: Path) -> None:
        """Write ``config.yaml``: a curriculum that includes the typed settings."""
        settings = [*self.saved, *self.typed]
        content = {
            STAGES: [_written(stage.recipe) for stage in self.stages],
            "name": self.name,
            "overlays": [_written(Path(word)) for word in settings if not is_override(word)],
            "overrides": [word for word in settings if is_override(word)],
        }
        content = {key: value for key, value in content.items() if value}
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_atomically(run / CONFIG_NAME, f"# lightning run {run / CONFIG_NAME} {RESUME}\n{text}")


def is_curriculum(file: Path) -> bool:
    """Return ``True`` if a recipe file lists stages, also under a misspelt key."""
    try:
        keys = [str(key) for key in loaded(file)]
    except UserError:
        return False  # what reads it as a recipe says what is wrong
    return STAGES in keys or ("model" not in keys and any(nearest(STAGES, [key]) for key in keys))


def _stages(value: Any, file: Path, errors: list[str]) -> list[Stage]:
    if not isinstance(value, list) or not value:
        errors.append(f"{STAGES}={json.dumps(value)} of {file} lists no recipes. Write {STAGES}: [first, second].")
        return []
    found = []
    for number, text in enumerate(value, start=1):
        try:
            found.append(Stage(number, _stage_recipe(file, text)))
        except UserError as error:
            errors.append(f"Stage {number} of {file}: {error}")
    return found if len(found) == len(value) else []


def _stage_recipe(file: Path, text: Any) -> Path:
    """Return the recipe of that name in the curriculum's own folder, or else the shipped one."""
    if not isinstance(text, str):
        raise UserError(f"{text!r} is not a recipe's name or path.")
    recipe = next((path for path in (file.parent / text, file.parent / f"{text}.yaml") if path.is_file()), None)
    try:
        recipe = recipe or find_recipe(text)
    except UserError:
        beside = (path.stem for path in file.parent.glob("*.yaml") if path.stem != file.stem)
        if (guess := nearest(Path(text).stem, beside)) is None:
            raise
        raise UserError(
            f"{text} is not a recipe: no such file, and not a shipped name. Did you mean {guess}?"
        ) from None
    if is_curriculum(recipe):
        raise UserError(f"{text} is a curriculum itself. List its stages instead.")
    return recipe


def _saved(content: dict[Any, Any], file: Path, errors: list[str]) -> list[str]:
    """Return the settings in a curriculum's file."""
    words: list[str] = []
    for key, example in EXAMPLES.items():
        value = content.get(key) or []
        if not isinstance(value, list):
            errors.append(f"{key}={json.dumps(value)} is not a list. Write {key}: {example}.")
        else:
            words += map(str, value)
    try:
        return _settings(Command.parse([str(file), *words]))
    except UserError as error:
        errors += error.errors
        return []


def _settings(command: Command) -> list[str]:
    return [*map(str, command.overlays), *(f"{key}={text}" for key, text in command.overrides)]


def _for_stage(word: str) -> tuple[int | None, str]:
    """Return the stage that a setting is for, ``None`` for all of them, and the setting without that prefix."""
    match = OF_A_STAGE.fullmatch(word)
    return (int(match[1]), match[2]) if match else (None, word)


def _misplaced(word: str, count: int) -> list[str]:
    """Return what is wrong with a setting in a curriculum of ``count`` stages."""
    number, own = _for_stage(word)
    key, own_key = word.partition("=")[0], own.partition("=")[0]
    if not is_override(word) or (own_key == START and number == 1):
        return []
    if number is not None and not 1 <= number <= count:
        return [f"{key} is for stage {number}, but there are stages 1 to {count}. Correct the number."]
    if own_key in FIXED:
        return [f"{key} cannot be set: {FIXED[own_key]}"]
    if number is None and (meant := MEANT_FOR_A_STAGE.fullmatch(key)):
        return [f"{key} is not an option. For stage {meant[1]} write stage{meant[1]}.{meant[2] or 'KEY'}=VALUE."]
    return []


def _written(path: Path) -> str:
    """Return a name that finds a file from any folder: a shipped one's short name, else its absolute path."""
    path, root = path.absolute(), shipped_root().absolute()
    return str(path.relative_to(root).with_suffix("")) if root in path.parents else str(path)


def merged_errors(found: Sequence[tuple[Stage, Sequence[str]]]) -> list[str]:
    """Return each error once, with the stages that have it.

    >>> one, two = Stage(1, Path("a.yaml")), Stage(2, Path("b.yaml"))
    >>> merged_errors([(one, ["x is wrong."]), (two, ["x is wrong.", "y is, too."])])
    ['Stages 1, 2: x is wrong.', 'Stage 2 (b): y is, too.']
    """
    stages: dict[str, list[Stage]] = {}
    for stage, errors in found:
        for error in errors:
            stages.setdefault(error, []).append(stage)
    return [f"{_named(having)}: {error}" for error, having in stages.items()]


def _named(stages: Sequence[Stage]) -> str:
    if len(stages) == 1:
        return f"Stage {stages[0].number} ({stages[0].name})"
    return f"Stages {', '.join(str(stage.number) for stage in stages)}"
