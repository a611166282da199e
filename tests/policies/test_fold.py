import pytest
import torch
from torch import nn

from lit_vgrpo.core.noise import image_generators
from lit_vgrpo.core.pass_counter import PassLedger
from lit_vgrpo.core.sampling import sample, sample_chain
from lit_vgrpo.core.snapshots import Snapshot, trainable_parameters
from lit_vgrpo.core.types import RolloutRequest, RolloutSpec
from lit_vgrpo.objectives import DiffusionNFT
from lit_vgrpo.policies import SD3Policy, UNetPolicy
from lit_vgrpo.policies.fold import FoldedLora, fold_error, lora_layers, weight
from lit_vgrpo.system.hub import LoadError

PROMPTS = ["a red circle on the left", "a blue square on the right"]
CONVOLUTIONS = ["to_q", "to_out.0", "conv1", "conv_shortcut", "downsamplers.0.conv", "proj_in"]


@pytest.fixture(params=["sd3", "unet"])
def policy(request, tiny_sd3, tiny_unet):
    """With an adapter that changes what the network predicts; the UNet's is on convolutions of 1 x 1 and 3 x 3 too."""
    if request.param == "sd3":
        return adapted(SD3Policy(str(tiny_sd3), lora_rank=2, lora_alpha=4, max_sequence_length=1))
    return adapted(UNetPolicy(str(tiny_unet), lora_rank=2, lora_alpha=4, lora_targets=CONVOLUTIONS))


@pytest.fixture
def sd3(tiny_sd3):
    return lambda **options: adapted(SD3Policy(str(tiny_sd3), lora_rank=2, max_sequence_length=1, **options))


def adapted(policy, std=0.1):
    policy.load()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainable_parameters(policy).items():
            if "lora_B" in name:
                parameter.normal_(std=std, generator=generator)
    return policy


def predict(policy):
    noise = policy.prior(image_generators(1, 0, 0, [0, 1]))
    with torch.no_grad():
        return policy(noise, torch.tensor([0.3, 0.7]), policy.encode(PROMPTS))


def state(policy):
    """Everything that folding must leave as it is."""
    flags = {name: p.requires_grad for name, p in policy.network.named_parameters()}
    return {name: value.clone() for name, value in policy.network.state_dict().items()}, flags


def assert_as_before(policy, before):
    values, flags = before
    now, flags_now = state(policy)
    assert list(now) == list(values)
    assert flags_now == flags
    assert all(torch.equal(now[name], value) for name, value in values.items())
    assert not any(layer.merged or layer.disable_adapters for layer in lora_layers(policy.network))


def test_folded_predicts_the_same_and_the_weights_come_back_bit_for_bit(policy):
    before, expected = state(policy), predict(policy)
    folded = FoldedLora(policy.network)
    kinds = {type(layer.get_base_layer()) for layer in lora_layers(policy.network)}
    assert kinds == ({nn.Linear} if isinstance(policy, SD3Policy) else {nn.Linear, nn.Conv2d})
    for _ in range(2):
        with folded.applied():
            layers = lora_layers(policy.network)
            calls = [
                layer.lora_A["default"].register_forward_hook(lambda *_: pytest.fail("adapter")) for layer in layers
            ]
            torch.testing.assert_close(predict(policy), expected, rtol=1e-4, atol=1e-5)
            for call in calls:
                call.remove()
            assert state(policy)[1] == before[1]
        assert_as_before(policy, before)
        assert torch.equal(predict(policy), expected)


def test_the_weights_come_back_when_sampling_fails(policy):
    before = state(policy)
    with pytest.raises(KeyboardInterrupt), policy.sampling():
        raise KeyboardInterrupt
    assert_as_before(policy, before)


def test_what_is_swapped_in_is_what_is_folded(sd3):
    policy = sd3()
    copy = Snapshot(policy)
    adapted(policy, std=0.3)
    before, own = state(policy), predict(policy)
    with copy.swapped_into(policy):
        of_the_copy = predict(policy)
    assert not torch.allclose(of_the_copy, own, rtol=1e-2)
    with policy.sampling():
        with copy.swapped_into(policy), policy.sampling():  # entered again with other weights
            torch.testing.assert_close(predict(policy), of_the_copy, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(predict(policy), own, rtol=1e-4, atol=1e-5)
    assert_as_before(policy, before)


def test_a_base_that_was_written_to_is_taken_up(sd3):
    policy = sd3()
    with policy.sampling():
        pass
    with torch.no_grad():
        weight(lora_layers(policy.network)[0]).add_(1.0)
    before, expected = state(policy), predict(policy)
    with policy.sampling():
        torch.testing.assert_close(predict(policy), expected, rtol=1e-4, atol=1e-5)
    assert_as_before(policy, before)


def test_no_gradient_reaches_folded_weights(sd3):
    policy = sd3()
    noise, cond = policy.prior(image_generators(1, 0, 0, [0, 1])), policy.encode(PROMPTS)

    def loss():
        return policy(noise, torch.tensor([0.3, 0.7]), cond).square().mean()

    with policy.sampling():
        assert not loss().requires_grad
    during, after = loss(), loss()
    with policy.sampling(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        during.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after.backward()


def test_an_outer_autocast_does_not_round_the_update(sd3):
    policy = sd3()
    expected = predict(policy)
    with torch.autocast("cpu", torch.bfloat16), policy.sampling():
        pass
    with torch.autocast("cpu", torch.bfloat16):
        fold = policy.sampling()
        fold.__enter__()
    torch.testing.assert_close(predict(policy), expected, rtol=1e-4, atol=1e-5)
    fold.__exit__(None, None, None)


def folds_while(call, policy):
    """Return whether any network pass of ``call()`` found the adapter folded, and whether all did."""
    found = []
    hook = policy.network.register_forward_pre_hook(
        lambda network, args: found.append(all(layer.merged for layer in lora_layers(network)))
    )
    call()
    hook.remove()
    assert found
    assert len(set(found)) == 1
    return found[0]


@pytest.mark.parametrize(
    ("options", "folds"),
    [
        ({}, True),
        ({"fold_lora": False}, False),
        ({"fold_lora": True}, True),
        ({"dtype": "bfloat16"}, False),
    ],
)
def test_sampling_by_an_ode_folds_where_it_may_and_a_chain_never_does(sd3, options, folds):
    policy = sd3(**options)
    cond, rows, noise = policy.encode(PROMPTS), torch.arange(2), policy.prior(image_generators(1, 0, 0, [0, 1]))
    before = state(policy)
    assert folds_while(lambda: sample(policy, cond, rows, RolloutSpec(steps=2), noise), policy) == folds
    chain, generators = RolloutSpec("flow_sde", steps=2), image_generators(6, 0, 0, [0, 1])
    assert not folds_while(lambda: sample_chain(policy, cond, rows, chain, noise, generators), policy)
    assert_as_before(policy, before)


def test_a_folded_rollout_is_the_unfolded_one_and_is_counted(sd3):
    policy, plain = sd3(), sd3(fold_lora=False)
    ledger = PassLedger()
    ledger.attach(policy.network)
    noise = policy.prior(image_generators(1, 0, 0, [0, 1]))
    latents = [
        sample(one, one.encode(PROMPTS), torch.arange(2), RolloutSpec(steps=3, guidance=2.0), noise)[0]
        for one in (policy, plain)
    ]
    torch.testing.assert_close(*latents, rtol=1e-4, atol=1e-5)
    assert ledger.counts == {"update": {"with_grad": 0, "without_grad": 3 * 2 * 2}}


def test_a_method_that_samples_with_a_copy_folds_the_copy(sd3):
    policy, plain = sd3(), sd3(fold_lora=False)
    latents = []
    for one in (policy, plain):
        objective = DiffusionNFT(RolloutSpec(steps=2))
        objective.setup(one)
        adapted(one, std=0.3)  # the copy stays behind
        latents.append(objective.roll_out(one, RolloutRequest(PROMPTS, [{}, {}], [0, 1], 1, 0, 0)).latents)
    torch.testing.assert_close(*latents, rtol=1e-4, atol=1e-5)
    own = sample(policy, policy.encode(PROMPTS), torch.arange(2), RolloutSpec(steps=2), torch.zeros_like(latents[0]))[0]
    assert not torch.allclose(own, latents[0], rtol=1e-2)


# --- what cannot be folded ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_are_refused_in_one_line(sd3, dtype):
    said = f"fold_lora=true needs dtype=float32: {dtype} weights would lose .* Leave fold_lora out.$"
    with pytest.raises(ValueError, match=f"^{said}"):
        sd3(dtype=dtype, fold_lora=True)
    policy = sd3(dtype=dtype)
    policy.fold_lora = True
    with pytest.raises(LoadError, match=f"^model.policy.{said}"), policy.sampling():
        pass


def test_sixteen_bit_weights_alone_are_not_folded_either(sd3):
    policy = sd3()
    layer = lora_layers(policy.network)[0].get_base_layer()
    layer.to(torch.bfloat16)
    with policy.sampling():
        assert not any(layer.merged for layer in lora_layers(policy.network))
    assert "bfloat16 weights would lose" in fold_error(policy)


def test_no_adapter_to_fold(tiny_sd3):
    policy = SD3Policy(str(tiny_sd3), fold_lora=True, max_sequence_length=1).load()
    with pytest.raises(LoadError, match="has no LoRA adapter. Leave it out"), policy.sampling():
        pass
    policy.fold_lora = None
    with policy.sampling():
        pass


def test_sharded_weights_are_said_not_to_fold(sd3, monkeypatch):
    policy = sd3()
    assert fold_error(policy) is None
    weight(lora_layers(policy.network)[0]).ds_tensor = torch.empty(0)  # how DeepSpeed marks them
    assert "FSDP2 and ZeRO-3 shard them" in fold_error(policy)
    with policy.sampling():
        assert not any(layer.merged for layer in lora_layers(policy.network))
    policy.fold_lora = True
    with pytest.raises(LoadError, match="full weights on every rank"), policy.sampling():
        pass
