"""Checkpoints of a run; apps/test_vote.py tries Ctrl-C through the command."""

import json
import os
import re
import shutil
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from commands import run
from helpers import same
from processes import run_command

from lit_vgrpo import VGRPOModule
from lit_vgrpo.launch.build import build
from lit_vgrpo.launch.train import train
from lit_vgrpo.system.paths import DRAFT_PREFIX
from lit_vgrpo.training.checkpoint import FIRST_CTRL_C, SAVES_AND_STOPS, SAVING
from lit_vgrpo.training.checkpoint_file import averages as averages_in
from lit_vgrpo.training.checkpoint_file import read_sound
from lit_vgrpo.training.loggers import read_table


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_a_checkpoint_is_written_counts(tiny_recipe, capfd, times):
    cli = build([str(tiny_recipe), "trainer.max_epochs=50", "data.heldout=null"])
    cli.checkpoints.every_n_iterations = 2
    save = cli.trainer.strategy.save_checkpoint

    def save_while_it_is_pressed(*args):
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        save(*args)

    cli.trainer.strategy.save_checkpoint = save_while_it_is_pressed
    assert train(cli) == 130
    path = cli.folder / "checkpoints" / "last.ckpt"
    assert [path] == list(path.parent.iterdir())  # no second file for what this one holds, and no draft
    read_sound(path)
    assert torch.load(path, weights_only=True)["global_step"] == 2
    out, err = capfd.readouterr()
    assert FIRST_CTRL_C.format("iteration", SAVING, SAVES_AND_STOPS) in err.splitlines()
    assert err.splitlines()[-1] == f"Interrupted: {path} is saved."
    assert re.findall(r"^  (.+?)  #", out.partition("Next:\n")[2], re.MULTILINE) == [
        "lightning run runs/tiny/config.yaml --resume",
        "lightning export runs/tiny --to tiny_export",
    ]


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_an_update_whole(tiny_recipe):
    cli = build([str(tiny_recipe), "trainer.max_epochs=50", "data.heldout=null"])

    class Pressing(VGRPOModule):
        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    cli.model.__class__ = Pressing
    assert train(cli) == 130
    saved = torch.load(cli.folder / "checkpoints" / "interrupted.ckpt", weights_only=True)
    assert saved["global_step"] == 1
    assert saved["optimizer_states"][0]["state"][0]["step"] == 1
    assert cli.trainer.current_epoch == 0


@pytest.mark.parametrize("when", ["iteration", "middle"])
def test_an_interrupted_run_saves_and_ends(tiny_recipe, when):
    cli = build([str(tiny_recipe), "trainer.max_epochs=50", "data.heldout=null"])
    step = type(cli.model).training_step

    class Interrupting(type(cli.model)):
        def training_step(self, batch, batch_idx):
            if batch.iteration == 2:
                signal.raise_signal(signal.SIGINT)
                if when == "middle":
                    signal.raise_signal(signal.SIGINT)
            return step(self, batch, batch_idx)

    cli.model.__class__ = Interrupting
    checkpoint, is_whole = cli.checkpoints, when == "iteration"
    with checkpoint.listening(), nullcontext() if is_whole else pytest.raises(SystemExit):
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert cli.trainer.current_epoch == 2 + is_whole
    folder = cli.folder / "checkpoints"
    assert checkpoint.saved == folder / "interrupted.ckpt"
    assert [path.name for path in folder.iterdir()] == ["interrupted.ckpt"]
    assert json.loads((cli.folder / "summary.json").read_text())["outcome"] == "interrupted"


def test_an_interrupted_run_says_what_it_reached_and_a_resumed_one_what_is_known(tiny_recipe, capsys):
    cli = build([str(tiny_recipe), "trainer.check_val_every_n_epoch=9"])
    cli.model.on_before_zero_grad = lambda optimizer: signal.raise_signal(signal.SIGINT)
    cli.save_recipe()
    assert train(cli) == 130
    cli.give_back()
    out = capsys.readouterr().out
    result = r"^Held-out reward -?[\d.]+ before, -?[\d.]+ after 1 iteration: \S+ \[.+\] \(trained"
    assert re.search(result, out, re.MULTILINE)
    assert "\nThe result: runs/tiny/report.html\n" in out
    assert out.count("report.html") == 1
    assert re.search(r"^Did it cheat\? .*\.$", out, re.MULTILINE)
    assert run(["runs/tiny", "--resume"]) == 0
    assert re.search(r"^iteration 2/2, reward .*, held-out -?[\d.]+$", capsys.readouterr().err, re.MULTILINE)
    evaluations = json.loads((cli.folder / "summary.json").read_text())["evaluations"]
    assert [one["iteration"] for one in evaluations] == [0, 1, 2]  # 1 came after the last iteration's checkpoint


def test_a_run_stopped_while_it_evaluates_counts_the_iteration_and_goes_on(tiny_recipe, capsys):
    cli = build([str(tiny_recipe)])
    cli.model.on_validation_epoch_end = lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)]
    cli.save_recipe()
    assert train(cli) == 130
    cli.give_back()
    summary = json.loads((cli.folder / "summary.json").read_text())
    assert (summary["outcome"], summary["iterations"], summary["optimizer_steps"]) == ("interrupted", 1, 1)
    assert summary["heldout_reward_end"] == summary["heldout_reward_start"] is not None
    assert run(["runs/tiny", "--resume"]) == 0
    summary = json.loads((cli.folder / "summary.json").read_text())
    assert [one["iteration"] for one in summary["evaluations"]] == [0, 2]
    saved = read_sound(cli.folder / "checkpoints" / "interrupted.ckpt")["lit_vgrpo"]["evaluator"]
    known = cli.model.evaluator.latest
    cli.model.evaluator.load_state_dict(saved)
    assert cli.model.evaluator.latest == pytest.approx(known)


@pytest.mark.slow
def test_last_is_saved_every_so_often_and_at_the_end(tiny_recipe):
    cli = build([str(tiny_recipe), "trainer.max_epochs=3", "data.heldout=null"])
    cli.checkpoints.every_n_iterations = 2
    saved = []
    save = cli.trainer.strategy.save_checkpoint
    cli.trainer.strategy.save_checkpoint = lambda *args: (saved.append(cli.trainer.current_epoch + 1), save(*args))
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert saved == [2, 3]
    folder = cli.folder / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", "previous.ckpt"]
    steps = [torch.load(folder / name, weights_only=True)["global_step"] for name in ("previous.ckpt", "last.ckpt")]
    assert steps == [2, 3]


def test_the_end_is_saved_also_with_a_checkpoint_callback_that_leaves_it_out(tiny_recipe):
    rare = "{class_path: ModelCheckpoint, init_args: {every_n_train_steps: 50}}"
    cli = build([str(tiny_recipe), "data.heldout=null", "trainer.max_epochs=2", f"trainer.callbacks=[{rare}]"])
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert read_sound(cli.folder / "checkpoints" / "last.ckpt")["global_step"] == 2


# --- SIGTERM ---------------------------------------------------------------------------------------------------------


def after_pass(when, action):
    """A module class that does something after one backward pass: ``(iteration, pass)``."""

    class Acting(VGRPOModule):
        def on_after_backward(self):
            if (self.record.iteration, len(self.record.metrics["loss"]) - 1) == when:
                action()

    return Acting


UPDATES = [f"data.{s}=2" for s in ("updates_per_iteration", "micro_batch_size", "group_size", "prompts_per_iteration")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Where the last checkpoint of a run without a signal is kept, once there was one."""
    return tmp_path_factory.mktemp("undisturbed") / "last.ckpt"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passes", "updates_done", "patient"),
    # Two micro-batches an update. The last time it is killed within the evaluation that follows.
    [(0, 4, True), (3, 6, False)],
)
def test_sigterm_saves_after_the_micro_batch_under_way_and_the_run_goes_on_bit_for_bit(
    tiny_recipe, capfd, undisturbed, passes, updates_done, patient
):
    words = [str(tiny_recipe), *UPDATES, "trainer.max_epochs=4", "trainer.callbacks=[EMA]"]
    if not undisturbed.exists():
        assert run([*words, "run_dir=whole"]) == 0
        shutil.copy("whole/checkpoints/last.ckpt", undisturbed)
    cli = build([*words, "run_dir=cut"])
    cli.model.__class__ = after_pass((2, passes), lambda: signal.raise_signal(signal.SIGTERM))
    if not patient:
        cli.model.on_validation_start = lambda: sys.exit() if cli.checkpoints.terminated else None
    cli.save_recipe()
    before = signal.getsignal(signal.SIGTERM)
    assert train(cli) == 143
    cli.give_back()
    assert signal.getsignal(signal.SIGTERM) == before
    out, err = capfd.readouterr()
    assert err.splitlines()[-1] == "Terminated: cut/checkpoints/interrupted.ckpt is saved."
    assert "Next:\n  lightning run cut/config.yaml --resume  # Continue the run\n" in out
    assert "Traceback" not in err
    assert torch.load("cut/checkpoints/interrupted.ckpt", weights_only=True)["global_step"] == updates_done
    assert json.loads((cli.folder / "summary.json").read_text())["outcome"] == "interrupted"
    assert run(["cut/config.yaml", "--resume"]) == 0
    ends = [torch.load(path, weights_only=True) for path in (undisturbed, "cut/checkpoints/last.ckpt")]
    assert same(ends[0]["state_dict"], ends[1]["state_dict"])
    averages = [averages_in(end)[0] for end in ends]
    assert same(*averages)
    assert [row["epoch"] for row in iterations_logged("cut")] == ["0", "1", "2", "3"]


def iterations_logged(folder):
    """The iterations' rows of the table, without the evaluations'."""
    return [row for row in read_table(Path(folder) / "metrics.csv")[1] if row["reward/mean"]]


def test_slurms_signal_to_requeue_saves_the_trained_weights_and_then_requeues(tiny_recipe, monkeypatch):
    Path("scontrol").write_text('#!/bin/sh\necho "$@" >>asked\n')
    Path("scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path.cwd()}:{os.environ['PATH']}")
    names = ("NTASKS", "PROCID", "LOCALID", "NODEID", "JOB_NAME", "ARRAY_JOB_ID", "ARRAY_TASK_ID")
    for name, value in zip(names, ("1", "0", "0", "0", "train", "7", "3"), strict=True):
        monkeypatch.setenv(f"SLURM_{name}", value)
    cli = build([str(tiny_recipe), "trainer.max_epochs=3", "trainer.callbacks=[EMA]"])
    evaluations = iter([lambda: None, lambda: signal.raise_signal(signal.SIGUSR1)])  # of the averaged weights
    cli.model.on_validation_start = lambda: next(evaluations)()
    assert train(cli) == 143
    assert Path("asked").read_text() == "requeue 7_3\n"
    assert not [*cli.folder.glob("hpc_ckpt_*")]
    saved = torch.load(cli.checkpoints.saved, weights_only=True)
    assert not same(saved["state_dict"], averages_in(saved)[0])


@pytest.mark.slow
def test_sigterm_in_the_last_iteration_lets_the_run_end(tiny_recipe):
    cli = build([str(tiny_recipe), "data.heldout=null"])
    cli.model.__class__ = after_pass((1, 1), lambda: signal.raise_signal(signal.SIGTERM))
    assert train(cli) == 0
    assert torch.load("runs/tiny/checkpoints/last.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.slow
def test_before_training_sigterm_stops_at_once(tiny_recipe, capfd):
    cli = build([str(tiny_recipe)])
    cli.model.on_fit_start = lambda: signal.raise_signal(signal.SIGTERM)
    assert train(cli) == 143
    assert "Terminated: nothing new was saved. Continue: " in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_second_signal_to_terminate_stops_within_the_micro_batch_and_saves(tiny_recipe, monkeypatch, name, status):
    monkeypatch.setattr("lit_vgrpo.system.signals.REPEAT_S", 0.0)
    cli = build([str(tiny_recipe), *UPDATES, "trainer.max_epochs=4", "data.heldout=null"])

    def twice():
        for _ in range(2):
            signal.raise_signal(signal.Signals[name])
        pytest.fail("it went on")

    cli.model.__class__ = after_pass((2, 1), twice)
    assert train(cli) == status
    assert cli.checkpoints.saved == cli.folder / "checkpoints" / "interrupted.ckpt"


# --- a full disk -----------------------------------------------------------------------------------------------------

FILLING = """
import resource
from lightning.pytorch import Callback


def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Filling(Callback):
    # Files stop growing at this size, as on a full disk.
    def __init__(self, start: int, stop: int, size: int):
        self.start, self.stop, self.size = start, stop, size

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.start:
            limit(self.size)
        if trainer.current_epoch == self.stop:
            limit(resource.RLIM_INFINITY)
"""


def steps_saved():
    folder = Path("runs/tiny/checkpoints")
    return {path.name: torch.load(path, weights_only=True)["global_step"] for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "ranks"), [(3, 1), (9, 2)])
def test_a_full_disk_costs_lines_and_no_training(tiny_recipe, tmp_path, stop, ranks):
    """The disk is full in the third iteration alone, or from there to the end, which ends both ranks."""
    (tmp_path / "filling.py").write_text(FILLING)
    filling = f"{{class_path: filling.Filling, init_args: {{start: 2, stop: {stop}, size: 0}}}}"
    grid = "{class_path: SampleGrid, init_args: {every_n_iterations: 3}}"
    saving = "{class_path: RunCheckpoint, init_args: {every_n_iterations: 1}}"
    words = [f"trainer.callbacks=[{filling}, {grid}, {saving}, Export]", "trainer.max_epochs=4"]
    if ranks > 1:
        words += [f"trainer.devices={ranks}", "trainer.strategy=ddp"]
    done = run_command("run", tiny_recipe, *words)
    folder = Path("runs/tiny")
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp") or path.name.startswith(DRAFT_PREFIX)]
    told = [row["epoch"] for row in read_table(folder / "metrics.csv")[1] if row["reward/mean"]]
    for what in ("metrics.csv: ", "samples/iteration_00003.png: ", "checkpoints/last.ckpt: "):
        assert f"Cannot write runs/tiny/{what}" in done.stderr or f"Cannot save runs/tiny/{what}" in done.stderr, what
    failed = [line for line in done.stderr.splitlines() if line.startswith("Cannot save")]
    advice = "Earlier checkpoints are kept. Free some disk space. The next save or --resume will try again."
    assert all(line.endswith(advice) for line in failed)
    of_tensorboard = re.findall(r'event_file_writer\.py", line \d+, in _run\n', done.stderr)  # its thread prints one
    assert done.stderr.count("Traceback") == len(of_tensorboard), done.stderr
    if stop == 3:
        assert done.returncode == 0, done.stderr
        assert told == ["0", "1", "2", "3"]  # what had to wait was written
        assert steps_saved().items() >= {"previous.ckpt": 2, "last.ckpt": 4}.items()
        assert "More is in runs/tiny" in done.stdout
        return
    assert done.returncode == 1, done.stderr
    assert told == ["0", "1"]
    assert "Everything" not in done.stdout
    again = "Free some disk space. Continue: lightning run runs/tiny/config.yaml --resume"
    assert f"Cannot write runs/tiny/summary.json: File too large. {again}" in done.stderr.splitlines()
    of_last = [line for line in failed if "runs/tiny/checkpoints/last.ckpt: File too large (" in line]
    assert len(of_last) == 2, done.stderr  # of one rank
    assert {name: step for name, step in steps_saved().items() if name != "best.ckpt"} == {
        "previous.ckpt": 1,
        "last.ckpt": 2,
    }
    alone = ["trainer.devices=1", "trainer.strategy=auto"]
    assert run([str(folder / "config.yaml"), "--resume", f"trainer.callbacks=[{saving}]", *alone]) == 0
    told = [row["epoch"] for row in read_table(folder / "metrics.csv")[1] if row["reward/mean"]]
    assert told == ["0", "1", "2", "3"]
