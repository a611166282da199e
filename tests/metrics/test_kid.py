import math

import pytest
import torch
from cleanfid import fid as clean_fid

from lit_vgrpo.metrics import KeptFeatures, kernel_distance


@pytest.fixture
def both():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 5, generator=generator), torch.randn(30, 5, generator=generator) + 0.5


def test_equals_clean_fid_on_whole_sets(both):
    x, y = both[0][:30], both[1]
    expected = clean_fid.kernel_distance(y.numpy(), x.numpy())
    assert kernel_distance(x, y) == pytest.approx(expected, rel=1e-4)


def test_the_whole_sets_by_hand():
    """Two points on a side, one dimension: the kernel is (x y + 1)^3."""
    x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [2.0]])
    within, across = 1 + 27, (1 + 1 + 8 + 27) / 4
    assert kernel_distance(x, y) == pytest.approx(within - 2 * across)


def test_seeds_fix_the_subsets(both):
    distances = [kernel_distance(*both, subsets=3, subset_size=10, seed=seed) for seed in (1, 1, 2)]
    assert distances[0] == distances[1] != distances[2]


def test_the_random_state_stays(both):
    before = torch.get_rng_state()
    kernel_distance(*both, subsets=2, subset_size=10)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_distribution_is_at_distance_zero():
    features = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    assert abs(kernel_distance(features[:200], features[200:])) < 0.1
    assert math.isnan(kernel_distance(features[:1], features))


def test_features_come_back_in_the_order_of_the_images():
    kept = KeptFeatures(2)
    kept.add(torch.tensor([[5.0, 5.0], [1.0, 1.0]]), [5, 1])
    kept.add(torch.tensor([[3.0, 3.0]], dtype=torch.float64), [3])
    assert kept.gathered().tolist() == [[1, 1], [3, 3], [5, 5]]
    assert KeptFeatures(2).gathered().shape == (0, 2)
