import json
import math
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from helpers import Breaking, make_data, make_module, make_trainer

from lit_vgrpo.callbacks import CollapseStop, RewardHackAlarm, RunSummary
from lit_vgrpo.callbacks.hack_alarm import IMAGES
from lit_vgrpo.core.records import Evaluation
from lit_vgrpo.launch.build import build
from lit_vgrpo.launch.train import train
from lit_vgrpo.rewards import Reward
from lit_vgrpo.training.checkpoint import RunCheckpoint


class Scripted(Reward):
    """The rewards of a task that is lost: constant images for training, or a held-out mean that falls."""

    name = "scripted"

    @classmethod
    def of(cls, spread=1.0, heldout=()):
        made = cls()
        made._spread, made._heldout = spread, list(heldout)  # state, not options, which would make it another reward
        return made

    def __call__(self, images, prompts, rows):
        if len(images) == HELDOUT and self._heldout:
            return torch.full((len(images),), self._heldout.pop(0))
        return torch.arange(len(images)).float() * self._spread


HELDOUT = 2  # images; an iteration has 8


def run(folder, tmp_path, reward, stop, iterations=6, ckpt=None, saver=None, **options):
    module = make_module(folder, reward=reward, policy_options={"decode_batch_size": 8}, **options)
    callbacks = [stop, RunSummary(), saver or RunCheckpoint()]
    trainer = make_trainer(tmp_path, iterations, callbacks, enable_checkpointing=True)
    trainer.fit(module, datamodule=make_data(heldout_limit=HELDOUT), ckpt_path=ckpt)
    return trainer


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def test_a_run_without_reward_spread_ends(tiny_sd3, tmp_path, capfd):
    trainer = run(tiny_sd3, tmp_path, Scripted.of(0.0), CollapseStop(patience=3, drop=None))
    assert trainer.current_epoch == 3
    summary = summary_of(tmp_path)
    assert summary["outcome"] == "collapsed"
    assert summary["reason"].startswith("Collapsed: no group has had reward spread for 3 iterations, ")
    assert summary["reason"] in capfd.readouterr().err.splitlines()
    assert (tmp_path / "checkpoints/last.ckpt").exists()  # as after any other stop


def test_only_iterations_in_a_row_count(tiny_sd3, tmp_path):
    class NowAndThen(Scripted):
        spreads = iter([0.0, 0.0, 1.0, 0.0, 0.0])

        def __call__(self, images, prompts, rows):
            self._spread = next(self.spreads) if len(images) != HELDOUT else 0.0
            return super().__call__(images, prompts, rows)

    stop = CollapseStop(patience=3, drop=None)
    assert run(tiny_sd3, tmp_path, NowAndThen.of(), stop, 5).current_epoch == 5
    assert summary_of(tmp_path)["outcome"] == "finished"
    assert stop.flat_iterations == 2


UNIT = math.sqrt(sum((i - 3.5) ** 2 for i in range(8)) / 8)  # of the rewards 0 to 7


@pytest.mark.slow
def test_a_fall_is_measured_by_the_spread_of_the_first_rewards(tiny_sd3, tmp_path, capfd):
    """Best at iteration 1; then 0.9 of the unit below it, which is not enough, and twice 1.1 of it."""
    means = [0.0, 5.0, 5.0 - 0.9 * UNIT, 5.0 - 1.1 * UNIT, 5.0 - 1.1 * UNIT, 9.0]
    reward = Scripted.of(100.0, [100 * mean for mean in means])
    trainer = run(tiny_sd3, tmp_path, reward, CollapseStop())
    assert trainer.current_epoch == 4
    said = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("Collapsed"))
    assert "1.1 times the standard deviation of the first iteration's rewards below the 5" in said
    assert "of iteration 1, and has been low for 2 evaluations in a row." in said
    best = tmp_path / "checkpoints/best.ckpt"
    assert f"Best checkpoint: {best} (heldout/reward 5" in said
    again = f"lightning run {tmp_path}/config.yaml ckpt_path={best}"
    assert said.endswith(f"after 1 iteration). Continue from it in a new folder: {again}")
    assert torch.load(best, weights_only=True)["global_step"] == 1


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_best_and_the_count(tiny_sd3, tmp_path):
    first = CollapseStop()
    evaluator = run(tiny_sd3, tmp_path, Scripted.of(1.0, [0.0, 5.0, 0.0]), first, 2).lightning_module.evaluator
    assert [one.reward for one in evaluator.comparable] == [0.0, 5.0, 0.0]
    assert first.low_evaluations == 1
    resumed, saver = CollapseStop(), RunCheckpoint()
    reward = Scripted.of(1000.0, [0.0, 0.0, 0.0])  # another spread: the unit is that of the start
    last = tmp_path / "checkpoints/last.ckpt"
    assert run(tiny_sd3, tmp_path / "again", reward, resumed, 5, last, saver).current_epoch == 3
    assert resumed.outcome == "collapsed"
    assert resumed.unit == pytest.approx(UNIT)
    # The best checkpoint was not copied, so the best of the new folder is its own.
    assert (saver.best.value, saver.best.iteration) == (0.0, 3)
    assert torch.load(tmp_path / "again/checkpoints/best.ckpt", weights_only=True)["global_step"] == 3


def test_weights_that_are_not_finite_end_the_run_before_they_are_saved(tiny_recipe, capfd):
    cli = build([str(tiny_recipe), "trainer.max_epochs=4", "trainer.callbacks=[CollapseStop]", "run_dir=run"])
    cli.checkpoints.every_n_iterations = 1
    cli.trainer.callbacks.insert(0, Breaking())
    assert train(cli) == 1
    err = capfd.readouterr().err
    assert "Weights are not finite after update 1 of iteration 2. Nothing was saved after it." in err
    assert "Traceback" not in err
    assert "ckpt_path=run/checkpoints/best.ckpt" in err
    assert summary_of(cli.folder)["outcome"] == "collapsed"
    saved = torch.load(cli.folder / "checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == 1
    assert all(value.isfinite().all() for value in saved["state_dict"].values())


def test_a_second_fit_starts_over_with_the_same_callbacks_and_module(tiny_sd3, tmp_path):
    class Fails(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            raise ValueError("a callback of the user's")

    module, alarm = make_module(tiny_sd3, reward=Scripted.of(0.0)), RewardHackAlarm()
    callbacks = [CollapseStop(patience=2), RunSummary(), alarm]
    with pytest.raises(ValueError, match="of the user's"):
        make_trainer(tmp_path / "1", 1, [*callbacks, Fails()]).fit(module, datamodule=make_data())
    alarm.warnings, alarm.watches[IMAGES].in_a_row = ["Reward hacking?"], 2
    make_trainer(tmp_path / "2", 2, callbacks).fit(module, datamodule=make_data())
    first = summary_of(tmp_path / "2")
    assert first["reason"].startswith("Collapsed: no group has had reward spread for 2 iterations, ")
    assert (first["alarms"], alarm.watches[IMAGES].in_a_row, first["images"]) == ([], 0, 16)
    make_trainer(tmp_path / "3", 1, callbacks).fit(module, datamodule=make_data())
    second = summary_of(tmp_path / "3")
    assert (second["outcome"], second.get("reason")) == ("finished", None)
    assert (second["evaluations"][0]["images"], second["evaluations"][0]["passes"]) == (0, 0)


def test_low_evaluations_of_other_images_do_not_count(tiny_sd3):
    stop, module = CollapseStop(), make_module(tiny_sd3)
    stop.unit, module.evaluator.step = 1.0, 0
    for images, reward in ((1, 9.0), (2, 9.0), (2, 0.0), (1, 0.0)):
        module.evaluator.history.append(Evaluation(0, reward, 0, 0, 0.0, 0.0, 0, fingerprint=images))
        stop._fallen(SimpleNamespace(global_step=0), module)
    assert stop.low_evaluations == 1
