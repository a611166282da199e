"""A curriculum: recipes that run one after the other, each from the final weights of the previous one.

Each stage runs in a separate process, which frees its memory before the next.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lit_vgrpo.config.recipe import RESUME, STAGES, Command, as_found_from, find_recipe, is_override, loaded
from lit_vgrpo.errors import UserError, shell_line, unknown_option
from lit_vgrpo.system.paths import start_folder, write_atomically
from lit_vgrpo.system.process import is_first_process, report_on_first
from lit_vgrpo.system.signals import handle_stop_signals
from lit_vgrpo.training.folder import CONFIG_NAME, FolderLock, reserve
from lit_vgrpo.training.resume import read_summary, resumed_folder

LISTS = ("overlays", "overrides")
STARTED_IN = "started_in"
"""Key of a run's ``config.yaml``: the folder, relative to it, in which its stages run."""
KEYS = (STAGES, "run_dir", *LISTS, STARTED_IN)
START = "model.policy.start_from"
STAGE_PREFIX = re.compile(r"stage(\d+)\.([^=]+=.*)", re.DOTALL)
FIXED = (STAGES, "name", "run_dir", "ckpt_path", START)
"""Keys of a recipe that are set by its position in a curriculum."""
ALLOWS = "allow_changes=true"  # holds for one resumption
MISTAKE = 2
"""Exit status of a stage that refused its settings."""
POLL_S = 0.2
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True)
class Stage:
    """One run of a curriculum: its position, from 1, and its recipe's file."""

    number: int
    recipe: Path

    @property
    def name(self) -> str:
        return self.recipe.stem

    @property
    def folder(self) -> str:
        return f"{self.number}_{self.name}"

    def outcome(self, run: Path) -> str | None:
        """Return how its run ended, in a curriculum's run folder; ``None`` without a ``summary.json``."""
        return (read_summary(run / self.folder) or {}).get("outcome")

    def words(self, settings: Sequence[str]) -> list[str]:
        """Return the settings that apply to this stage; those only for this stage come last."""
        pairs = [_for_stage(word) for word in settings]
        return [word for stage in (None, self.number) for number, word in pairs if number == stage]


@dataclass(frozen=True)
class Curriculum:
    """A curriculum's file and the command line that runs it.

    Settings are overlays, then overrides as ``key=value``; ``stage2.key=value`` is only for the second stage.

    Attributes:
        run_dir: Requested run folder.
        start: Folder in which the stages run, and their relative paths and modules are found.
        saved: Settings in the file.
        typed: Settings on the command line, which apply after those in the file.
    """

    file: Path
    run_dir: Path
    start: Path
    stages: list[Stage]
    saved: list[str]
    typed: list[str]

    @classmethod
    def of(cls, command: Command) -> Curriculum:
        """Read the file that a command names; raise UserError with the errors in the file and the overrides."""
        file, content, given = command.recipe, loaded(command.recipe), dict(command.overrides)
        if unknown := [key for key in content if key not in KEYS]:
            raise UserError(*(unknown_option(str(key), "a curriculum", KEYS) for key in unknown))
        if not content[STAGES]:
            raise UserError(f"{file} lists no recipes. Write {STAGES}: [first, second].")
        stages = [Stage(number, find_recipe(_near(file, text))) for number, text in enumerate(content[STAGES], start=1)]
        overlays, overrides = (map(str, content.get(key) or []) for key in LISTS)
        saved = Command.parse([str(file), *(_near(file, word) for word in overlays), *overrides]).settings
        start = (file.parent / content[STARTED_IN]).resolve() if STARTED_IN in content else start_folder()
        start = start if start.is_dir() else start_folder()
        typed = [_seen_from(start, word) for word in command.settings if not word.startswith("run_dir=")]
        if errors := [error for word in (*saved, *typed) for error in _misplaced(word, len(stages))]:
            raise UserError(*errors)
        run_dir = Path(given.get("run_dir") or content.get("run_dir") or Path("runs") / file.stem).expanduser()
        return cls(file, run_dir, start, stages, saved, typed)

    def check_words(self, stage: Stage) -> list[str]:
        """Return the arguments that check a stage before any has run: everything except its initial weights."""
        settings = [*stage.words(self.saved), *stage.words(self.typed)]
        return [str(stage.recipe), *settings, f"run_dir={self.run_dir / stage.folder}"]

    def run_words(self, stage: Stage, run: Path) -> list[str]:
        """Return the arguments of ``lightning run`` that start or resume a stage; ``run`` is the run folder."""
        folder, typed = run / stage.folder, stage.words(self.typed)
        start = [f"{START}={run / self.stages[stage.number - 2].folder}"] if stage.number > 1 else []
        if (folder / CONFIG_NAME).is_file():  # it already includes the file's settings
            return [str(folder / CONFIG_NAME), *typed, *start, RESUME]
        # A folder without a recipe is left by a failed start; without --resume the run would get another folder.
        resume = [RESUME] if folder.is_dir() else []
        return [str(stage.recipe), *stage.words(self.saved), *typed, f"run_dir={folder}", *start, *resume]

    def is_repeated(self) -> bool:
        """Return True if the typed settings are the last in the file: the command that wrote it is typed again."""
        words = [word for word in self.typed if word != ALLOWS]
        return all(
            typed == saved[len(saved) - len(typed) :]
            for typed, saved in zip(_by_kind(words), _by_kind(self.saved), strict=True)
        )

    def last_started(self, run: Path) -> int:
        """Return the number of the last stage of a run that has a folder, 0 if none has."""
        return max((stage.number for stage in self.stages if (run / stage.folder).is_dir()), default=0)

    def lost_words(self, run: Path) -> list[str]:
        """Return an error for each typed setting that no stage of a run would use."""
        done = [stage.number for stage in self.stages if stage.outcome(run) == "finished"]
        last, errors = self.last_started(run), []
        for word in [] if self.is_repeated() else self.typed:
            number, setting = _for_stage(word)
            if number in done and number != last:
                errors.append(
                    f"{word} has no effect: stage {number} is finished, and stage {number + 1} started from it."
                )
            elif number is None and setting != ALLOWS and len(done) == len(self.stages):
                errors.append(f"{word} has no effect: all stages are finished. For the last one: stage{last}.{setting}")
        return errors

    def write(self, run: Path, typed: Sequence[str]) -> None:
        """Write ``config.yaml``: a curriculum that includes typed settings."""
        settings = [*self.saved, *(word for word in typed if _for_stage(word)[1] != ALLOWS)]
        overlays, overrides = _by_kind(settings)
        content: dict[str, Any] = {STAGES: [str(stage.recipe.absolute()) for stage in self.stages]}
        content |= {"overlays": [str(Path(word).absolute()) for word in overlays], "overrides": overrides}
        content[STARTED_IN] = os.path.relpath(self.start, run.resolve())
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_atomically(run / CONFIG_NAME, f"# {shell_line('lightning', 'run', run / CONFIG_NAME, RESUME)}\n{text}")


def _near(file: Path, text: Any) -> str:
    """Return the path of the recipe or overlay of that name in the curriculum's folder, or else the name itself."""
    near = [path for path in (file.parent / str(text), file.parent / f"{text}.yaml") if path.is_file()]
    return str(near[0] if near else text)


def _seen_from(start: Path, word: str) -> str:
    """Return the setting that names from another folder the files that it names from this one."""
    setting = _for_stage(word)[1]
    return word.removesuffix(setting) + as_found_from(start, setting)


def _by_kind(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overlays and the overrides of some settings."""
    return [word for word in settings if not is_override(word)], [word for word in settings if is_override(word)]


def _for_stage(word: str) -> tuple[int | None, str]:
    """Return the stage that a setting is for, ``None`` for all of them, and the setting without that prefix."""
    match = STAGE_PREFIX.fullmatch(word)
    return (int(match[1]), match[2]) if match else (None, word)


def _misplaced(word: str, count: int) -> list[str]:
    """Return the error of a setting in a curriculum of ``count`` stages, if it has one."""
    number, setting = _for_stage(word)
    key = setting.partition("=")[0]
    if number is not None and not 1 <= number <= count:
        return [f"stage{number}.{key} is for stage {number}, but there are stages 1 to {count}. Correct the number."]
    if is_override(word) and key in FIXED and not (key == START and number == 1):
        return [f"{key} cannot be set: the curriculum decides it."]
    return []


# --- running it -------------------------------------------------------------------------------------------------------


def run_process(words: Sequence[str], env: dict[str, str] | None = None, folder: Path | None = None) -> int:
    """Run ``lightning WORDS`` in a process, forwarding stop signals, and return its status; 128 + N after signal N.

    Args:
        folder: Folder to run it in; ``None`` is the current one.
    """
    caught: list[int] = []
    command, sent = [sys.executable, "-m", "lit_vgrpo", *words], 0
    with handle_stop_signals(lambda signum, frame: caught.append(signum)):
        # A separate group: Ctrl-C in the terminal reaches only this process, so that the stage gets each one once.
        process = subprocess.Popen(command, env=env, cwd=folder, start_new_session=True)
        while (status := process.poll()) is None:
            for signum in caught[sent:]:
                process.send_signal(signum)
                sent += 1
            time.sleep(POLL_S)
    if status < 0:
        return 128 - status
    return 128 + caught[0] if caught and status == 0 else status


def run_curriculum(command: Command) -> int:
    """Run the stages that are not finished yet; return 0, or the status of the stage that did not finish."""
    continues = False
    if command.resume:
        run = resumed_run(command)
        if continues := (run / CONFIG_NAME).is_file():
            command = command.in_folder(run.absolute())
    curriculum, lock = Curriculum.of(command), FolderLock()
    typed, is_repeated = curriculum.typed, curriculum.is_repeated()
    if continues and (errors := curriculum.lost_words(run)):
        raise UserError(*errors)
    if continues and is_repeated and any(word.partition("=")[0].endswith("+") for word in typed):
        # The file includes them, and would append them once more.
        curriculum = replace(curriculum, typed=[word for word in typed if word == ALLOWS])
    if curriculum.typed or not continues:  # else it was checked when it was started
        # In a separate process: the modules it imports would otherwise stay in memory during all stages.
        words = [str(curriculum.file.absolute()), *curriculum.typed, f"run_dir={curriculum.run_dir}"]
        if status := run_process(["check", *words], folder=curriculum.start):
            return status
    try:
        if not continues:
            run = new_run(curriculum, lock, command.resume)
        if is_first_process():
            lock.take(run)
            if continues and not is_repeated:
                curriculum.write(run, curriculum.typed)
        return _run_stages(curriculum, run.absolute(), continues)
    finally:
        lock.release()


def _run_stages(curriculum: Curriculum, run: Path, is_resumed: bool) -> int:
    extended = {number for number, _ in map(_for_stage, curriculum.typed)} & {curriculum.last_started(run)}
    has_run = False
    for stage in curriculum.stages:
        what = f"Stage {stage.number} of {len(curriculum.stages)} ({stage.name})"
        if stage.outcome(run) == "finished" and stage.number not in extended:
            report_on_first(f"{what} is finished.")
            continue
        report_on_first(f"{what}: {run / stage.folder}")
        status = run_process(["run", *curriculum.run_words(stage, run)], stage_environment(stage), curriculum.start)
        if status or stage.outcome(run) != "finished":
            # A run that stopped early, or collapsed, ends with status 0.
            ended = f"status {status}" if status else stage.outcome(run) or "no summary.json"
            refused = curriculum.typed if is_resumed and status == MISTAKE and not has_run else []
            if refused and is_first_process():
                curriculum.write(run, [])
            again = shell_line("lightning", "run", run, RESUME, *refused)
            report_on_first(f"{what} did not finish ({ended}). Continue: {again}")
            return status or 1
        has_run = True
    report_on_first(f"All stages are finished. The result is {run / curriculum.stages[-1].folder}.")
    return 0


def new_run(curriculum: Curriculum, lock: FolderLock, resumes: bool = False) -> Path:
    """Return the folder of a new run, created by the first process; raise UserError if several find it taken.

    Args:
        lock: Locks the folder.
        resumes: Take the folder that was asked for, in which the next start continues.
    """
    if not is_first_process():
        return curriculum.run_dir
    processes = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)
    if processes > 1 and not resumes and curriculum.run_dir.exists():
        raise UserError(f"{curriculum.run_dir} exists. Set run_dir=/another/folder, or add {RESUME} to continue it.")
    run, _ = reserve(curriculum.run_dir, lock, resumes)
    curriculum.write(run, curriculum.typed)
    return run


def resumed_run(command: Command) -> Path:
    """Return the run folder to resume, typed, in the file or of the curriculum's name.

    As for other runs, a named folder may be new; UserError is raised for another that is not a run's.
    """
    typed = dict(command.overrides).get("run_dir")
    is_run = typed is not None or command.recipe.name == CONFIG_NAME
    run = resumed_folder(command.recipe, typed) if is_run else Curriculum.of(command).run_dir
    if not (is_run or "run_dir" in loaded(command.recipe) or (run / CONFIG_NAME).is_file()):
        raise UserError(f"{run} is not a curriculum run. Leave out {RESUME} to start it, or set run_dir=RUN_DIR.")
    return run


def stage_environment(stage: Stage) -> dict[str, str]:
    """Return the environment of a stage's process, without torchrun's store, which would outlive the stage."""
    env = dict(os.environ)
    if env.get(AGENT_STORE) == "True":
        port = int(env["MASTER_PORT"]) + stage.number
        env |= {AGENT_STORE: "False", "MASTER_PORT": str(port if port < 2**16 else port - 2**15)}
    return env
