"""torchrun on two machines with their own addresses: network namespaces joined by a cable that can be pulled."""

import os
import signal
import time
from pathlib import Path

import pytest
from engines import SLOW_REWARD, WORDS, Network, iterations, largest_difference, ranks, wait_for
from processes import run_command

EVENTS = {"a killed rank": 0, "10 s without network": 10, "60 s without network": 60}


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize("event", EVENTS)
def test_two_machines_continue_by_themselves_or_end_and_are_resumed(tiny_recipe, event):
    Path("slow.py").write_text(SLOW_REWARD)
    words, run = (
        ["tiny.yaml", "run_dir=run", *WORDS, "trainer.num_nodes=2", "trainer.strategy=ddp", "--resume"],
        Path("run"),
    )
    done = run_command("run", "tiny.yaml", "run_dir=alone", *WORDS)
    assert done.returncode == 0, done.stderr
    Path("hold").touch()
    log = Path("log")
    with Network.joined() as network:
        nodes = [network.start(number, log, *words) for number in (0, 1)]
        try:
            wait_for(lambda: len(iterations(run)) >= 3, 180, "the third iteration")
            before, start = len(iterations(run)), time.monotonic()
            if EVENTS[event]:
                network.cut(EVENTS[event])
            else:
                os.kill(ranks()[-1], signal.SIGKILL)
            wait_for(lambda: len(iterations(run)) > before + 1 or any(n.poll() is not None for n in nodes), 240, "news")
            print(f"{event} after {before} iterations; {time.monotonic() - start:.0f} s later: {len(iterations(run))}")
            Path("hold").unlink()
            status = [node.wait(240) for node in nodes]  # a hang fails here
            print(f"ended with {status} after {time.monotonic() - start:.0f} s")
            if any(status):
                wait_for(lambda: not ranks(), 60, "the end of all ranks")
                nodes = [network.start(number, log, *words) for number in (0, 1)]
                assert [node.wait(240) for node in nodes] == [0, 0], log.read_text()[-4000:]
        finally:
            for node in nodes:
                node.kill()
            for rank in ranks():
                os.kill(rank, signal.SIGKILL)
    print([line for line in log.read_text().splitlines() if "Continuing from" in line])
    assert len(iterations(run)) == len(iterations("alone"))
    assert largest_difference(run, "alone") < 1e-5
