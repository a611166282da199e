import json
import math
import re
import warnings

import pytest
import torch
from helpers import make_data, make_module, make_trainer

from lit_vgrpo import VGRPO, OptimizerConfig, RolloutSpec
from lit_vgrpo.callbacks import ProgressBar, RewardHackAlarm, RunSummary
from lit_vgrpo.callbacks.hack_alarm import Divergence, Measurement
from lit_vgrpo.core.records import Evaluation
from lit_vgrpo.rewards import JPEGCompressibility, ShapesReward
from lit_vgrpo.training.checkpoint import TRAINED, UNTRAINED, RunCheckpoint


def at(trained, watched, iteration=0):
    return Measurement(iteration, *(torch.as_tensor(value).reshape(-1).double() for value in (trained, watched)))


@pytest.mark.parametrize(
    ("evaluations", "in_a_row"),
    [
        ([(1.0, 1.0), (1.1, 0.9), (1.2, 0.8), (1.3, 0.7), (1.0, 1.0), (1.1, 0.9)], [0, 1, 2, 3, 0, 1]),
        # it rose first: what counts is the fall from there
        ([(1.0, 1.0), (1.1, 2.0), (1.2, 1.5), (1.3, 1.6)], [0, 0, 1, 2]),
        # both fall: worse, but no reward is being hacked
        ([(1.0, 1.0), (0.9, 0.9), (0.8, 0.8)], [0, 0, 0]),
        # less than two in a hundred
        ([(1.0, 1.0), (1.1, 0.99), (1.01, 0.5)], [0, 0, 0]),
        # an evaluation that failed says nothing
        ([(1.0, 1.0), (1.1, 0.9), (math.nan, 0.9), (1.1, math.nan), (1.1, 0.9)], [0, 1, 1, 1, 2]),
        # below zero too the size is what counts
        ([(-1.0, -1.0), (-0.9, -1.01), (-0.9, -1.03)], [0, 0, 1]),
    ],
)
def test_evaluations_in_a_row(evaluations, in_a_row):
    watch = Divergence()
    assert [watch.add(at(*values)) for values in evaluations] == in_a_row


def test_a_change_within_the_noise_of_the_images_does_not_count():
    """The mean falls by 0.1; image by image that is once 0.4 standard errors and once many."""
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(64, generator=generator, dtype=torch.float64)
    noise = torch.randn(64, generator=generator, dtype=torch.float64)
    noise -= noise.mean()
    for spread, expected in ((2.0, 0), (0.1, 1)):
        watch = Divergence()
        watch.add(at(-start, start))
        after = start - 0.1 + spread * noise
        assert watch.add(at(1 - start, after)) == expected


def test_other_prompts_start_over():
    watch = Divergence()
    watch.add(at([1.0, 1.0], [1.0, 1.0]))
    assert watch.add(at([2.0, 2.0], [0.5, 0.5])) == 1
    assert watch.add(at([2.0, 2.0], [0.4])) == 0
    assert watch.add(at([2.1, 2.1], [0.3])) == 1


def test_an_evaluation_without_scores_repeats_no_warning(tiny_sd3, tmp_path):
    alarm, module, trainer = RewardHackAlarm(), make_module(tiny_sd3), make_trainer(tmp_path)
    module.evaluator.step = 0
    with pytest.warns(UserWarning, match="Reward hacking?"):
        for number, (trained, watched) in enumerate([(0.0, 1.0), (1.0, 0.5), (2.0, 0.4), (3.0, math.nan)]):
            module.evaluator.latest = {TRAINED: trained, UNTRAINED: watched}
            module.evaluator.history.append(Evaluation(number, trained, 0, 0, 0.0, 0.0, 0))
            alarm._judge(trainer, module)
    assert len(alarm.warnings) == 1


def hacked(tmp_path, callbacks, iterations=8, ckpt=None, heldout_limit=8, **options):
    """The tiny task trained to be easily compressed: blank pictures, which hold no shape."""
    module = make_module(
        "shipped:assets/tiny_sd3",
        VGRPO(RolloutSpec(steps=4), num_mc_samples=2, anchor_weight=1.0, anchor_decay=0.3),
        JPEGCompressibility(),
        untrained_reward=ShapesReward(),
        optimizer=OptimizerConfig(lr=1e-3),
        gradient_clip_val=1.0,
    )
    heldout = {"heldout_limit": heldout_limit, "heldout_images_per_prompt": 4}
    data = make_data(prompts_per_iteration=8, group_size=4, micro_batch_size=32, **heldout)
    options = {"enable_checkpointing": True, **options}
    trainer = make_trainer(tmp_path, iterations, [RunCheckpoint(), *callbacks, RunSummary()], **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    return trainer, [str(warning.message) for warning in said if "Reward hacking?" in str(warning.message)]


@pytest.mark.slow
def test_a_run_that_hacks_its_reward_is_stopped_and_says_why(tmp_path, capfd):
    trainer, _ = hacked(tmp_path, [RewardHackAlarm(action="stop")], heldout_limit=12)
    assert trainer.current_epoch == 2
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["outcome"] == "reward hacking"
    lines = [line for line in capfd.readouterr().err.splitlines() if "hacking" in line]
    assert lines == [summary["reason"]]
    assert summary["reason"].startswith(" ".join(summary["alarms"]))
    assert lines[0].startswith("Reward hacking? Since iteration 0 heldout/reward rose from -0.")
    before, after = re.search(r"and heldout/untrained_reward fell from (0\.\d+) to (0\.\d+)", lines[0]).groups()
    assert float(after) < 0.7 * float(before)
    assert "and images of different prompts became alike" in lines[0]
    # The summary judges by the same limits.
    cheating = summary["did_it_cheat"]
    assert cheating["is_likely"]
    assert cheating["signs"][0] == "images of different prompts became alike"
    assert cheating["signs"][-1] == "the untrained reward fell"
    best = tmp_path / "checkpoints/best.ckpt"
    assert f"Best checkpoint: {best} (heldout/untrained_reward 0." in lines[0]
    assert "after 0 iterations)" in lines[0]


@pytest.mark.slow
def test_it_warns_once_and_a_resumed_run_goes_on_with_its_history(tmp_path, capfd):
    first = RewardHackAlarm(patience=2)
    trainer, said = hacked(tmp_path, [first], 1)
    assert not said
    assert first.watches[UNTRAINED].in_a_row == 1
    assert len(first.watches[UNTRAINED].reference.watched) == 32  # image by image
    saved = tmp_path / "one.ckpt"
    trainer.save_checkpoint(saved)
    resumed = RewardHackAlarm(patience=2)
    trainer, said = hacked(tmp_path, [resumed, ProgressBar()], 3, saved, enable_progress_bar=True)
    assert trainer.current_epoch == 3
    assert len(said) == 1, said
    assert "Since iteration 0 heldout/reward rose from -0.9" in said[0]
    assert "for 2 evaluations in a row" in said[0]
    assert capfd.readouterr().err.count("alarm reward hacking?") == 2  # iterations 2 and 3
    assert json.loads((tmp_path / "summary.json").read_text())["alarms"] == resumed.warnings
    assert len(resumed.warnings) == 2
    before, after = (alarm.watches[UNTRAINED].reference for alarm in (first, resumed))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(before, after, strict=True))
    assert resumed.watches[UNTRAINED].in_a_row == 3


def test_the_trained_reward_is_no_other_and_without_held_out_images_it_rests(tiny_sd3, tmp_path):
    with pytest.raises(ValueError, match="is the trained reward"):
        RewardHackAlarm(metric=TRAINED)
    with pytest.raises(ValueError, match="metric=heldout/fid@8 is better when lower"):
        RewardHackAlarm(metric="heldout/fid@8")
    alarm, module = RewardHackAlarm(), make_module(tiny_sd3, reward=JPEGCompressibility())
    make_trainer(tmp_path, 1, [alarm]).fit(module, datamodule=make_data(heldout=None))
    assert not alarm.warnings
