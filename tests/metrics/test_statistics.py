"""KID, diversity, and the confidence interval of a mean."""

import math

import numpy as np
import pytest
import torch
from cleanfid import fid as clean_fid

from lit_vgrpo.metrics import KeptFeatures, bootstrap_interval, diversity, kernel_distance


@pytest.fixture
def both():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 5, generator=generator), torch.randn(30, 5, generator=generator) + 0.5


def test_kid_equals_clean_fid_on_whole_sets(both):
    x, y = both[0][:30], both[1]
    expected = clean_fid.kernel_distance(y.numpy(), x.numpy())
    assert kernel_distance(x, y) == pytest.approx(expected, rel=1e-4)


def test_kid_of_whole_sets_by_hand():
    """Two points on a side, one dimension: the kernel is (x y + 1)^3."""
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]])
    within, across = 1 + 27, (1 + 1 + 8 + 27) / 4
    assert kernel_distance(x, y) == pytest.approx(within - 2 * across)
    assert math.isnan(kernel_distance(x[:1], y))


def test_the_subsets_are_fixed_and_the_random_state_stays(both):
    before = torch.get_rng_state()
    first = kernel_distance(*both)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert kernel_distance(*both) == first


def test_features_come_back_in_the_order_of_the_images():
    kept = KeptFeatures(2)
    kept.add(torch.tensor([[5.0, 5.0], [1.0, 1.0]]), [5, 1])
    kept.add(torch.tensor([[3.0, 3.0]], dtype=torch.float64), [3])
    assert kept.gathered().tolist() == [[1, 1], [3, 3], [5, 5]]
    assert KeptFeatures(2).gathered().shape == (0, 2)


def test_diversity_is_that_of_the_images_of_one_prompt():
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0], [0.0, 5.0], [-3.0, 0.0], [1.0, 1.0]])
    found = diversity(features, ["a", "b", "a", "b", "a", "c"])
    assert list(found) == ["a", "b", "c"]
    assert (found["a"], found["b"]) == pytest.approx(((1 + 2 + 1) / 3, 0), abs=1e-12)
    assert math.isnan(found["c"])


def test_the_interval_is_as_wide_as_the_normal_one():
    values = np.random.default_rng(0).normal(3, 2, 400)
    low, high = bootstrap_interval(values.tolist())
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    narrow = bootstrap_interval(values.tolist(), level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_prompts_are_resampled_whole():
    """Ten equal images per prompt add no information: the interval is that of the prompts' means."""
    means = np.random.default_rng(0).normal(0, 1, 30)
    images, prompts = means.repeat(10), np.arange(30).repeat(10)
    whole = bootstrap_interval(images.tolist(), prompts.tolist())
    assert whole == pytest.approx(bootstrap_interval(means.tolist()))
    alone = bootstrap_interval(images.tolist())
    assert whole[1] - whole[0] > 2.5 * (alone[1] - alone[0])
    assert bootstrap_interval(torch.tensor(images), torch.tensor(prompts)) == whole
    names = [f"prompt {(7 * number) % 41}" for number in prompts.tolist()]
    assert bootstrap_interval(images.tolist(), names) == whole  # in another order


def test_failed_images_are_left_out():
    kept = bootstrap_interval([1.0, 2.0, 4.0], ["a", "a", "b"])
    assert bootstrap_interval([1.0, 2.0, math.nan, 4.0, math.nan], ["a", "a", "b", "b", "c"]) == kept
    for values, prompts in (([math.nan], ["a"]), ([1.0, 2.0, math.nan], ["a", "a", "b"])):  # at most one prompt
        assert all(math.isnan(end) for end in bootstrap_interval(values, prompts))
    assert all(math.isnan(end) for end in bootstrap_interval([]))


def test_one_prompt_weighs_by_its_images():
    """A resample averages over images: 3 from one prompt, 1 from the other."""
    low, high = bootstrap_interval([0.0, 0.0, 0.0, 1.0], ["a", "a", "a", "b"], level=0.3)
    assert (low, high) == (0.25, 0.25)
