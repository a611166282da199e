import json
import math
import re
import warnings

import pytest
import torch
from feature_networks import SmallNetwork, save_script
from helpers import Brightness, make_data, make_module, make_trainer

from lit_vgrpo import VGRPO, OptimizerConfig, RolloutSpec
from lit_vgrpo.callbacks import RewardHackAlarm, RunSummary
from lit_vgrpo.callbacks.hack_alarm import Divergence, HeldOutDiversity, Measurement, small_pixels
from lit_vgrpo.data.datasets import HeldOutDataset
from lit_vgrpo.metrics import diversity, feature_network
from lit_vgrpo.rewards import JPEGCompressibility, ShapesReward
from lit_vgrpo.training.checkpoint import TRAINED, UNTRAINED, RunCheckpoint


def at(trained, watched, iteration=0):
    return Measurement(iteration, *(torch.as_tensor(value).reshape(-1).double() for value in (trained, watched)))


# --- when the two part -----------------------------------------------------------------------------------------------


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
    watch = Divergence(0.02, 0.02)
    assert [watch.add(at(*values)) for values in evaluations] == in_a_row


def test_a_change_within_the_noise_of_the_images_does_not_count():
    """The mean falls by 0.1; image by image that is once 0.4 standard errors and once many."""
    generator = torch.Generator().manual_seed(0)
    start = torch.rand(64, generator=generator, dtype=torch.float64)
    noise = torch.randn(64, generator=generator, dtype=torch.float64)
    noise -= noise.mean()
    for spread, expected in ((2.0, 0), (0.1, 1)):
        watch = Divergence(0.02, 0.02)
        watch.add(at(-start, start))
        after = start - 0.1 + spread * noise
        assert watch.add(at(1 - start, after)) == expected


def test_other_prompts_start_over():
    watch = Divergence(0.02, 0.02)
    watch.add(at([1.0, 1.0], [1.0, 1.0]))
    assert watch.add(at([2.0, 2.0], [0.5, 0.5])) == 1
    assert watch.add(at([2.0, 2.0], [0.4])) == 0
    assert watch.add(at([2.1, 2.1], [0.3])) == 1


# --- diversity -------------------------------------------------------------------------------------------------------


def observed(observer, images, images_per_prompt):
    """Return an observer's findings on images that come in batches of three."""
    rows = [{"prompt": str(index)} for index in range(len(images) // images_per_prompt)]
    batches = HeldOutDataset(rows, images_per_prompt, 3)
    for index in range(len(batches)):
        observer.update(images[batches[index].slots], batches[index])
    trainer = type("T", (), {"datamodule": make_data(heldout_images_per_prompt=images_per_prompt)})
    return observer.compute(type("M", (), {"trainer": trainer}))["heldout/diversity"]


def test_diversity_of_pixels_is_the_root_mean_square_difference():
    black, white = torch.zeros(3, 40, 40), torch.ones(3, 40, 40)
    grey = torch.full((3, 40, 40), 0.5)
    images = torch.stack([black, white, grey, grey])
    observer = HeldOutDiversity()
    assert observed(observer, images, 2) == pytest.approx(0.5)
    assert observer.of_prompts == pytest.approx([1.0, 0.0], abs=1e-6)
    # Noise finer than the small picture is not seen.
    fine = torch.zeros(1, 3, 64, 64)
    fine[..., ::2] = 1
    assert torch.allclose(small_pixels(fine), small_pixels(torch.full((1, 3, 64, 64), 0.5)))


def test_diversity_of_features_and_of_images_that_are_not_finite(tmp_path):
    torch.manual_seed(1)
    script = str(save_script(SmallNetwork(), tmp_path / "small.pt"))
    images = torch.rand(6, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    images[4, 0, 0, 0] = math.nan
    observer = HeldOutDiversity(script)
    found = observed(observer, images, 2)
    network = feature_network(script)
    expected = diversity(network(images[:4]), [0, 0, 1, 1])
    assert observer.of_prompts[:2] == pytest.approx(list(expected.values()))
    assert math.isnan(observer.of_prompts[2])
    assert found == pytest.approx(sum(expected.values()) / 2)


# --- real runs -------------------------------------------------------------------------------------------------------


def hacked(tmp_path, callbacks, iterations=8, ckpt=None, heldout_limit=8):
    """The tiny task trained to be easily compressed: blank pictures, which hold no shape."""
    module = make_module(
        "shipped:assets/tiny_sd3",
        VGRPO(RolloutSpec(steps=4), num_mc_samples=2, anchor_weight=1.0, anchor_decay=0.3),
        JPEGCompressibility(),
        heldout_reward=ShapesReward(),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    heldout = {"heldout_limit": heldout_limit, "heldout_images_per_prompt": 4}
    data = make_data(prompts_per_iteration=8, group_size=4, micro_batch_size=32, **heldout)
    options = {"gradient_clip_val": 1.0, "enable_checkpointing": True}
    trainer = make_trainer(tmp_path, iterations, [RunCheckpoint(), *callbacks, RunSummary()], **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt)
    return trainer, [str(warning.message) for warning in said if "Reward hacking?" in str(warning.message)]


def test_a_run_that_hacks_its_reward_is_stopped_and_says_why(tmp_path, capfd):
    alarm = RewardHackAlarm(action="stop", diversity="pixels", min_diversity_drop=0.1, patience=2)
    trainer, _ = hacked(tmp_path, [alarm], heldout_limit=12)
    assert trainer.current_epoch == 2
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["outcome"] == "reward hacking"
    lines = [line for line in capfd.readouterr().err.splitlines() if "hacking" in line]
    assert lines == [summary["reason"]]
    assert lines[0].startswith("Reward hacking? Since iteration 0 heldout/reward rose from -0.")
    for name in ("untrained_reward", "diversity"):
        before, after = re.search(rf"while heldout/{name} fell from (0\.\d+) to (0\.\d+)", lines[0]).groups()
        assert float(after) < 0.7 * float(before)
    # the start is not among the checkpoints: of those after it, the first was the best
    best = tmp_path / "checkpoints/best.ckpt"
    assert f"Best checkpoint: {best} (heldout/untrained_reward 0." in lines[0]
    assert "after 1 iteration)" in lines[0]


def test_it_warns_once_and_a_resumed_run_goes_on_with_its_history(tmp_path):
    first = RewardHackAlarm(patience=2)
    trainer, said = hacked(tmp_path, [first], 1)
    assert not said
    assert first.watches[UNTRAINED].in_a_row == 1
    assert len(first.watches[UNTRAINED].reference.watched) == 32  # image by image
    saved = tmp_path / "one.ckpt"
    trainer.save_checkpoint(saved)
    resumed = RewardHackAlarm(patience=2)
    trainer, said = hacked(tmp_path, [resumed], 3, saved)
    assert trainer.current_epoch == 3
    assert len(said) == 1, said
    assert "Since iteration 0 heldout/reward rose from -0.9" in said[0]
    assert "down for 2 evaluations in a row" in said[0]
    before, after = (alarm.watches[UNTRAINED].reference for alarm in (first, resumed))
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(before, after, strict=True))
    assert resumed.watches[UNTRAINED].in_a_row == 3


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_change": 1.0}, "min_change=1.0: Input should be less than 1"),
        ({"metric": None}, "metric=null leaves nothing to compare"),
        ({"metric": TRAINED}, "is the trained reward"),
    ],
)
def test_arguments(options, said):
    with pytest.raises(ValueError, match=said):
        RewardHackAlarm(**options)


@pytest.mark.parametrize(
    ("options", "data", "heldout_reward", "errors"),
    [
        ({}, {}, None, ["Add model.heldout_reward, such as PickScore, or the alarm's diversity=pixels."]),
        ({}, {}, Brightness(), []),
        ({"diversity": "pixels"}, {"heldout_images_per_prompt": 2}, None, []),
        ({"diversity": "pixels"}, {}, None, ["Set data.heldout_images_per_prompt=4 or more"]),
        ({}, {"heldout": None}, Brightness(), ["there are none. Set data.heldout."]),
    ],
)
def test_what_is_missing_is_said_before_anything_is_loaded(tiny_sd3, tmp_path, options, data, heldout_reward, errors):
    module = make_module(tiny_sd3, reward=JPEGCompressibility(), heldout_reward=heldout_reward)
    data = make_data(**data)
    alarm = RewardHackAlarm(**options)
    found = alarm.check(module, data)
    assert len(found) == len(errors)
    assert all(said in error for said, error in zip(errors, found, strict=True))
    if errors:
        with pytest.raises(ValueError, match=found[0][:40]):
            make_trainer(tmp_path, 1, [alarm]).fit(module, datamodule=data)
        assert not module.policy.loaded
