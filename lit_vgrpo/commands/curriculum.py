"""A curriculum: recipes that run one after the other, each from the final weights of the one before."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lit_vgrpo.config.recipe import RESUME, STAGES, Command, find_overlay, find_recipe, loaded
from lit_vgrpo.config.shorthand import expanded_override
from lit_vgrpo.errors import UserError, nearest, unknown_option
from lit_vgrpo.runs.folder import CONFIG_NAME
from lit_vgrpo.system.paths import shipped_root, write_whole

KEYS = (STAGES, "name", "run_dir", "overlays", "overrides")
START = "model.policy.start_from"
OF_A_STAGE = re.compile(r"stage(\d+)\.(.+)")
MEANT_FOR_A_STAGE = re.compile(r"stages?[._-]?(\d+)(?:[._-](.+))?")
OWN = {
    "name": "is that of the curriculum; its stages are numbered and named after their recipes",
    "run_dir": "is that of the curriculum, whose stages are folders in it",
    "ckpt_path": "is of one run alone. Use --resume",
}


@dataclass(frozen=True)
class Stage:
    """One run of a curriculum.

    Attributes:
        number: its position, from 1.
        recipe: its recipe's file.
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


@dataclass(frozen=True)
class Settings:
    """Overlays and ``(key, text)`` overrides, in the order they apply; ``stage2.key`` is for the second stage alone."""

    overlays: list[Path] = field(default_factory=list)
    overrides: list[tuple[str, str]] = field(default_factory=list)

    def words(self, stage: Stage) -> list[str]:
        """Return the arguments that follow a stage's recipe; those for it alone come last."""
        of_all = [f"{key}={text}" for key, text in self.overrides if not OF_A_STAGE.fullmatch(key)]
        own = [word.partition(".")[2] for word in self.of(stage)]
        return [*map(str, self.overlays), *of_all, *own]

    def of(self, stage: Stage) -> list[str]:
        """Return the overrides for one stage alone, as they were typed."""
        found = [(OF_A_STAGE.fullmatch(key), f"{key}={text}") for key, text in self.overrides]
        return [word for match, word in found if match and int(match[1]) == stage.number]

    def faults(self, count: int) -> list[str]:
        """Return what is wrong with the overrides of a curriculum of ``count`` stages, one line each."""
        found = []
        for key, _ in self.overrides:
            match = OF_A_STAGE.fullmatch(key)
            number, own_key = (int(match[1]), match[2]) if match else (None, key)
            if own_key == STAGES:
                found.append(f"{key} cannot be set: the stages are those of the file. Write a file of your own.")
            elif number is None and (meant := MEANT_FOR_A_STAGE.fullmatch(key)):
                found.append(
                    f"{key} is not an option. For stage {meant[1]} write stage{meant[1]}.{meant[2] or 'KEY'}=VALUE."
                )
            elif number is not None and not 1 <= number <= count:
                found.append(f"{key} is for stage {number}, but there are stages 1 to {count}. Correct the number.")
            elif own_key in OWN and (number is not None or own_key == "ckpt_path"):
                found.append(f"{key} cannot be set: {own_key} {OWN[own_key]}.")
            elif own_key == START and number != 1:
                found.append(f"{key} cannot be set: stages start from the one before. Only stage1.{START} is free.")
        return found


@dataclass(frozen=True)
class Curriculum:
    """A curriculum's file and the command line that runs it.

    Attributes:
        file: the curriculum's file.
        name: name of the run folder.
        run_dir: run folder to ask for.
        stages: in the order they run.
        saved: settings in the file.
        typed: settings on the command line, which apply after those in the file.
    """

    file: Path
    name: str
    run_dir: Path
    stages: list[Stage]
    saved: Settings
    typed: Settings

    @classmethod
    def of(cls, command: Command) -> Curriculum:
        """Read the file that a command names.

        Raises:
            UserError: names everything that is wrong with the file and the overrides.
        """
        content = loaded(command.recipe)
        typed = dict(command.overrides)
        faults = [unknown_option(str(key), "a curriculum", KEYS) for key in content if key not in KEYS]
        stages = [] if faults and STAGES not in content else _stages(content.get(STAGES), command.recipe, faults)
        saved = Settings(_overlays(content.get("overlays"), faults), _overrides(content.get("overrides"), faults))
        own = [(key, text) for key, text in command.overrides if key not in ("name", "run_dir")]
        settings = Settings(list(command.overlays), own)
        if stages:
            faults += [fault for part in (saved, settings) for fault in part.faults(len(stages))]
        if faults:
            raise UserError(*faults)
        name = str(typed.get("name") or content.get("name") or command.recipe.stem)
        run_dir = Path(typed.get("run_dir") or content.get("run_dir") or Path("runs") / name).expanduser()
        return cls(command.recipe, name, run_dir, stages, saved, settings)

    def check_words(self, stage: Stage) -> list[str]:
        """Return the arguments that check a stage before any has run: everything but its initial weights."""
        words = [*self.saved.words(stage), *self.typed.words(stage)]
        return [str(stage.recipe), *words, f"run_dir={self.run_dir / stage.folder}"]

    def run_words(self, stage: Stage, run: Path) -> list[str]:
        """Return the arguments of ``lightning run`` that start a stage or resume it.

        Args:
            run: the curriculum's run folder, absolute.
        """
        folder, start = run / stage.folder, []
        if stage.number > 1:
            start.append(f"{START}={run / self.stages[stage.number - 2].folder}")
        if (folder / CONFIG_NAME).is_file():  # which holds what the file says already
            return [str(folder / CONFIG_NAME), *self.typed.words(stage), *start, RESUME]
        words = [*self.saved.words(stage), *self.typed.words(stage), f"run_dir={folder}", *start]
        # A folder without a recipe was made by a start that failed; it is not to become a second one.
        return [str(stage.recipe), *words, *([RESUME] if folder.is_dir() else [])]

    def outcome(self, stage: Stage, run: Path) -> str | None:
        """Return how a stage's run ended according to its ``summary.json``; ``None`` where there is none."""
        try:
            summary = json.loads((run / stage.folder / "summary.json").read_text())
        except (OSError, ValueError):
            return None
        return summary.get("outcome") if isinstance(summary, dict) else None

    def is_done(self, stage: Stage, run: Path) -> bool:
        """Return ``True`` if a stage has run to its end."""
        return self.outcome(stage, run) == "finished"

    def write(self, run: Path) -> None:
        """Write ``config.yaml``: a curriculum that includes the typed settings."""
        overlays = [_written(path) for path in (*self.saved.overlays, *self.typed.overlays)]
        overrides = [f"{key}={text}" for key, text in (*self.saved.overrides, *self.typed.overrides)]
        content: dict[str, Any] = {STAGES: [_written(stage.recipe) for stage in self.stages], "name": self.name}
        content |= {"overlays": overlays} if overlays else {}
        content |= {"overrides": overrides} if overrides else {}
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_whole(run / CONFIG_NAME, f"# lightning run {run / CONFIG_NAME} {RESUME}\n{text}")


def is_curriculum(file: Path) -> bool:
    """Return ``True`` if a recipe file lists stages, also under a misspelt key."""
    try:
        keys = [str(key) for key in loaded(file)]
    except UserError:
        return False  # what reads it as a recipe says what is wrong
    return STAGES in keys or ("model" not in keys and any(nearest(STAGES, [key]) for key in keys))


def _stages(value: Any, file: Path, faults: list[str]) -> list[Stage]:
    if not isinstance(value, list) or not value:
        faults.append(f"{STAGES}={json.dumps(value)} of {file} names no recipe. Write {STAGES}: [first, second].")
        return []
    found = []
    for number, text in enumerate(value, start=1):
        try:
            if not isinstance(text, str):
                raise UserError(f"{text!r} is no recipe's name or path.")
            recipe = _find(file, text)
            if is_curriculum(recipe):
                raise UserError(f"{text} is a curriculum itself. List its stages instead.")
            found.append(Stage(number, recipe))
        except UserError as error:
            faults.append(f"Stage {number} of {file}: {error}")
    return found if len(found) == len(value) else []


def _find(file: Path, text: str) -> Path:
    """Return the recipe of that name in the curriculum's own folder, or else the shipped one."""
    beside = next((path for path in (file.parent / text, file.parent / f"{text}.yaml") if path.is_file()), None)
    try:
        return beside or find_recipe(text)
    except UserError:
        guess = nearest(Path(text).stem, [path.stem for path in file.parent.glob("*.yaml") if path.stem != file.stem])
        if guess is None:
            raise
        raise UserError(f"{text} is no recipe: no such file, and not a shipped name. Did you mean {guess}?") from None


def _overlays(value: Any, faults: list[str]) -> list[Path]:
    if value is None:
        return []
    if not isinstance(value, list):
        faults.append(f"overlays={json.dumps(value)} is not a list. Write overlays: [strategy/zero2].")
        return []
    found = []
    for text in value:
        try:
            found.append(find_overlay(str(text)))
        except UserError as error:
            faults.append(str(error))
    return found


def _overrides(value: Any, faults: list[str]) -> list[tuple[str, str]]:
    if value is None:
        return []
    words = value if isinstance(value, list) else [value]
    found = [str(word).partition("=") for word in words]
    wrong = [word for word, (key, equals, _) in zip(words, found, strict=True) if not key or not equals]
    faults += [f"overrides: {word!r} is not key=value. Write overrides: [trainer.devices=8]." for word in wrong]
    return [(key, expanded_override(key, text)) for key, _, text in found]


def _written(path: Path) -> str:
    """Return a name that finds a file from any folder: a shipped one's short name, else its absolute path."""
    path, root = path.absolute(), shipped_root().absolute()
    return str(path.relative_to(root).with_suffix("")) if root in path.parents else str(path)


def merged_faults(found: Sequence[tuple[Stage, Sequence[str]]]) -> list[str]:
    """Return each fault once, with the stages that have it.

    >>> one, two = Stage(1, Path("a.yaml")), Stage(2, Path("b.yaml"))
    >>> merged_faults([(one, ["x is wrong."]), (two, ["x is wrong.", "y is, too."])])
    ['Stages 1, 2: x is wrong.', 'Stage 2 (b): y is, too.']
    """
    stages: dict[str, list[Stage]] = {}
    for stage, faults in found:
        for fault in faults:
            stages.setdefault(fault, []).append(stage)
    return [f"{_named(having)}: {fault}" for fault, having in stages.items()]


def _named(stages: Sequence[Stage]) -> str:
    if len(stages) == 1:
        return f"Stage {stages[0].number} ({stages[0].name})"
    return f"Stages {', '.join(str(stage.number) for stage in stages)}"
