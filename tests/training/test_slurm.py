"""deploy/slurm.sh on a cluster of SLURM that the tests start, with three nodes on this machine."""

import re
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from conftest import tiny_recipe_of
from engines import SLOW_REWARD, WORDS, Slurm, iterations, largest_difference, wait_for
from processes import run_command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm.started(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def folder(tmp_path, tiny_sd3):
    (tmp_path / "tiny.yaml").write_text(tiny_recipe_of(tiny_sd3))
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "lit-vgrpo").symlink_to(Path(sys.executable).with_name("lit-vgrpo"))
    return tmp_path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_sd3):
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tiny.yaml").write_text(tiny_recipe_of(tiny_sd3))
    (folder / "slow.py").write_text(SLOW_REWARD)
    done = run_command("run", "tiny.yaml", "run_dir=run", *WORDS, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_two_nodes_are_one_process(slurm, folder, undisturbed):
    job = slurm.submit(folder, "tiny.yaml", *WORDS, options=["--nodes=2"])
    assert slurm.finish(job) == "COMPLETED", (folder / f"slurm-{job}.out").read_text()
    assert largest_difference(folder / "runs" / "job", undisturbed) < 1e-5


EVENTS = {
    "requeue": lambda slurm, job: slurm.ask("scontrol", "requeue", job),
    "time_limit": lambda slurm, job: None,
    "node_failure": lambda slurm, job: slurm.ask("scontrol", "update", "NodeName=n1", "State=down", "Reason=a test"),
    "scancel": lambda slurm, job: slurm.ask("scancel", job),
}


@pytest.mark.parametrize("event", EVENTS)
def test_a_job_that_ends_early_continues_with_the_same_bits(slurm, folder, undisturbed, event):
    run = folder / "runs" / "job"
    (folder / "hold").touch()
    options = ["--time=3", "--signal=B:USR1@90"] if event == "time_limit" else []
    options += [] if event == "node_failure" else ["--nodelist=n2"]
    submit = partial(slurm.submit, folder, "tiny.yaml", *WORDS, options=options)
    job = submit()
    wait_for(lambda: len(iterations(run)) >= 3, what="the third iteration")
    EVENTS[event](slurm, job)
    before, start = len(iterations(run)), time.monotonic()
    if event == "scancel":
        assert slurm.finish(job) == "CANCELLED"
        job = submit()
    else:
        slurm.hasten(job)
    (folder / "hold").unlink()
    log = folder / f"slurm-{job}.out"
    line = wait_for(
        lambda: re.search("Continuing from .*", log.read_text() if log.exists() else ""), what="the resumption"
    )
    print(f"{event} after {before} iterations; {time.monotonic() - start:.0f} s later: {line.group()}")
    assert slurm.finish(job) == "COMPLETED", log.read_text()
    if event == "node_failure":
        slurm.ask("scontrol", "update", "NodeName=n[1-3]", "State=resume")
    assert largest_difference(run, undisturbed) == 0


def test_an_array_has_a_folder_for_each_task_and_no_second_writer(slurm, folder):
    (folder / "hold").touch()
    sweep = {"SWEEP": "seed_everything=1 seed_everything=2"}
    words = ["tiny.yaml", *WORDS, "trainer.max_epochs=3"]
    array = slurm.submit(folder, *words, options=["--array=0-1", "--nodelist=n1"], **sweep)
    runs = [folder / "runs" / f"job-{number}" for number in (0, 1)]
    wait_for(lambda: all((run / "config.yaml").exists() for run in runs), what="the start of both")
    second = slurm.submit(folder, *words, options=["--array=0", "--nodelist=n3"], **sweep)
    assert slurm.finish(second) == "FAILED"
    assert "Another process is still writing to" in (folder / f"slurm-{second}_0.out").read_text()
    (folder / "hold").unlink()
    wait_for(lambda: slurm.state(array) == "COMPLETED\nCOMPLETED", what="the end of both")
    seeds = [yaml.safe_load((run / "config.yaml").read_text())["seed_everything"] for run in runs]
    assert seeds == [1, 2]
    assert all(len(iterations(run)) == 3 for run in runs)
