"""Scripts run as ranks, forked from one process that has the libraries: an import takes 8 s, a fork none."""

import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import time
from pathlib import Path

from helpers import free_port

# What the scripts import, so that it is imported once for all ranks of all tests in this process.
PRELOADED = [
    "lit_vgrpo.cli",
    "lit_vgrpo.zero",
    "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    "torch.distributed.fsdp",
    "peft",
    "deepspeed",
]
os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOADED)


def small_strategy(name):
    """A strategy by its name; ZeRO-3 gives up gathered weights at once.

    By default it keeps what is used again within 1e9 weights, and looking for that takes most of a small run.
    """
    from lit_vgrpo.strategies import ZeRO

    if name is None or not name.startswith("zero3"):
        return name
    return ZeRO(3, offload=name.endswith("offload"), zero_options={"stage3_max_reuse_distance": 0})


def run_ranks(script, *args, world=1, logs, env=None, timeout_s=400):
    """Run a script on that many ranks with torchrun's environment, or alone; when one fails or hangs all are ended.

    What hangs writes where it is to its log first.

    Raises:
        AssertionError: a rank failed, with the end of what it printed to ``logs/SCRIPT.RANK.log``.
    """
    env, places = dict(env or {}), [{}]
    if world > 1:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "tests"}
        shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
        places = [{"RANK": rank, "LOCAL_RANK": rank, **shared} for rank in range(world)]
    command, ranks = [str(word) for word in (script, *args)], {}
    for rank, place in enumerate(places):
        log = Path(logs, f"{Path(script).stem}.{rank}.log")
        own = {**env, **{key: str(value) for key, value in place.items()}}
        ranks[FORKS.Process(target=_run, args=(command, own, str(log)))] = log
    end = time.monotonic() + timeout_s
    try:
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks) and time.monotonic() < end:
            if any(process.exitcode for process in ranks):
                break
            time.sleep(0.05)
        else:
            for process in filter(lambda process: process.is_alive(), ranks):
                os.kill(process.pid, signal.SIGUSR1)
                process.join(1)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    for process, log in sorted(ranks.items(), key=lambda pair: pair[0].exitcode == -9):  # first who failed by itself
        assert process.exitcode == 0, f"exit status {process.exitcode}\n{log.read_text()[-4000:]}"


def _run(command, env, log):
    """Become ``python COMMAND``."""
    with open(log, "w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    os.environ |= env
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
