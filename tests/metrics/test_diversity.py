import math

import pytest
import torch

from lit_vgrpo.metrics import diversity


def test_distances_by_hand():
    features = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])
    assert diversity(features, [0, 0, 0])[0] == pytest.approx((1 + 2 + 1) / 3)
    pairs = [5**0.5, 4, 13**0.5]
    assert diversity(features, [0, 0, 0], "euclidean")[0] == pytest.approx(sum(pairs) / 3)


def test_only_images_of_one_prompt_are_compared():
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 5.0], [1.0, 1.0]])
    found = diversity(features, ["a", "b", "a", "b", "c"])
    assert list(found) == ["a", "b", "c"]
    assert found["a"] == pytest.approx(0, abs=1e-12)
    assert found["b"] == pytest.approx(0, abs=1e-12)
    assert math.isnan(found["c"])
    assert diversity(features[:2], ["a", "a"])["a"] == pytest.approx(1)
