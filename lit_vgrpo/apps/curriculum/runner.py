"""``lightning run CURRICULUM``: each stage runs in its own process, which frees its memory before the next."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from pathlib import Path
from types import FrameType

from lit_vgrpo.apps.curriculum.curriculum import START, Curriculum, Stage
from lit_vgrpo.config.recipe import RESUME, Command
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.system.process import is_first_process
from lit_vgrpo.system.signals import handle_stop_signals, how_it_ended
from lit_vgrpo.training.folder import CONFIG_NAME, FolderLock, candidates, release, reserve

FINISHED, FAILED = 0, 1
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


class Child:
    """Runs one process at a time to its end, forwarding stop signals to it.

    Attributes:
        stopped_by: First stop signal received.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[int] = []

    def listening(self) -> AbstractContextManager[None]:
        """Forward signals inside the block."""
        return handle_stop_signals(self._pass_on)

    def run(self, words: Sequence[str], env: dict[str, str] | None = None, quiet: bool = False) -> int:
        """Run ``lightning WORDS`` to its end.

        Args:
            env: Environment of the process; ``None`` inherits ours.
            quiet: Discard its stdout.

        Returns:
            Its exit status, as a shell reports it: 128 + N where signal N ended it.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lit_vgrpo", *words],
            env=env,
            stdout=subprocess.DEVNULL if quiet else None,
            # A group of its own: Ctrl-C in the terminal reaches us alone, so that it gets each one once.
            start_new_session=True,
        )
        while self._waiting:
            self._process.send_signal(self._waiting.pop(0))
        status = self._process.wait()
        self._process = None
        return status if status >= 0 else 128 - status

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self.stopped_by = self.stopped_by or signum
        if self._process is None:
            self._waiting.append(signum)  # it may be being started just now
        else:
            self._process.send_signal(signum)


def run_curriculum(command: Command) -> int:
    """Run the stages that are not finished yet.

    Returns:
        0, or the status of the stage that did not finish.

    Raises:
        UserError: the curriculum is wrong, or there is nothing to resume.
    """
    if command.resume:
        run = resumed_run(command)
        command = command.in_folder(run)
    curriculum, child, lock = Curriculum.of(command), Child(), FolderLock()
    with child.listening():
        if curriculum.typed or not command.resume:  # else it was checked when it was started
            _say(f"Checking all {len(curriculum.stages)} stages.")
            # In a process of its own: what it imports would otherwise stay in memory during all stages.
            words = [str(curriculum.file), *curriculum.typed, f"run_dir={curriculum.run_dir}"]
            status = child.run(["check", *words], quiet=True)
            if status != FINISHED:
                return status
        if not command.resume:
            run = new_run(curriculum)
        try:
            if is_first_process():
                lock.take(run)
                if not command.resume:
                    curriculum.write(run)
            return _run_stages(curriculum, run.absolute(), child)
        finally:
            lock.release()


def _run_stages(curriculum: Curriculum, run: Path, child: Child) -> int:
    count = len(curriculum.stages)
    for stage in curriculum.stages:
        what = f"Stage {stage.number} of {count} ({stage.name})"
        if stage.is_done(run):
            kept = stage.own(curriculum.typed)
            _say(f"{what} is finished" + (f", and {', '.join(kept)} has no effect." if kept else "."))
            continue
        if child.stopped_by is not None:
            _say(f"Stopped before stage {stage.number} of {count}. {_how_to_continue(run)}", error=True)
            return 128 + child.stopped_by
        _say(f"{what}: {run / stage.folder}")
        status = child.run(["run", *curriculum.run_words(stage, run)], stage_environment(stage))
        if status != FINISHED:
            ended = how_it_ended(128 - status if status > 128 else status)
            why = ", which the system sends when memory runs out" if "SIGKILL" in ended else ""
            _say(f"{what} {ended}{why}. {_how_to_continue(run)}", error=True)
            return status
        if not stage.is_done(run):
            _say(
                f"{what} ended early ({stage.outcome(run) or 'no summary.json'}), so the next was not started. "
                f"{_how_to_continue(run)} To continue from it anyway, run the remaining stages as a curriculum of "
                f"their own with stage1.{START}={run / stage.folder}.",
                error=True,
            )
            return FAILED
    _say(f"All {count} stages are finished. The result is {run / curriculum.stages[-1].folder}.")
    return FINISHED


def new_run(curriculum: Curriculum) -> Path:
    """Return the run folder of a new curriculum, which the first process creates.

    Raises:
        UserError: It cannot be created, or it exists and several processes would have to agree on another name.
    """
    if not is_first_process():
        return curriculum.run_dir
    run = reserve(curriculum.run_dir)
    if run != curriculum.run_dir and _processes() > 1:
        release(run)
        raise UserError(
            f"{curriculum.run_dir} exists, and the {_processes()} processes of this start cannot agree on another "
            f"name. Set run_dir=/another/folder, or add {RESUME} to continue it."
        )
    return run


def resumed_run(command: Command) -> Path:
    """Return the run folder to resume: the one that was typed, or the only one of the curriculum's name.

    Raises:
        UserError: there is none, or more than one.
    """
    typed = dict(command.overrides).get("run_dir")
    if typed is not None:
        found = [Path(typed).expanduser()]
    elif command.recipe.name == CONFIG_NAME:
        found = [command.recipe.parent]
    else:
        found = list(takewhile(Path.is_dir, candidates(Curriculum.of(command).run_dir)))
    if not found:
        raise UserError(f"{RESUME}: {command.recipe.stem} has not been started. Leave out {RESUME} to start it.")
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise UserError(f"{RESUME} is ambiguous: {names}. Choose one: lightning run {found[-1]} {RESUME}")
    if not (found[0] / CONFIG_NAME).is_file():
        raise UserError(f"{found[0]} has no {CONFIG_NAME}, so it is not a run of a curriculum. Set run_dir=RUN_DIR.")
    return found[0]


def stage_environment(stage: Stage) -> dict[str, str]:
    """Return the environment of a stage's process: ours, but without torchrun's store.

    The store outlives a stage, and the next stage's processes would read what the last one's wrote.
    """
    env = dict(os.environ)
    if env.get(AGENT_STORE) == "True":
        port = int(env["MASTER_PORT"]) + stage.number
        env |= {AGENT_STORE: "False", "MASTER_PORT": str(port if port < 2**16 else port - 2**15)}
    return env


def _processes() -> int:
    """Return the number of processes that were started together."""
    counts = [os.environ.get(key, "") for key in ("WORLD_SIZE", "SLURM_NTASKS")]
    return max([1, *(int(count) for count in counts if count.isdecimal())])


def _how_to_continue(run: Path) -> str:
    return f"Continue: lightning run {run} {RESUME}"


def _say(line: str, error: bool = False) -> None:
    if is_first_process():
        say(line, error=error)
