"""torchrun on two machines with their own addresses: network namespaces joined by a cable that can be pulled."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines import (
    WORDS,
    Network,
    iterations,
    largest_difference,
    prepared,
    ranks,
    wait_for,
    wait_for_iterations,
    world_size,
)

EVENTS = {"60 s without network": 60, "10 s without network, then loss": 10, "a killed rank, twice": 0}


def rank_of(node, folder):
    """The process of the rank that a machine's torchrun has started."""
    return next(rank for rank in ranks(folder) if f"PPid:\t{node.pid}\n" in Path(f"/proc/{rank}/status").read_text())


def disturbed(folder, event):
    """Run on two machines, to which something happens; return lines on how it continued."""
    run, log, seconds = folder / "run", folder / "log", EVENTS[event]
    restarts = 3 if seconds else 1
    words = [restarts, "tiny.yaml", "run_dir=run", *WORDS, "trainer.num_nodes=2", "trainer.strategy=ddp", "--resume"]
    with Network.joined(list(EVENTS).index(event)) as network:
        nodes = [network.start(number, folder, *words) for number in (0, 1)]
        try:
            before = wait_for_iterations(run)
            start = time.monotonic()
            if seconds:
                network.cut(seconds)
            else:
                os.kill(rank_of(nodes[1], folder), signal.SIGKILL)
            wait_for(lambda: len(iterations(run)) > before + 1 or any(n.poll() is not None for n in nodes), 400, "news")
            said = f"{event} after {before} iterations; {time.monotonic() - start:.0f} s later: {len(iterations(run))}"
            if not seconds:  # this machine has no restart left; the other has, since each counts its own ranks
                start = time.monotonic()
                os.kill(rank_of(nodes[1], folder), signal.SIGKILL)
                assert all(node.wait(120) for node in nodes)  # neither waits for the other
            if "loss" in event:
                said += f", with {network.delay()}"
            (folder / "hold").unlink()
            status = [node.wait(240) for node in nodes]  # a hang fails here
            said += f"\nended with {status} after {time.monotonic() - start:.0f} s"
            if any(status):
                wait_for(lambda: not ranks(folder), 60, "the end of all ranks")
                nodes = [network.start(number, folder, *words) for number in (0, 1)]
                assert [node.wait(240) for node in nodes] == [0, 0], log.read_text()[-4000:]
            if "loss" in event:
                assert network.lost() > 0
                said += f", {network.lost()} packets lost"
        finally:
            for node in nodes:
                node.kill()
            for rank in ranks(folder):
                os.kill(rank, signal.SIGKILL)
    return "\n".join([said, *(line for line in log.read_text().splitlines() if "Continuing from" in line)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_sd3):
    """The folder and the future of each run; they run at the same time, on separate networks."""
    with ThreadPoolExecutor() as pool:
        folders = {event: prepared(tmp_path_factory.mktemp("machines"), tiny_sd3) for event in EVENTS}
        yield {event: (folder / "run", pool.submit(disturbed, folder, event)) for event, folder in folders.items()}


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize("event", EVENTS)
def test_two_machines_continue_by_themselves_or_end_and_are_resumed(runs, undisturbed, event):
    run, future = runs[event]
    print(future.result())
    assert world_size(run) == 2
    assert iterations(run) == iterations(undisturbed)
    assert largest_difference(run, undisturbed) < 1e-5
