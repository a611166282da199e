"""Properties of every method that trains on pairs and keeps copies of the weights, on a small real pipeline."""

import pytest
import torch
from pair_methods import (
    ADVANTAGES,
    assert_same_gradient,
    assert_state_comes_back,
    loss_and_gradient,
    nudge,
    prepare,
    roll,
    spread_copies,
    weights,
)

from lit_vgrpo.core.advantages import group_advantages
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import AWM, DGPO, DiffusionNFT
from lit_vgrpo.objectives.base import PrepareContext

METHODS = {
    "AWM": lambda: AWM(RolloutSpec(steps=4), num_times=3),
    "DGPO": lambda: DGPO(RolloutSpec("dpm++", steps=4), num_times=2, noisiest=3, behaviour_from_step=0),
    "DiffusionNFT": lambda: DiffusionNFT(RolloutSpec(steps=2)),
}


@pytest.fixture(params=METHODS)
def make(request):
    return METHODS[request.param]


def updated(policy, objective, experience):
    objective.before_update(policy, [experience])
    return loss_and_gradient(policy, objective, [experience])


def test_a_constant_added_to_all_rewards_changes_nothing(policy, make):
    objective = make()
    spread_copies(policy, objective)
    rewards, groups = torch.tensor([1.0, 2.0, 4.0, 0.0, 8.0, 1.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    plain, shifted = (
        updated(policy, objective, prepare(policy, objective, group_advantages(own, groups)))
        for own in (rewards, rewards + 16)
    )
    assert plain[0] == pytest.approx(shifted[0], rel=1e-5)
    assert_same_gradient(plain[1], shifted[1], rtol=1e-5)


def test_the_weights_are_put_back_when_a_pass_fails(policy, make):
    objective = make()
    objective.setup(policy)
    experience, rollout = prepare(policy, objective), roll(policy, objective)
    nudge(policy)
    before = weights(policy)
    for broken in (experience, rollout):
        broken.conditioning.tensors["tokens"] = broken.conditioning.tensors["tokens"][..., :-1]
    with pytest.raises(RuntimeError):
        updated(policy, objective, experience)
    with pytest.raises(RuntimeError):
        objective.prepare(PrepareContext(policy, rollout, ADVANTAGES, micro_batch_size=6, updates=1))
    with pytest.raises(RuntimeError, match="stop"), objective.acting(policy):
        raise RuntimeError("stop")
    assert all(torch.equal(p, before[name]) for name, p in weights(policy).items())


def test_the_state_comes_back(policy, make):
    assert_state_comes_back(policy, make(), make())
