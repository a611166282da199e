"""deploy/slurm.sh on a cluster of SLURM that the tests start, with three nodes on this machine."""

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from engines import WORDS, Slurm, iterations, largest_difference, prepared, wait_for, wait_for_iterations, world_size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(800)]  # the first test waits while all jobs start

EVENTS = {
    "time_limit": lambda slurm, job: None,
    "requeue": lambda slurm, job: slurm.ask("scontrol", "requeue", job),
    "node_failure": lambda slurm, job: slurm.ask("scontrol", "update", "NodeName=n1", "State=down", "Reason=a test"),
    "scancel": lambda slurm, job: slurm.ask("scancel", job),
}
OPTIONS = {name: ["--nodelist=n2"] for name in EVENTS}
OPTIONS |= {"node_failure": [], "time_limit": ["--nodelist=n2", "--time=3", "--signal=B:USR1@90"]}
SWEEP = {"SWEEP": "seed_everything=7 seed_everything=8"}


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory, tiny_sd3):
    """Return a folder from which a job can be submitted."""

    def make(name):
        folder = prepared(tmp_path_factory.mktemp(name), tiny_sd3)
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "lit-vgrpo").symlink_to(Path(sys.executable).with_name("lit-vgrpo"))
        return folder

    return make


def disturbed(slurm, folder, event):
    """Run a job to which something happens; return its log, its last state and a line on its continuation."""
    run = folder / "runs" / "job"
    job = slurm.submit(folder, "tiny.yaml", *WORDS, options=OPTIONS[event])
    before = wait_for_iterations(run)
    start = time.monotonic()
    EVENTS[event](slurm, job)
    if event == "scancel":
        assert slurm.finish(job) == "CANCELLED"
        job = slurm.submit(folder, "tiny.yaml", *WORDS, options=OPTIONS[event])
    else:
        slurm.hasten(job)
    (folder / "hold").unlink()
    log = folder / f"slurm-{job}.out"
    line = wait_for(
        lambda: re.search("Continuing from .*", log.read_text() if log.exists() else ""), what="the resumption"
    )
    said = f"{event} after {before} iterations; {time.monotonic() - start:.0f} s later: {line.group()}"
    return log, slurm.finish(job), said


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, new_folder):
    """The jobs of all tests, which run at the same time: futures of the events, and numbers and folders of others."""
    with Slurm.started(tmp_path_factory.mktemp("slurm")) as slurm, ThreadPoolExecutor() as pool:
        folders = {name: new_folder(name) for name in (*EVENTS, "array", "two_nodes")}
        (folders["two_nodes"] / "hold").unlink()
        command = folders["two_nodes"] / ".venv" / "bin"
        elsewhere = {"PATH": f"{command.rename(folders['two_nodes'] / 'environment')}:{os.environ['PATH']}"}
        jobs = {"slurm": slurm}
        for event in EVENTS:
            jobs[event] = pool.submit(disturbed, slurm, folders[event], event)
            if event == "time_limit":  # SLURM's clock runs: it has both processors while it starts
                wait_for((folders[event] / "runs" / "job" / "config.yaml").exists, what="the first start")
        words = ["tiny.yaml", *WORDS]
        array = slurm.submit(folders["array"], *words, options=["--array=0-1", "--nodelist=n3"], **SWEEP)
        two_nodes = slurm.submit(folders["two_nodes"], *words, options=["--nodes=2", "--nodelist=n[2-3]"], **elsewhere)
        yield jobs | {"array": (array, folders["array"]), "two_nodes": (two_nodes, folders["two_nodes"])}


def test_an_array_has_a_folder_for_each_task_and_no_second_writer(jobs, undisturbed):
    slurm, (array, folder) = jobs["slurm"], jobs["array"]
    runs = [folder / "runs" / f"job-{number}" for number in (0, 1)]
    wait_for(lambda: all((run / "config.yaml").exists() for run in runs), what="the start of both")
    options = ["--array=0", "--nodelist=n2"]
    second = slurm.submit(folder, "tiny.yaml", *WORDS, options=options, **SWEEP)
    assert slurm.finish(second) == "FAILED"
    assert "Another process is still writing to" in (folder / f"slurm-{second}_0.out").read_text()
    (folder / "hold").unlink()
    assert slurm.finish(array).split() == ["COMPLETED", "COMPLETED"]
    seeds = [yaml.safe_load((run / "config.yaml").read_text())["seed_everything"] for run in runs]
    assert seeds == [7, 8]
    assert largest_difference(runs[0], undisturbed) == 0
    assert all(iterations(run) == iterations(undisturbed) for run in runs)


def test_two_nodes_are_one_process(jobs, undisturbed):
    job, folder = jobs["two_nodes"]
    assert jobs["slurm"].finish(job) == "COMPLETED", (folder / f"slurm-{job}.out").read_text()
    assert world_size(folder / "runs" / "job") == 2
    assert largest_difference(folder / "runs" / "job", undisturbed) < 1e-5


@pytest.mark.parametrize("event", EVENTS)
def test_a_job_that_ends_early_continues_with_the_same_bits(jobs, undisturbed, event):
    log, state, line = jobs[event].result()
    print(line)
    assert state == "COMPLETED", log.read_text()
    assert iterations(log.parent / "runs" / "job") == iterations(undisturbed)
    assert largest_difference(log.parent / "runs" / "job", undisturbed) == 0
