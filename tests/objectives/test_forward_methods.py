"""Properties of every method that trains on pairs and keeps copies of the weights, on a small real pipeline."""

import pytest
import torch
from pair_methods import (
    ADVANTAGES,
    assert_state_comes_back,
    loss_and_gradient,
    nudge,
    prepare,
    roll,
    weights,
)

from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import AWM, CRD, DGPO, EPG, RAM, DiffusionNFT
from lit_vgrpo.objectives.base import PrepareContext

METHODS = {
    "AWM": lambda: AWM(RolloutSpec(steps=4), num_times=3),
    "DGPO": lambda: DGPO(RolloutSpec("dpm++", steps=4), num_times=2, noisiest=3, behaviour_from_step=0),
    "CRD": lambda: CRD(RolloutSpec("dpm++", steps=4), num_times=2),
    "RAM": lambda: RAM(RolloutSpec(steps=4), num_times=2),
    "DiffusionNFT": lambda: DiffusionNFT(RolloutSpec(steps=2)),
    "EPG": lambda: EPG(RolloutSpec(steps=4)),
}


@pytest.fixture(params=METHODS)
def make(request):
    return METHODS[request.param]


def updated(policy, objective, experience):
    objective.before_update(policy, [experience])
    return loss_and_gradient(policy, objective, [experience])


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
