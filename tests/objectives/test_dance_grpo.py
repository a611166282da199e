"""DanceGRPO: which steps it trains."""

import pytest
import torch
from pair_methods import roll

from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import DanceGRPO

SPEC = RolloutSpec("dance_sde", 6, shared_noise=True)


def test_a_random_part_of_the_steps_for_each_image_and_iteration(policy):
    objective = DanceGRPO(SPEC)
    rollout = roll(policy, objective)
    chosen = objective.choose_steps(rollout)
    assert chosen.shape == (6, 3)  # 60 % of 5: the last of the 6 steps is not among them
    assert chosen.max() <= 4
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    assert len({tuple(row) for row in chosen.tolist()}) > 1
    assert torch.equal(chosen, objective.choose_steps(rollout))
    assert not torch.equal(chosen, objective.choose_steps(roll(policy, objective, iteration=1)))
    assert not torch.equal(chosen, objective.choose_steps(roll(policy, objective, seed=1)))
    rollout.image_ids = rollout.image_ids[3:]  # another rank's share: an image keeps its steps
    assert torch.equal(chosen[3:], objective.choose_steps(rollout))


@pytest.mark.parametrize(("fraction", "steps", "kept"), [(0.6, 16, 9), (0.29, 101, 29), (0.01, 10, 1), (1.0, 10, 9)])
def test_the_share_is_rounded_down_and_never_none(fraction, steps, kept):
    spec = RolloutSpec("dance_sde", steps)
    assert DanceGRPO(spec, train_fraction=fraction).num_trained_steps(spec) == kept
