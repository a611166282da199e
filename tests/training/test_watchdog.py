"""A rank that dies ends the job, with its reason, and what was saved is still there."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import free_port, make_trainer

from lit_vgrpo.training.peers import Peers, state_of
from lit_vgrpo.training.watchdog import ChildrenWatch, Watch, watched

DEADLY = """
import os, signal, threading, time

from lit_vgrpo.rewards import Reward

RANK = os.environ.get("LOCAL_RANK", "0")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_once_the_other_is_started():
    while "LIT_VGRPO_LAUNCHER_PID" not in os.environ:
        time.sleep(0.05)
    time.sleep(0.5)
    die()


class Deadly(Reward):
    name = "deadly"

    def __init__(self, rank: str = "1", when: str = "training"):
        self.dies, self.when, self.calls = RANK == rank, when, 0
        if self.dies and when == "start" and rank == "0":
            threading.Thread(target=die_once_the_other_is_started, daemon=True).start()
        elif self.dies and when == "start":
            die()

    def __call__(self, images, prompts, rows):
        self.calls += 1
        if self.dies and self.when == "training" and self.calls == 3:
            die()
        return images.mean(dim=(1, 2, 3))
"""


@pytest.mark.parametrize(
    ("rank", "when"),
    [
        ("1", "training"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("0", "training"), ("1", "start"), ("0", "start"))),
    ],
)
def test_a_rank_that_is_killed_ends_the_job(tiny_recipe, rank, when):
    Path("deadly.py").write_text(DEADLY)
    reward = f"model.reward={{class_path: deadly.Deadly, init_args: {{rank: '{rank}', when: {when}}}}}"
    saving = "trainer.callbacks=[{class_path: RunCheckpoint, init_args: {every_n_iterations: 1}}]"
    ranks = ["trainer.devices=2", "trainer.strategy=ddp", "data.heldout=null", "trainer.max_epochs=100"]
    command = [sys.executable, "-m", "lit_vgrpo", "run", str(tiny_recipe), reward, saving, *ranks]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}, start_new_session=True
    )
    try:
        # Every process of the job holds the pipe: this returns when the last of them is gone.
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise
    last = output.strip().splitlines()[-1]
    if rank == "1":
        assert process.returncode == 1, output
        assert last.startswith("Rank 1 was killed by SIGKILL."), output
    else:
        assert process.returncode == -9, output
        assert last.startswith(f"Rank 0 (process {process.pid}) is gone."), output
    assert "Traceback" not in output
    assert last.endswith("Continue: lightning run runs/tiny/config.yaml --resume"), output
    checkpoint = Path("runs/tiny/checkpoints/last.ckpt")
    if when == "training":
        assert f"The last checkpoint is {checkpoint}." in last
        assert torch.load(checkpoint, weights_only=True)["global_step"] == 2
    else:
        assert "Nothing was saved yet." in last


STOPPING = """
import os, signal

from lit_vgrpo.training import watchdog
from lit_vgrpo.rewards import Reward

watchdog.SILENT_S = watchdog.PATIENCE_S = 1.0


class Stopping(Reward):
    name = "stopping"

    def __init__(self, rank: str = "1"):
        self.rank, self.calls = rank, 0

    def __call__(self, images, prompts, rows):
        self.calls += 1
        if os.environ.get("LOCAL_RANK", "0") == self.rank and self.calls == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return images.mean(dim=(1, 2, 3))
"""


def start_ranks(launcher, *words):
    """Start a run on two ranks.

    Returns:
        The processes of its ranks, or that of the first one where it starts the other.
    """
    command = [sys.executable, "-m", "lit_vgrpo", "run", *words, "trainer.devices=2", "trainer.strategy=ddp"]
    places = [{}]
    if launcher == "torchrun":
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "tests"}
        job |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
        places = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return [subprocess.Popen(command, env={**os.environ, **place}, **pipes) for place in places]


@pytest.mark.parametrize(
    ("launcher", "stopped", "names", "status"),
    [
        ("lightning", "1", ["SIGINT", "SIGINT"], 130),
        pytest.param("torchrun", "0", ["SIGTERM"], 143, marks=pytest.mark.slow),
        pytest.param("torchrun", "1", ["SIGHUP", "SIGINT"], 129, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_stopped_is_named_and_does_not_keep_the_others(tiny_recipe, launcher, stopped, names, status):
    Path("stopping.py").write_text(STOPPING)
    reward = f"model.reward={{class_path: stopping.Stopping, init_args: {{rank: '{stopped}'}}}}"
    saving = "trainer.callbacks=[{class_path: RunCheckpoint, init_args: {every_n_iterations: 1}}]"
    ranks = start_ranks(launcher, str(tiny_recipe), reward, saving, "data.heldout=null", "trainer.max_epochs=100")
    waiting = ranks[0 if stopped == "1" else 1]
    limit = threading.Timer(120, waiting.kill)  # ends what is read below
    limit.start()
    try:
        said = iter(waiting.stdout.readline, "")
        named = next((line for line in said if "is stopped, and the others wait" in line), "")
        process = re.fullmatch(rf"Rank {stopped} \(process (\d+)\) .* Let it go on: kill -CONT \1\n", named).group(1)
        assert state_of(int(process)) == "T"
        for name in names:
            waiting.send_signal(signal.Signals[name])
            time.sleep(0.2)
        last = waiting.communicate(timeout=120)[0].strip().splitlines()[-1]
    finally:
        limit.cancel()
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert waiting.returncode == status
    assert last.startswith(f"Ended at once. Rank {stopped} (process {process}) is stopped. The last checkpoint is ")
    assert last.endswith("last.ckpt. Continue: lightning run runs/tiny/config.yaml --resume")
    if launcher == "lightning":
        assert state_of(int(process)) in (None, "Z")  # killed with the first rank


def children(*codes):
    watch = ChildrenWatch(lambda: Path("runs/tiny"))
    ends = [f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})" for code in codes]
    watch.children = [subprocess.Popen([sys.executable, "-c", end]) for end in ends]
    for child in watch.children:
        child.wait()
    return watch


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ((0, 7), "Rank 2 ended with exit status 7. Nothing was saved yet. Continue: "),
        ((1, -9), "Rank 2 was killed by SIGKILL. "),  # rank 1 failed because rank 2 was gone
        ((143, 143), "Rank 1 ended with exit status 143. "),
    ],
)
def test_the_rank_that_is_to_blame_is_named(codes, said, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert children(*codes).says_who_died()
    assert capfd.readouterr().err.strip().startswith(said)


def test_a_rank_that_died_is_not_waited_for_after_an_urgent_signal():
    assert children(130).hindrance(is_urgent=True) == "Rank 1 ended with exit status 130."
    assert children(143).hindrance(is_urgent=False) is None  # it has saved with the others, and is the first to be done


def test_ranks_that_ended_well_are_not_blamed(capfd, monkeypatch):
    monkeypatch.setattr("lit_vgrpo.training.watchdog.BLAME_S", 0.2)
    assert not children(0, 0).says_who_died()
    assert capfd.readouterr().err == ""


def test_a_single_process_is_left_alone(tmp_path):
    trainer = make_trainer(tmp_path)
    with watched(trainer) as watch:
        assert type(watch) is Watch
        assert not watch.says_who_died()


def test_peers_are_those_of_the_same_machine_and_their_silence_is_counted(capsys):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = Peers()
    peers.meet(1, [("here", child.pid), ("here", os.getpid()), ("elsewhere", child.pid)])
    try:
        assert list(peers.processes) == [0]
        assert not peers.speaks()  # rank 0 does
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        for _ in range(4):
            peers.look(0.5)
        assert peers.stopped(2.0) is None
        assert peers.stopped(1.5) == 0
        assert peers.speaks()
        assert peers.about(1.5)[0].startswith(f"Rank 0 (process {child.pid}) is stopped")
        child.send_signal(signal.SIGCONT)
        end = time.monotonic() + 20
        while state_of(child.pid) == "T" and time.monotonic() < end:
            time.sleep(0.01)
        peers.look(0.5)
        assert peers.silent_s == {}
    finally:
        child.kill()
        child.wait()
    assert state_of(child.pid) is None
    peers.meet(0, [("", 1), ("", 2)])  # a system that does not tell machines apart
    assert not peers.processes
