"""8-bit rollouts. They need torchao: pip install "lit-vgrpo[quantise]"."""

import pytest
import torch
from helpers import make_data, make_module, make_trainer, repeating

from lit_vgrpo.core.block_cache import BlockCache
from lit_vgrpo.core.noise import image_generators
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.snapshots import Snapshot, trainable_parameters
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives import VGRPO, FlowGRPO
from lit_vgrpo.policies import SD3Policy, speed
from lit_vgrpo.training.strategies import FSDP2, ZeRO, rollout_error

PROMPTS = ["a red circle on the left", "a blue square"]
INT8 = RolloutSpec(steps=4, quantise="int8")


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao", reason="needs the extra quantise")


EACH = [{}, {"lora_rank": 2, "dtype": "bfloat16"}, {"lora_rank": 2}, {"dtype": "bfloat16"}]


@pytest.fixture(params=repeating(EACH, slow=EACH[2:]), ids=str)
def policy(request, torchao):
    return changed(SD3Policy("shipped:assets/tiny_sd3", max_sequence_length=1, **request.param).load())


def changed(policy, by=0.02):
    """The policy with other trained weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=by)
    return policy


def images(policy, spec, numbers=range(4)):
    numbers = list(numbers)
    noise = policy.prior(image_generators(1, 0, 0, numbers))
    return sample(policy, policy.encode(PROMPTS), torch.tensor(numbers) % 2, spec, noise, 2)[0]


def difference(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def test_images_are_nearly_the_same_and_follow_the_weights(policy):
    full = images(policy, RolloutSpec(steps=4))
    first = images(policy, INT8)
    assert 0 < difference(first, full) < 0.1
    assert torch.equal(images(policy, INT8, [3]), first[3:])
    start = Snapshot(policy)
    changed(policy, 0.1)
    after = images(policy, INT8)
    assert difference(after, first) > 0.1
    assert difference(after, images(policy, RolloutSpec(steps=4))) < 0.1
    with start.swapped_into(policy):
        assert torch.equal(images(policy, INT8), first)


def test_the_networks_own_weights_stay(policy):
    state = {name: value.clone() for name, value in policy.state_dict().items()}
    full = images(policy, RolloutSpec(steps=4))
    images(policy, INT8)
    assert all(torch.equal(value, state[name]) for name, value in policy.state_dict().items())
    assert list(policy.state_dict()) == list(state)
    assert all(type(parameter) is torch.nn.Parameter for parameter in policy.parameters())
    assert torch.equal(images(policy, RolloutSpec(steps=4)), full)


def test_it_goes_with_a_cache(policy):
    cached = RolloutSpec(steps=4, quantise="int8", cache=BlockCache("taylorseer", warm_up=4))
    assert torch.equal(images(policy, cached), images(policy, INT8))
    cached = RolloutSpec(steps=4, quantise="int8", cache=BlockCache("taylorseer", warm_up=2))
    every_block = images(policy, INT8)
    assert difference(images(policy, cached), every_block) > 0
    assert policy.blocks_run == pytest.approx(3 / 4)


def test_a_run_quantises_its_rollouts_alone(torchao, tmp_path):
    module = make_module("shipped:assets/tiny_sd3", VGRPO(INT8, num_mc_samples=2))
    trainer = make_trainer(tmp_path)
    trainer.fit(module, datamodule=make_data())
    assert trainer.callback_metrics["policy/ratio_deviation"] == 0
    assert module.ledger.images == 16


def test_what_cannot_be_quantised_is_refused_with_the_reason(monkeypatch):
    sde = RolloutSpec("flow_sde", quantise="int8")
    assert "rollout.quantise=int8 requires an ODE: the likelihoods" in FlowGRPO(rollout=sde).rollout_spec(0).errors()[0]
    for strategy in (FSDP2(), ZeRO(stage=3)):
        assert "rollout.quantise=int8 needs whole weights on every rank" in rollout_error(strategy, INT8)
    assert rollout_error(ZeRO(stage=2), INT8) is None
    assert INT8.as_ode().quantise is None
    monkeypatch.setattr(speed, "find_spec", lambda name: None)
    [error] = VGRPO(rollout=INT8).policy_errors(SD3Policy)
    assert error.startswith('model.objective.rollout.quantise=int8 needs torchao. Run: pip install "lit-vgrpo[quanti')
    monkeypatch.setattr(speed, "find_spec", lambda name: object())
    assert VGRPO(rollout=INT8).policy_errors(SD3Policy) == []
    if not torch.cuda.is_available():
        [error] = VGRPO(rollout=RolloutSpec(quantise="fp8")).policy_errors(SD3Policy)
        assert "quantise=fp8 needs a GPU of compute capability 8.9" in error
