"""deploy/ray_train.py on Ray, started on this machine without GPUs."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest
from engines import WORDS, iterations, largest_difference, prepared, ranks, wait_for, wait_for_iterations, world_size
from helpers import free_port
from processes import end_with_parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(800),
    pytest.mark.skipif(find_spec("ray") is None, reason='Ray is missing. Run: pip install "lit-vgrpo[ray]"'),
]
SCRIPT = Path(__file__).parents[2] / "deploy" / "ray_train.py"
VICTIMS = {"ddp": "rank", "fsdp2": "driver"}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The address of a Ray that outlives the drivers of both runs."""
    folder, ports = tmp_path_factory.mktemp("ray"), [free_port() for _ in range(2)]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=4"]
    command += [f"--port={ports[0]}", f"--ray-client-server-port={ports[1]}", "--node-ip-address=127.0.0.1"]
    command += ["--disable-usage-stats", "--include-dashboard=false"]
    with (folder / "log").open("wb") as log:
        environment = os.environ | {"HOME": f"{folder}", "RAY_worker_niceness": "0"}  # 15 by default
        head = subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=end_with_parent)
    try:
        wait_for(lambda: "Ray runtime started" in (folder / "log").read_text(), what="the start of Ray")
        yield f"127.0.0.1:{ports[0]}"
    finally:
        head.terminate()
        head.wait(60)


def start(folder, strategy, address):
    command = [sys.executable, SCRIPT, "tiny.yaml", "run_dir=run", *WORDS, f"trainer.strategy={strategy}"]
    command += ["--workers=2", "--gpus-per-worker=0"]
    environment = os.environ | {"RAY_ADDRESS": address, "OMP_NUM_THREADS": "1", "HOME": f"{folder}"}
    with (folder / "ray.log").open("ab") as log:
        streams = {"stdout": log, "stderr": log}
        return subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=end_with_parent, **streams)


def disturbed(folder, strategy, address):
    """Run on Ray and kill a process; return the driver's exit status, and a line on how it continued."""
    run, log, victim = folder / "run", folder / "ray.log", VICTIMS[strategy]
    driver = start(folder, strategy, address)
    try:
        before = wait_for_iterations(run)
        started = time.monotonic()
        os.kill(driver.pid if victim == "driver" else ranks(folder)[-1], signal.SIGKILL)
        if victim == "driver":
            driver.wait()
            wait_for(lambda: not ranks(folder), 60, "the end of the ranks")
            driver = start(folder, strategy, address)
        line = wait_for(lambda: re.search("Continuing from .*", log.read_text()), 300, "the resumption")
        said = f"{victim} after {before} iterations; {time.monotonic() - started:.0f} s later: {line.group()}"
        (folder / "hold").unlink()
        return driver.wait(300), said
    finally:
        driver.kill()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_sd3, address):
    """The folder and the future of each run; they run at the same time."""
    with ThreadPoolExecutor() as pool:
        folders = {strategy: prepared(tmp_path_factory.mktemp(strategy), tiny_sd3) for strategy in VICTIMS}
        yield {name: (folder, pool.submit(disturbed, folder, name, address)) for name, folder in folders.items()}


@pytest.mark.parametrize("strategy", VICTIMS)
def test_a_run_on_ray_is_the_commands_and_survives(runs, undisturbed, strategy):
    folder, future = runs[strategy]
    run = folder / "run"
    status, line = future.result()
    print(line)
    assert status == 0, (folder / "ray.log").read_text()[-4000:]
    assert world_size(run) == 2
    assert iterations(run) == iterations(undisturbed)
    assert (run / "report.html").exists()
    assert largest_difference(run, undisturbed) < 1e-5
