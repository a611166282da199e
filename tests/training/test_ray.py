"""deploy/ray_train.py on Ray, started on this machine without GPUs."""

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from engines import SLOW_REWARD, WORDS, iterations, largest_difference, ranks, wait_for
from processes import end_with_parent, run_command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason='Ray is missing. Run: pip install "lit-vgrpo[ray]"'),
]
SCRIPT = Path(__file__).parents[2] / "deploy" / "ray_train.py"


def start(*words):
    command = [sys.executable, SCRIPT, "tiny.yaml", "run_dir=run", *WORDS, *words]
    options = ["--workers=2", "--gpus-per-worker=0"]
    environment = os.environ | {"RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1", "HOME": str(Path.cwd())}
    with Path("ray.log").open("ab") as log:
        return subprocess.Popen(
            [*command, *options], stdout=log, stderr=log, env=environment, preexec_fn=end_with_parent
        )


@pytest.mark.timeout(800)  # Ray starts six processes for each of its starts
@pytest.mark.parametrize(("strategy", "victim"), [("ddp", "rank"), ("fsdp2", "driver")])
def test_a_run_on_ray_is_the_commands_and_survives(tiny_recipe, strategy, victim):
    Path("slow.py").write_text(SLOW_REWARD)
    done = run_command("run", "tiny.yaml", "run_dir=alone", *WORDS)
    assert done.returncode == 0, done.stderr
    Path("hold").touch()
    words, run = [f"trainer.strategy={strategy}"], Path("run")
    driver = start(*words)
    try:
        wait_for(lambda: len(iterations(run)) >= 3, 300, "the third iteration")
        before, started = len(iterations(run)), time.monotonic()
        os.kill(driver.pid if victim == "driver" else ranks()[-1], signal.SIGKILL)
        if victim == "driver":
            driver.wait()
            wait_for(lambda: not ranks(), 60, "the end of the ranks")
            driver = start(*words)
        line = wait_for(lambda: re.search("Continuing from .*", Path("ray.log").read_text()), 300, "the resumption")
        print(f"{victim} after {before} iterations; {time.monotonic() - started:.0f} s later: {line.group()}")
        Path("hold").unlink()
        assert driver.wait(300) == 0, Path("ray.log").read_text()[-4000:]
    finally:
        driver.kill()
    assert len(iterations(run)) == len(iterations("alone"))
    assert (run / "report.html").exists()
    assert largest_difference(run, "alone") < 1e-5
