import math

import numpy as np
import pytest
import torch

from lit_vgrpo.core.advantages import combined_advantages, group_advantages, mean_score, no_spread_share

REWARDS = torch.tensor([0.1, 0.7, 0.4, 2.0, 1.0, 1.5])
GROUPS = torch.tensor([7, 7, 7, 3, 3, 3])


@pytest.mark.parametrize("std", ["global", "group"])
def test_equals_the_formula_in_float64(std):
    rewards = REWARDS.double().numpy()
    expected = np.empty(6)
    for group in (7, 3):
        members = (group == GROUPS).numpy()
        scale = rewards.std() if std == "global" else rewards[members].std()
        expected[members] = (rewards[members] - rewards[members].mean()) / (scale + 1e-4)
    np.testing.assert_allclose(group_advantages(REWARDS, GROUPS, std).numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("std", ["global", "group"])
def test_a_group_without_spread_gets_exactly_zero(std):
    rewards = torch.tensor([0.3, 0.3, 0.3, 0.1, 0.2, 0.9])
    advantages = group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 1]), std)
    assert advantages[:3].tolist() == [0, 0, 0]
    assert advantages[3:].abs().min() > 0


@pytest.mark.parametrize("aggregate", ["rewards", "advantages"])
def test_each_source_is_normalised_as_if_it_were_alone(aggregate):
    rewards = torch.cat([REWARDS, 100 * REWARDS.flip(0)])
    groups, sources = torch.cat([GROUPS, GROUPS + 1]), ["a"] * 6 + ["b"] * 6
    parts, weights = {"one": rewards, "two": rewards.square()}, {"one": 1.0, "two": 0.5}

    def advantages(own, std, names=()):
        of_own = {name: part[own] for name, part in parts.items()}
        return combined_advantages(rewards[own], of_own, weights, groups[own], std, aggregate, names)

    alone = [advantages(slice(6), "global"), advantages(slice(6, 12), "global")]
    assert torch.equal(advantages(slice(12), "source", sources), torch.cat(alone))
    assert torch.equal(advantages(slice(6), "source"), alone[0])  # one source has no name
    assert not torch.allclose(advantages(slice(12), "global"), torch.cat(alone), atol=0.1)


def test_rounding_noise_is_no_spread():
    rewards = torch.tensor([1 / 3 + 1 / 3 + 1 / 3, 1.0000001, 1.0, 0.9999999])
    assert group_advantages(rewards, torch.zeros(4, dtype=torch.int64), "group").tolist() == [0] * 4


def test_a_failed_image_is_left_out_and_gets_zero():
    rewards = torch.tensor([0.1, math.nan, 0.7, 0.4])
    groups = torch.zeros(4, dtype=torch.int64)
    advantages = group_advantages(rewards, groups)
    assert advantages[1] == 0
    torch.testing.assert_close(advantages[[0, 2, 3]], group_advantages(rewards[[0, 2, 3]], groups[:3]))


def test_all_failed_gives_zeros():
    assert group_advantages(torch.full((2,), math.nan), torch.zeros(2, dtype=torch.int64)).tolist() == [0, 0]


def test_no_spread_share():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0, 2.0, math.nan, 5.0])
    assert no_spread_share(rewards, torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])) == 0.75


def test_a_mean_of_scores_that_cancel_is_zero():
    votes = torch.tensor([0.9, -0.3, -0.3, -0.3] * 16)
    assert votes.mean() != 0
    assert mean_score(votes) == 0
    assert mean_score(votes * 1e-9 + 1e-9) == pytest.approx(1e-9)
    assert math.isnan(mean_score(torch.tensor([])))


def test_no_std_only_centres():
    rewards = torch.tensor([0.0, 1.0, 5.0, 5.0, math.nan, 3.0])
    found = group_advantages(rewards, torch.tensor([0, 0, 1, 1, 2, 2]), "none")
    assert found.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.0, 0.0]


def test_the_sum_of_advantages_normalises_each_reward_first():
    wide, narrow = REWARDS * 100, REWARDS.flip(0)
    weights = {"wide": 1.0, "narrow": 0.5, "logged": 0.0}
    parts = {"wide": wide, "narrow": narrow, "logged": torch.full((6,), math.nan)}
    total = wide + 0.5 * narrow
    expected = group_advantages(wide, GROUPS, "group") + 0.5 * group_advantages(narrow, GROUPS, "group")
    found = combined_advantages(total, parts, weights, GROUPS, "group", "advantages")
    torch.testing.assert_close(found, expected)
    summed = combined_advantages(total, parts, weights, GROUPS, "group")
    torch.testing.assert_close(summed, group_advantages(total, GROUPS, "group"))


def test_an_image_with_one_failed_reward_is_left_out_of_all():
    first, second = REWARDS.clone(), REWARDS.flip(0)
    second[1] = math.nan
    found = combined_advantages(
        first + second, {"a": first, "b": second}, {"a": 1.0, "b": 1.0}, GROUPS, "global", "advantages"
    )
    assert found[1] == 0
    for group in (7, 3):
        assert found[group == GROUPS].sum().abs() < 1e-5
