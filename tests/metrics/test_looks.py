"""Diversity, sharpness and saturation of held-out images, and their distance from those at the start."""

import math

import pytest
import torch
from helpers import make_data, make_module, make_trainer

from lit_vgrpo.core.records import FINGERPRINT
from lit_vgrpo.data.datasets import HeldOutDataset
from lit_vgrpo.metrics.looks import LOOKS, distances, diversities, reduced, saturation, sharpness
from lit_vgrpo.rewards.combine import RESERVED_NAMES
from lit_vgrpo.training.evaluation import Looks


def plain(*levels):
    """Return a grey image per level, ``(B, 3, 32, 32)``."""
    return torch.tensor(levels).reshape(-1, 1, 1, 1).expand(-1, 3, 32, 32)


def test_no_reward_has_the_name_of_a_metric_or_of_a_column_of_eval():
    assert {*LOOKS, FINGERPRINT, "reward_std", "prompt", "image", "variant"} <= RESERVED_NAMES


def test_sharpness_and_saturation_of_known_images():
    stripes = torch.zeros(1, 3, 32, 32)
    stripes[..., ::2] = 1
    red = torch.zeros(1, 3, 32, 32)
    red[:, 0] = 0.5
    images = torch.cat([plain(0.3), stripes, red])
    assert sharpness(images).tolist() == pytest.approx([0, 1, 0])
    assert saturation(images).tolist() == pytest.approx([0, 0, 0.5])
    # Detail finer than the reduced image changes neither diversity nor distance.
    assert torch.equal(reduced(stripes), reduced(plain(0.5)))
    assert distances(reduced(plain(0.0, 1.0)), reduced(plain(1.0, 1.0))).tolist() == [1.0, 0.0]


def test_diversity_across_prompts_leaves_out_the_noise_within_them():
    generator = torch.Generator().manual_seed(0)
    noise = 20 * torch.randn(200, 768, generator=generator)
    level = torch.tensor([100.0, 150.0]).repeat_interleave(100)[:, None]
    prompts = torch.tensor([7, 8]).repeat_interleave(100)
    within, across = diversities(noise + level, prompts)
    assert within == pytest.approx(20 * 2**0.5 / 255, rel=0.01)
    assert across == pytest.approx(50 / 255, rel=0.01)
    assert diversities(noise, prompts)[1] < 0.01
    within, across = diversities(plain(0.0, 1.0).flatten(1)[:, :768] * 255, torch.tensor([0, 1]))
    assert math.isnan(within)
    assert across == pytest.approx(1)
    assert all(map(math.isnan, diversities(torch.zeros(0, 768), torch.zeros(0, dtype=torch.int64))))


def test_images_come_in_any_order_and_those_that_are_not_finite_are_left_out():
    images = plain(0.0, 0.2, 1.0, math.nan)
    dataset = HeldOutDataset([{"prompt": "a"}, {"prompt": "b"}], 2, 2)
    looks = Looks()
    for number in (1, 0):
        looks.update(images[dataset[number].slots], dataset[number])
    found = looks.compute(None)
    assert found["heldout/diversity_within_prompts"] == pytest.approx(0.2)
    to_start = distances(looks.newest.float(), reduced(plain(0.0, 0.0, 0.0, 0.0)))
    assert to_start.nanmean() == pytest.approx(0.4, rel=1e-3)
    assert found["heldout/saturation"] == 0


@pytest.mark.slow
def test_a_resumed_run_keeps_the_images_of_its_start(tiny_sd3, tmp_path):
    def trained(iterations, ckpt=None):
        module = make_module(tiny_sd3)
        trainer = make_trainer(tmp_path, iterations)
        trainer.fit(module, datamodule=make_data(), ckpt_path=ckpt)
        trainer.save_checkpoint(tmp_path / f"{iterations}.ckpt")
        return module.evaluator

    whole, _ = trained(2), trained(1)
    resumed = trained(2, tmp_path / "1.ckpt")
    assert whole.latest["heldout/distance_to_start"] > 0
    # Two prompts with one image each have no diversity within them.
    assert {name for name in LOOKS if f"heldout/{name}" not in whole.latest} == {"diversity_within_prompts"}
    assert resumed.latest == whole.latest
