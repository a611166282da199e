"""Processes that tests start: the command, and scripts run as ranks."""

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

LIBRARIES = ["lightning.pytorch", "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3"]
LIBRARIES += ["peft", "deepspeed"]
"""Imported once for all test ranks, since importing takes longer than most of their work."""
LIBC = ctypes.CDLL(None)


def run_command(*words, timeout_s=300, **options):
    """Run ``python -m lit_vgrpo WORDS`` to its end and return it with its output as text."""
    command = [sys.executable, "-m", "lit_vgrpo", *map(str, words)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": end_with_parent, **options}
    return subprocess.run(command, text=True, timeout=timeout_s, check=False, **options)


@contextlib.contextmanager
def started(*words, **options):
    """Start ``python -m lit_vgrpo WORDS`` with its output as text; it is killed at the end of the context."""
    command = [sys.executable, "-m", "lit_vgrpo", *map(str, words)]
    options = {"stdout": subprocess.PIPE, "preexec_fn": end_with_parent, **options}
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def draw_with_diffusers(jobs, folder):
    """Run the jobs of ``plain_diffusers.py`` in one process without this package."""
    Path(folder, "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("plain_diffusers.py")
    run_ranks(script, Path(folder, "jobs.json"), world=1, logs=folder)


def end_with_parent():
    """For ``preexec_fn``: kill this process once the thread that started it has ended, such as after a time limit."""
    if sys.platform == "linux":
        LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def small_strategy(name):
    """A strategy by its name; ZeRO-3 gives up gathered weights at once.

    By default it keeps what is used again within 1e9 weights, and looking for that takes most of a small run.
    """
    from lit_vgrpo.training.strategies import ZeRO

    if name is None or not name.startswith("zero3"):
        return name
    return ZeRO(3, offload=name.endswith("offload"), zero_options={"stage3_max_reuse_distance": 0})


def run_ranks(script, *args, world, logs, timeout_s=400):
    """Run a script on ``world`` ranks with torchrun's environment; when one fails or hangs, all are ended.

    On Linux they are forked from a server that has imported LIBRARIES once. What a rank prints, and its stack if it
    hangs, is in ``logs/SCRIPT.RANK.log``.

    Raises:
        ProcessRaisedException: a rank raised an error, with its traceback.
        AssertionError: a rank ended in another way, with the end of its log.
    """
    from helpers import free_port
    from torch.multiprocessing import ProcessExitedException, start_processes

    multiprocessing.set_forkserver_preload(LIBRARIES)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "tests"}
    variables |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    args = (variables, str(logs), timeout_s, str(script), *map(str, args))
    method = "forkserver" if sys.platform == "linux" else "spawn"
    ranks = start_processes(_run_rank, args, world, join=False, start_method=method)
    try:
        while not ranks.join():
            pass
    except ProcessExitedException as error:
        log = _log(logs, script, error.error_index).read_text()
        raise AssertionError(f"{error}\n{log[-4000:]}") from error
    finally:
        for process in ranks.processes:
            process.kill()


def _run_rank(rank, variables, logs, timeout_s, script, *args):
    end_with_parent()
    with open(_log(logs, script, rank), "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=2)
    os.environ.pop("PL_GLOBAL_SEED", None)  # of the test in which the server of forks was started
    os.environ |= {name: str(value) for name, value in {**variables, "RANK": rank, "LOCAL_RANK": rank}.items()}
    os.chdir(logs)
    sys.argv = [script, *args]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def _log(logs, script, rank):
    return Path(logs, f"{Path(script).stem}.{rank}.log")
