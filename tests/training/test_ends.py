"""Ends of a run that nobody asked for: none of them has status 0."""

import json
from pathlib import Path

import pytest
from commands import run
from lightning.pytorch import Callback

from lit_vgrpo.launch.build import build
from lit_vgrpo.launch.train import train

pytestmark = pytest.mark.slow


def run_with(tiny_recipe, hook, action, *words):
    """Train three iterations of two updates, and act once in the second, in a hook of a callback."""

    class Acting(Callback):
        pass

    def act(self, trainer, *args):
        if trainer.current_epoch == 1 and not done:
            done.append(True)
            action(trainer)

    done = []
    setattr(Acting, hook, act)
    settings = ["trainer.max_epochs=3", "data.updates_per_iteration=2", "data.heldout=null", *words]
    cli = build([str(tiny_recipe), *settings])
    cli.save_recipe()
    cli.trainer.callbacks.insert(0, Acting())
    return cli, train(cli)


def raising(error):
    def act(trainer):
        raise error

    return act


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_epoch_end"])
@pytest.mark.parametrize("error", [SystemExit(0), StopIteration()])
def test_an_error_that_looks_like_an_end_fails_the_run(tiny_recipe, capfd, hook, error):
    cli, status = run_with(tiny_recipe, hook, raising(error))
    assert status == 1
    err = capfd.readouterr().err
    assert f"{type(error).__name__}" in err
    assert err.splitlines()[-1].startswith("Training failed. Nothing was saved yet. Start again: ")
    if isinstance(error, SystemExit):
        assert json.loads((cli.folder / "summary.json").read_text())["outcome"] == "failed"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's writer
def test_a_folder_that_is_renamed_leaves_one_that_can_be_continued(tiny_recipe, capfd):
    cli, status = run_with(tiny_recipe, "on_train_batch_start", lambda trainer: Path("runs/tiny").rename("elsewhere"))
    assert status == 1
    out, err = capfd.readouterr()
    assert "runs/tiny was renamed or deleted during training." in err
    assert "What was saved since is in runs/tiny: summary.json, metrics.csv, checkpoints." in out
    assert (cli.folder / "metrics.csv").read_text().count("\n") == 4
    cli.give_back()
    assert run([str(cli.folder / "config.yaml"), "--resume", "trainer.max_epochs=4"]) == 0


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_a_deleted_recipe_is_written_again(tiny_recipe, capfd, end):
    def delete(trainer):
        Path("runs/tiny/config.yaml").unlink()
        if end == "failed":
            raise OSError("a full disk")

    cli, status = run_with(tiny_recipe, "on_train_epoch_end", delete)
    assert status == (end == "failed")
    assert capfd.readouterr().err.count("runs/tiny/config.yaml was deleted, and is written again.") == 1
    cli.give_back()
    assert run(["runs/tiny/config.yaml", "--resume", "trainer.max_epochs=4"]) == 0
