"""torchrun on two machines with their own addresses: network namespaces joined by a cable."""

import os
import signal
import time
from pathlib import Path

import pytest
from engines import SLOW_REWARD, WORDS, Network, iterations, largest_difference, ranks, wait_for
from processes import run_command


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_two_machines_continue_by_themselves_after_a_rank_is_killed(tiny_recipe):
    Path("slow.py").write_text(SLOW_REWARD)
    words = ["tiny.yaml", "run_dir=run", *WORDS, "trainer.num_nodes=2", "trainer.strategy=ddp", "--resume"]
    done = run_command("run", "tiny.yaml", "run_dir=alone", *WORDS)
    assert done.returncode == 0, done.stderr
    Path("hold").touch()
    log, run = Path("log"), Path("run")
    with Network.joined() as network:
        nodes = [network.start(number, log, *words) for number in (0, 1)]
        try:
            wait_for(lambda: len(iterations(run)) >= 3, 180, "the third iteration")
            before, start = len(iterations(run)), time.monotonic()
            os.kill(ranks()[-1], signal.SIGKILL)
            wait_for(lambda: len(iterations(run)) > before + 1 or any(n.poll() is not None for n in nodes), 240, "news")
            print(f"a rank killed after {before} iterations; {time.monotonic() - start:.0f} s later: more")
            Path("hold").unlink()
            assert [node.wait(240) for node in nodes] == [0, 0], log.read_text()[-4000:]
        finally:
            for node in nodes:
                node.kill()
            for rank in ranks():
                os.kill(rank, signal.SIGKILL)
    assert "Continuing from" in log.read_text()
    assert len(iterations(run)) == len(iterations("alone"))
    assert largest_difference(run, "alone") < 1e-5
