"""A rank that dies ends the job, with its reason, and what was saved is still there."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import make_trainer
from processes import started

from lit_vgrpo.training.watchdog import Watch, watched

DEADLY = """
import os, signal

from lit_vgrpo.rewards import Reward

RANK = os.environ.get("LOCAL_RANK", "0")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(Reward):
    name = "deadly"

    def __init__(self, rank: str = "1", when: str = "training"):
        self.dies, self.when, self.calls = RANK == rank, when, 0
        if self.dies and when == "start":
            die()

    def __call__(self, images, prompts, rows):
        self.calls += 1
        if self.dies and self.when == "training" and self.calls == 3:
            die()
        return images.mean(dim=(1, 2, 3))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "when"), [("0", "training"), ("1", "start")])
def test_a_rank_that_is_killed_ends_the_job(tiny_recipe, rank, when):
    Path("deadly.py").write_text(DEADLY)
    reward = f"model.reward={{class_path: deadly.Deadly, init_args: {{rank: '{rank}', when: {when}}}}}"
    saving = "trainer.callbacks=[{class_path: RunCheckpoint, init_args: {every_n_iterations: 1}}]"
    ranks = ["trainer.devices=2", "trainer.strategy=ddp", "data.heldout=null", "trainer.max_epochs=100"]
    with started("run", tiny_recipe, reward, saving, *ranks, stderr=subprocess.STDOUT) as process:
        # Every process of the job holds the pipe: this returns when the last of them is gone.
        output, _ = process.communicate(timeout=240)
    last = output.strip().splitlines()[-1]
    if rank == "1":
        assert process.returncode == 1, output
        assert last.startswith("Rank 1 was killed by SIGKILL."), output
    else:
        assert process.returncode == -9, output
        assert last.startswith(f"Rank 0 (process {process.pid}) is gone."), output
    assert "Traceback" not in output
    assert last.endswith(": lightning run runs/tiny/config.yaml --resume"), output
    checkpoint = Path("runs/tiny/checkpoints/last.ckpt")
    if when == "training":
        assert f"The last checkpoint is {checkpoint} (2 iterations, 2 optimizer steps). Continue: " in last
        assert torch.load(checkpoint, weights_only=True)["global_step"] == 2
    else:
        assert "Nothing was saved yet. Start again: " in last


def children(*codes):
    watch = Watch(lambda: Path("runs/tiny"))
    ends = [f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})" for code in codes]
    watch.children = [subprocess.Popen([sys.executable, "-c", end]) for end in ends]
    for child in watch.children:
        child.wait()
    return watch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ((0, 7), "Rank 2 ended with exit status 7. Nothing was saved yet. Start again: "),
        ((1, -9), "Rank 2 was killed by SIGKILL. "),  # rank 1 failed because rank 2 was gone
        ((0, 143), "Rank 2 ended with exit status 143. "),
        ((0, -15), "Rank 2 was killed by SIGTERM. "),
        ((-15, 0, 143), "The run was ended from outside by SIGTERM. Nothing was saved yet. "),
    ],
)
def test_the_rank_that_is_to_blame_is_named(codes, said, capfd, here):
    assert children(*codes).report_death()
    assert capfd.readouterr().err.strip().startswith(said)


@pytest.mark.slow
def test_ranks_that_ended_well_are_not_blamed(capfd, monkeypatch):
    monkeypatch.setattr("lit_vgrpo.training.watchdog.BLAME_S", 0.2)
    assert not children(0, 0).report_death()
    assert capfd.readouterr().err == ""


def test_a_single_process_is_left_alone(tmp_path):
    trainer = make_trainer(tmp_path)
    with watched(trainer) as watch:
        assert not watch.report_death()
