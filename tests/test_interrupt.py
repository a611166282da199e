"""Checkpoints of a run; Ctrl-C itself is tried through the command in test_cli.py."""

import signal

import pytest

from lit_vgrpo.cli import build
from lit_vgrpo.interrupt import RunCheckpoint


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
    save = cli.trainer.save_checkpoint
    cli.trainer.save_checkpoint = lambda path: (saved.append(cli.trainer.current_epoch + 1), save(path))
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    assert saved == [2, 3]
    assert [path.name for path in (cli.folder / "checkpoints").iterdir()] == ["last.ckpt"]
