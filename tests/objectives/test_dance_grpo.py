"""DanceGRPO: its loss in float64, and which transitions it trains."""

import pytest
import torch
from chain_in_float64 import (
    Steps,
    assert_same_direction,
    between,
    dance_sde,
    expected_gradient,
    gradient,
    nudge,
    prepared,
    roll,
)

from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import DanceGRPO

SPEC = RolloutSpec("dance_sde", 6, shared_noise=True)


def test_loss_and_gradient_in_float64(policy):
    objective = DanceGRPO(SPEC)
    rollout, experience = prepared(policy, objective)
    chosen = objective.choose_steps(rollout).tolist()
    steps = Steps(rollout, chosen, dance_sde, 0.3)
    with torch.no_grad():
        old = steps.outputs(policy, 1.0)
    nudge(policy, 0.02)
    outputs = steps.outputs(policy, 1.0)
    objective.clip = between(steps.loss(outputs, old, 1.0)[1])
    expected, direction = expected_gradient(
        policy, outputs, lambda outputs: steps.loss(outputs, old, objective.clip)[0]
    )
    loss, metrics = objective.loss(policy, experience)
    assert loss.item() == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert_same_direction(gradient(policy, loss), direction, 5e-3)
    assert metrics["clip_fraction"].mean() == pytest.approx(0.5)


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


def test_published_settings():
    objective = DanceGRPO()
    assert (objective.advantage_std, objective.clip, objective.kl_weight) == ("group", 1e-4, 0.0)
    assert objective.rollout.shared_noise
