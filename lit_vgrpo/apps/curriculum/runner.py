"""``lightning run CURRICULUM``: each stage runs in a separate process, which frees its memory before the next."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lit_vgrpo.apps.curriculum.curriculum import Curriculum, Stage
from lit_vgrpo.config.recipe import RESUME, Command
from lit_vgrpo.errors import UserError
from lit_vgrpo.system.process import is_first_process, report_on_first
from lit_vgrpo.system.signals import handle_stop_signals
from lit_vgrpo.training.folder import CONFIG_NAME, FolderLock, reserve
from lit_vgrpo.training.resume import resumed_folder

POLL_S = 0.2
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def run_process(words: Sequence[str], env: dict[str, str] | None = None) -> int:
    """Run ``lightning WORDS`` in a process to its end, forwarding stop signals to it.

    Returns:
        Its exit status, as a shell reports it: 128 + N after signal N.
    """
    caught: list[int] = []
    command, sent = [sys.executable, "-m", "lit_vgrpo", *words], 0
    with handle_stop_signals(lambda signum, frame: caught.append(signum)):
        # A separate group: Ctrl-C in the terminal reaches this process alone, so that the stage gets each one once.
        process = subprocess.Popen(command, env=env, start_new_session=True)
        while (status := process.poll()) is None:
            for signum in caught[sent:]:
                process.send_signal(signum)
                sent += 1
            time.sleep(POLL_S)
    if status < 0:
        return 128 - status
    return 128 + caught[0] if caught and status == 0 else status


def run_curriculum(command: Command) -> int:
    """Run the stages that are not finished yet.

    Returns:
        0, or the status of the stage that did not finish.

    Raises:
        UserError: The curriculum is wrong, or there is nothing to resume.
    """
    if command.resume:
        run = resumed_run(command)
        command = command.in_folder(run)
    curriculum, lock = Curriculum.of(command), FolderLock()
    if curriculum.typed or not command.resume:  # else it was checked when it was started
        # In a separate process: the modules it imports would otherwise stay in memory during all stages.
        words = [str(curriculum.file), *curriculum.typed, f"run_dir={curriculum.run_dir}"]
        if status := run_process(["check", *words]):
            return status
    if not command.resume:
        run = new_run(curriculum)
    try:
        if is_first_process():
            lock.take(run)
        return _run_stages(curriculum, run.absolute())
    finally:
        lock.release()


def _run_stages(curriculum: Curriculum, run: Path) -> int:
    for stage in curriculum.stages:
        what = f"Stage {stage.number} of {len(curriculum.stages)} ({stage.name})"
        if stage.outcome(run) == "finished":
            report_on_first(f"{what} is finished.")
            continue
        report_on_first(f"{what}: {run / stage.folder}")
        status = run_process(["run", *curriculum.run_words(stage, run)], stage_environment(stage))
        if status or stage.outcome(run) != "finished":
            # A run that stopped early, or collapsed, ends with status 0.
            ended = f"status {status}" if status else stage.outcome(run) or "no summary.json"
            report_on_first(f"{what} did not finish ({ended}). Continue: lightning run {run} {RESUME}")
            return status or 1
    report_on_first(f"All stages are finished. The result is {run / curriculum.stages[-1].folder}.")
    return 0


def new_run(curriculum: Curriculum) -> Path:
    """Return the run folder of a new curriculum, which the first process creates with its ``config.yaml``.

    Raises:
        UserError: It cannot be created, or it exists and several processes would have to agree on another name.
    """
    processes = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)
    if not is_first_process():
        return curriculum.run_dir
    if processes > 1 and curriculum.run_dir.exists():
        raise UserError(f"{curriculum.run_dir} exists. Set run_dir=/another/folder, or add {RESUME} to continue it.")
    run = reserve(curriculum.run_dir)
    curriculum.write(run)
    return run


def resumed_run(command: Command) -> Path:
    """Return the run folder to resume: the one that was typed, or that of the curriculum's name.

    Raises:
        UserError: There is none.
    """
    typed = dict(command.overrides).get("run_dir")
    is_run = typed is not None or command.recipe.name == CONFIG_NAME
    run = resumed_folder(command.recipe, typed) if is_run else Curriculum.of(command).run_dir
    if not (run / CONFIG_NAME).is_file():
        raise UserError(f"{run} is not a run of a curriculum. Leave out {RESUME} to start it, or set run_dir=RUN_DIR.")
    return run


def stage_environment(stage: Stage) -> dict[str, str]:
    """Return the environment of a stage's process: ours, but without torchrun's store.

    The store outlives a stage, and the next stage's processes would read what the last one's wrote.
    """
    env = dict(os.environ)
    if env.get(AGENT_STORE) == "True":
        port = int(env["MASTER_PORT"]) + stage.number
        env |= {AGENT_STORE: "False", "MASTER_PORT": str(port if port < 2**16 else port - 2**15)}
    return env
