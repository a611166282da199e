"""Checkpoints of a run; Ctrl-C itself is tried through the command in test_cli.py."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import PYTHON

from lit_vgrpo import VGRPOModule
from lit_vgrpo.cli import build, run
from lit_vgrpo.interrupt import RunCheckpoint
from lit_vgrpo.training import train


def test_a_negative_interval_is_refused():
    with pytest.raises(ValueError, match="every_n_iterations=-1 is negative"):
        RunCheckpoint(-1)


def test_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with RunCheckpoint().listening():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_before_the_first_iteration_ctrl_c_stops_at_once():
    checkpoint = RunCheckpoint()
    with checkpoint.listening(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert checkpoint.interrupted
    assert checkpoint.saved is None


def test_the_first_ctrl_c_waits_and_the_second_does_not(capfd):
    checkpoint = RunCheckpoint()
    checkpoint.training = True
    with checkpoint.listening():
        signal.raise_signal(signal.SIGINT)
        assert checkpoint.interrupted
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "Ctrl-C again stops at once" in capfd.readouterr().err


@pytest.mark.parametrize("when", ["iteration", "middle"])
def test_an_interrupted_run_saves_and_ends(tiny_recipe, when):
    cli = build([str(tiny_recipe), "trainer.max_epochs=50", "data.heldout=null"])
    step = type(cli.model).training_step

    class Interrupting(type(cli.model)):
        def training_step(self, batch, batch_idx):
            if batch.iteration == 2 and batch.is_first:
                signal.raise_signal(signal.SIGINT)
                if when == "middle":
                    signal.raise_signal(signal.SIGINT)
            return step(self, batch, batch_idx)

    cli.model.__class__ = Interrupting
    checkpoint = cli.checkpoints
    if when == "iteration":
        with checkpoint.listening():
            cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        assert cli.trainer.current_epoch == 3
    else:
        with checkpoint.listening(), pytest.raises(SystemExit):
            cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        assert cli.trainer.current_epoch == 2
    folder = cli.folder / "checkpoints"
    assert checkpoint.saved == folder / "interrupted.ckpt"
    assert [path.name for path in folder.iterdir()] == ["interrupted.ckpt"]


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


def test_a_recipe_chooses_when_to_save(tiny_recipe):
    saving = "trainer.callbacks=[{class_path: RunCheckpoint, init_args: {every_n_iterations: 1, keep_previous: false}}]"
    cli = build([str(tiny_recipe), saving])
    assert [callback for callback in cli.trainer.callbacks if isinstance(callback, RunCheckpoint)] == [cli.checkpoints]
    assert cli.checkpoints.every_n_iterations == 1
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert {path.name for path in (cli.folder / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}


# --- SIGTERM ---------------------------------------------------------------------------------------------------------


def at_step(when, action):
    """A module class that does something at the start of one step: ``(iteration, step)``."""

    class Acting(VGRPOModule):
        def training_step(self, batch, batch_idx):
            if (batch.iteration, batch.step) == when:
                action()
            return super().training_step(batch, batch_idx)

    return Acting


UPDATES = [
    "data.updates_per_iteration=2",
    "data.micro_batch_size=2",
    "data.group_size=2",
    "data.prompts_per_iteration=2",
]


@pytest.mark.parametrize(
    ("step", "updates_done", "patient"),
    # Two micro-batches an update. The last time it is killed within the evaluation that follows.
    [(0, 4, True), (1, 5, True), (3, 6, True), (3, 6, False)],
)
def test_sigterm_saves_after_the_micro_batch_under_way_and_the_run_goes_on_bit_for_bit(
    tiny_recipe, capfd, step, updates_done, patient
):
    words = [str(tiny_recipe), *UPDATES, "trainer.max_epochs=4", "trainer.callbacks=[EMA]"]
    assert run([*words, "run_dir=whole"]) == 0
    cli = build([*words, "run_dir=cut"])
    cli.model.__class__ = at_step((2, step), lambda: signal.raise_signal(signal.SIGTERM))
    if not patient:
        cli.model.on_validation_start = lambda: sys.exit() if cli.checkpoints.terminated else None
    cli.save_recipe()
    before = signal.getsignal(signal.SIGTERM)
    assert train(cli) == 143
    cli.give_back()
    assert signal.getsignal(signal.SIGTERM) == before
    err = capfd.readouterr().err.strip()
    assert err.splitlines()[-1] == (
        "Terminated: cut/checkpoints/interrupted.ckpt is saved. Continue: lightning run cut/config.yaml --resume"
    )
    assert "Traceback" not in err
    assert torch.load("cut/checkpoints/interrupted.ckpt", weights_only=True)["global_step"] == updates_done
    assert json.loads((cli.folder / "summary.json").read_text())["outcome"] == "interrupted"
    assert run(["cut/config.yaml", "--resume"]) == 0
    ends = [torch.load(f"{name}/checkpoints/last.ckpt", weights_only=True) for name in ("whole", "cut")]
    for name, value in ends[0]["state_dict"].items():
        assert torch.equal(value, ends[1]["state_dict"][name]), name
    averages = [end["callbacks"][next(key for key in end["callbacks"] if key.startswith("EMA"))] for end in ends]
    for name, value in averages[0]["average"].items():
        assert torch.equal(value, averages[1]["average"][name]), name


def test_sigterm_in_the_last_iteration_lets_the_run_end(tiny_recipe):
    cli = build([str(tiny_recipe), "data.heldout=null"])
    cli.model.__class__ = at_step((1, 1), lambda: signal.raise_signal(signal.SIGTERM))
    assert train(cli) == 0
    assert torch.load("runs/tiny/checkpoints/last.ckpt", weights_only=True)["global_step"] == 2


def test_before_training_sigterm_stops_at_once(tiny_recipe, capfd):
    cli = build([str(tiny_recipe)])
    cli.model.on_fit_start = lambda: signal.raise_signal(signal.SIGTERM)
    assert train(cli) == 143
    assert "Terminated: nothing new was saved. Continue: " in capfd.readouterr().err


# --- a full disk -----------------------------------------------------------------------------------------------------

FILLING = """
import resource
from lightning.pytorch import Callback


def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class Filling(Callback):
    # Files stop growing at this size, as on a full disk: large enough for a table, too small for a checkpoint.
    def __init__(self, start: int, stop: int):
        self.start, self.stop = start, stop

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.start:
            limit(200_000)
        if trainer.current_epoch == self.stop:
            limit(resource.RLIM_INFINITY)
"""


@pytest.mark.parametrize(("stop", "ranks"), [(3, 1), (9, 1), pytest.param(9, 2, marks=pytest.mark.slow)])
def test_a_full_disk_leaves_what_was_saved(tiny_recipe, tmp_path, stop, ranks):
    (tmp_path / "filling.py").write_text(FILLING)
    callbacks = "{class_path: RunCheckpoint, init_args: {every_n_iterations: 1}}, {class_path: filling.Filling, "
    words = [f"trainer.callbacks=[{callbacks}init_args: {{start: 2, stop: {stop}}}}}]", "trainer.max_epochs=4"]
    words += ["trainer.devices=2", "trainer.strategy=ddp"] if ranks == 2 else []
    command = [PYTHON, "-m", "lit_vgrpo", "run", str(tiny_recipe), "data.heldout=null", *words]
    done = subprocess.run(command, text=True, timeout=240, capture_output=True, check=False)
    failed = [line for line in done.stderr.splitlines() if line.startswith("Cannot save")]
    assert len(failed) == (1 if stop == 3 else 2), done.stderr
    assert "Cannot save runs/tiny/checkpoints/last.ckpt: File too large (" in failed[0]
    kept = "What was saved before stays: last.ckpt, previous.ckpt. "
    assert failed[0].endswith(f"{kept}The next save tries again.")
    assert stop == 3 or failed[1].endswith(f"{kept}Make room and take up the run again with --resume.")
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if stop == 3 else 1), done.stderr
    folder = Path("runs/tiny/checkpoints")
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", "previous.ckpt"]
    steps = [torch.load(folder / name, weights_only=True)["global_step"] for name in ("previous.ckpt", "last.ckpt")]
    assert steps == ([2, 4] if stop == 3 else [1, 2])
