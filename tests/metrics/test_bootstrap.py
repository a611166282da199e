import math

import numpy as np
import pytest
import torch

from lit_vgrpo.metrics import bootstrap_interval


def test_the_interval_is_as_wide_as_the_normal_one():
    values = np.random.default_rng(0).normal(3, 2, 400)
    low, high = bootstrap_interval(values.tolist())
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    narrow = bootstrap_interval(values.tolist(), level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_prompts_are_resampled_whole():
    """Ten equal images a prompt tell no more than one: the interval is that of the prompts' means."""
    means = np.random.default_rng(0).normal(0, 1, 30)
    images, prompts = means.repeat(10), np.arange(30).repeat(10)
    whole = bootstrap_interval(images.tolist(), prompts.tolist())
    assert whole == pytest.approx(bootstrap_interval(means.tolist()))
    alone = bootstrap_interval(images.tolist())
    assert whole[1] - whole[0] > 2.5 * (alone[1] - alone[0])
    assert bootstrap_interval(torch.tensor(images), torch.tensor(prompts)) == whole


def test_failed_images_are_left_out():
    kept = bootstrap_interval([1.0, 2.0, 4.0], ["a", "a", "b"])
    assert bootstrap_interval([1.0, 2.0, math.nan, 4.0, math.nan], ["a", "a", "b", "b", "c"]) == kept
    assert all(math.isnan(end) for end in bootstrap_interval([math.nan]))
    assert all(math.isnan(end) for end in bootstrap_interval([]))


def test_one_prompt_weighs_by_its_images():
    """A resample's mean is over its images: 3 of one prompt against 1 of the other."""
    low, high = bootstrap_interval([0.0, 0.0, 0.0, 1.0], ["a", "a", "a", "b"], level=0.3)
    assert (low, high) == (0.25, 0.25)
