"""Block caches in rollouts."""

import pytest
import torch
from helpers import make_data, make_module, make_trainer, repeating
from policies.contract import PROMPTS, adapted, sampled
from rollouts import roll_out
from torch._dynamo.testing import CompileCounter

from lit_vgrpo.core.noise import image_generators
from lit_vgrpo.core.snapshots import Snapshot, trainable_parameters
from lit_vgrpo.core.types import BlockCache, RolloutRequest, RolloutSpec
from lit_vgrpo.objectives import VGRPO, DiffusionNFT, FlowGRPO
from lit_vgrpo.policies import FluxPolicy, SD3Policy, UNetPolicy, cached_network
from lit_vgrpo.policies.acceleration import compile_options, repeated_blocks, shared_view
from lit_vgrpo.training.strategies import FSDP2, ZeRO, rollout_error

STEPS = 6
TAYLOR = BlockCache("taylorseer", interval=2, warm_up=2)
FIRST = BlockCache("first_block", threshold=0.3)
HALF = BlockCache("first_block", threshold=100)  # skips in every step but the first
ALL_STEPS = (BlockCache("first_block", threshold=0), BlockCache("taylorseer", warm_up=STEPS))


@pytest.fixture(params=repeating(["sd3", "flux", "flux_cfg"], slow=["flux", "flux_cfg"]))
def policy(request, tiny_sd3, flux_folder):
    if request.param == "sd3":
        return adapted(SD3Policy(str(tiny_sd3), lora_rank=2, max_sequence_length=1))
    folder = flux_folder(request.param == "flux")
    return adapted(FluxPolicy(str(folder), lora_rank=2, max_sequence_length=16, height=16, width=16))


@pytest.fixture
def sd3(tiny_sd3):
    return lambda **options: adapted(SD3Policy(str(tiny_sd3), max_sequence_length=1, **options))


def images(policy, cache, numbers=range(4), guidance=1.0, batch_size=2):
    return sampled(policy, RolloutSpec("euler", STEPS, guidance, cache=cache), numbers, batch_size)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_cache_that_skips_nothing_changes_no_bit(policy, guidance):
    expected = images(policy, None, guidance=guidance)
    assert policy.blocks_run is None
    for cache in ALL_STEPS:
        assert torch.equal(images(policy, cache, guidance=guidance), expected)
        assert policy.blocks_run == 1


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_cache_skips_blocks_and_says_how_many(policy, guidance):
    expected = images(policy, None, guidance=guidance)
    blocks = len(repeated_blocks(policy.network))
    for cache, run in ((TAYLOR, 4 / 6), (HALF, (1 + 5 / blocks) / 6)):
        found = images(policy, cache, guidance=guidance)
        assert not torch.equal(found, expected)
        assert found.isfinite().all()
        assert policy.blocks_run == pytest.approx(run)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [TAYLOR, HALF], ids=["taylorseer", "first_block"])
def test_nothing_is_kept_between_batches_rollouts_and_weights(policy, cache):
    first = images(policy, cache)
    assert torch.equal(images(policy, cache, [2, 3]), first[2:])  # the second batch alone
    assert torch.equal(images(policy, cache, [3, 2]), first[[3, 2]])
    copy = Snapshot(policy)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(0.05)
    changed = images(policy, cache)
    assert not torch.equal(changed, first)
    with copy.swapped_into(policy):
        assert torch.equal(images(policy, cache), first)
    assert torch.equal(images(policy, cache), changed)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [TAYLOR, HALF], ids=["taylorseer", "first_block"])
def test_passes_outside_of_the_rollout_see_no_hook(policy, cache):
    noise, times = policy.prior(image_generators(1, 0, 0, [0, 1])), torch.tensor([0.3, 0.7])

    def gradients():
        policy.zero_grad()
        policy(noise, times, policy.encode(PROMPTS[:2])).square().mean().backward()
        return [p.grad.clone() for p in trainable_parameters(policy).values() if p.grad is not None]

    keys, evaluated, before = list(policy.state_dict()), images(policy, None), gradients()
    modules = dict(policy.named_modules())
    images(policy, cache)
    assert list(policy.state_dict()) == keys
    assert dict(policy.named_modules()) == modules
    assert not any("forward" in vars(module) or hasattr(module, "_diffusers_hook") for module in policy.modules())
    assert all(torch.equal(a, b) for a, b in zip(gradients(), before, strict=True))
    assert torch.equal(images(policy, None), evaluated)


def test_a_chain_after_a_cached_rollout_says_nothing_of_it(sd3):
    policy, request = sd3(), RolloutRequest(PROMPTS[:2], [{}, {}], [0, 1], 2)
    for spec, run in ((RolloutSpec(steps=STEPS, cache=TAYLOR), pytest.approx(4 / 6)), (RolloutSpec("flow_sde"), None)):
        assert roll_out(policy, request, spec).blocks_run == run


@pytest.mark.slow
def test_a_run_caches_its_rollouts_alone_and_logs_the_share(tiny_sd3, tmp_path):
    module = make_module(tiny_sd3, VGRPO(RolloutSpec(steps=4, cache=TAYLOR), num_mc_samples=2))
    trainer = make_trainer(tmp_path)
    trainer.fit(module, datamodule=make_data())
    assert trainer.callback_metrics["cost/rollout_blocks_run"] == pytest.approx(3 / 4)
    assert trainer.callback_metrics["policy/ratio_deviation"] == 0
    assert trainer.callback_metrics["cost/passes_per_image"] == 4 + 2  # a skipped pass is counted as any other
    assert module.policy.blocks_run is None  # the evaluation came last
    assert module.ledger.counts["evaluation"]["without_grad"] % 4 == 0


@pytest.mark.slow
def test_compiled_blocks_run_inside_of_a_cache_and_follow_the_weights(sd3, monkeypatch):
    """Compiled without generating code: what is traced, and how often, is the same."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(cached_network, "compile_options", lambda: compile_options(counter))
    policy, plain = sd3(lora_rank=2), sd3(lora_rank=2)
    policy.compile_network = True
    keys = list(policy.state_dict())
    copy = Snapshot(policy)
    for cache in (TAYLOR, FIRST):
        for numbers in (range(6), range(4), range(5)):
            found = images(policy, cache, numbers, batch_size=len(numbers))
            expected = images(plain, cache, numbers, batch_size=len(numbers))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    graphs = counter.frame_count
    assert graphs == 2 * 2  # two kinds of block, for the first size and for any: not one for each block or cache
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.mul_(1.5)
    with copy.swapped_into(policy):
        torch.testing.assert_close(images(policy, TAYLOR), images(plain, TAYLOR), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(images(policy, TAYLOR), images(plain, TAYLOR), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == graphs
    assert list(policy.state_dict()) == keys
    assert not any("_orig_mod" in key for key in keys)
    torch._dynamo.reset()


def test_a_view_shares_weights_and_hooks_and_follows_a_move(sd3):
    network = sd3().network
    view = shared_view(network)
    assert all(a is b for a, b in zip(view.parameters(), network.parameters(), strict=True))
    assert not {id(module) for module in view.modules()} & {id(module) for module in network.modules()}
    network.to(torch.float64)
    assert {value.dtype for value in view.state_dict().values()} == {torch.float64}


def test_rollouts_that_cannot_be_accelerated_are_refused_with_the_reason():
    cached = RolloutSpec("flow_sde", cache=FIRST)
    assert "cache=first_block requires an ODE: the likelihoods" in FlowGRPO(rollout=cached).rollout_spec(0).errors()[0]
    for method in (VGRPO, DiffusionNFT):
        objective = method(rollout=RolloutSpec("ddim", cache=TAYLOR))
        [error] = objective.policy_errors(UNetPolicy)
        assert error.startswith("model.objective.rollout.cache=taylorseer does not work on UNetPolicy")
        assert method(rollout=RolloutSpec(cache=TAYLOR)).policy_errors(SD3Policy) == []
    for strategy in (FSDP2(), ZeRO(stage=3)):
        assert "needs whole weights on every rank" in rollout_error(strategy, RolloutSpec(cache=FIRST))
        assert rollout_error(strategy, RolloutSpec()) is None
    assert rollout_error(ZeRO(stage=2), RolloutSpec(cache=FIRST)) is None
