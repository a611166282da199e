"""Processes that tests start: the command, and scripts run as ranks."""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


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
    command = [sys.executable, Path(__file__).with_name("plain_diffusers.py"), Path(folder, "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, preexec_fn=end_with_parent)
    assert done.returncode == 0, done.stderr[-3000:]


def end_with_parent():
    """For ``preexec_fn``: kill this process once the tests that started it are gone, such as after their time limit."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def small_strategy(name):
    """A strategy by its name; ZeRO-3 gives up gathered weights at once.

    By default it keeps what is used again within 1e9 weights, and looking for that takes most of a small run.
    """
    from lit_vgrpo.training.strategies import ZeRO

    if name is None or not name.startswith("zero3"):
        return name
    return ZeRO(3, offload=name.endswith("offload"), zero_options={"stage3_max_reuse_distance": 0})


def run_ranks(script, *args, world=1, logs, env=None, timeout_s=400):
    """Run a script on ``world`` ranks with torchrun's environment, or alone; when one fails or hangs all are ended.

    What hangs writes its stack to its log first.

    Raises:
        AssertionError: a rank failed, with the end of what it printed to ``logs/SCRIPT.RANK.log``.
    """
    from helpers import free_port

    env, places = dict(env or {}), [{}]
    if world > 1:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "tests"}
        shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
        places = [{"RANK": rank, "LOCAL_RANK": rank, **shared} for rank in range(world)]
    command, ranks = [sys.executable, "-X", "faulthandler", *map(str, (script, *args))], {}
    end = time.monotonic() + timeout_s
    try:
        for rank, place in enumerate(places):
            log = Path(logs, f"{Path(script).stem}.{rank}.log")
            variables = {**os.environ, **env, **{key: str(value) for key, value in place.items()}}
            with open(log, "wb") as file:
                options = {"stdout": file, "stderr": subprocess.STDOUT, "preexec_fn": end_with_parent}
                ranks[subprocess.Popen(command, env=variables, **options)] = log
        while any(process.poll() is None for process in ranks) and time.monotonic() < end:
            if any(process.returncode for process in ranks):
                break
            time.sleep(0.05)
        else:
            for process in filter(lambda process: process.poll() is None, ranks):
                process.send_signal(signal.SIGABRT)  # faulthandler prints the stack
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for process, log in sorted(ranks.items(), key=lambda pair: pair[0].returncode == -9):  # first who failed by itself
        assert process.returncode == 0, f"exit status {process.returncode}\n{log.read_text()[-4000:]}"
