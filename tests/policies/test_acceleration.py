"""Merged adapters, compilation and attention kernels: what they change, and what they must not."""

import shutil
from functools import partial

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from lightning.pytorch.strategies import SingleDeviceStrategy
from policies.contract import adapted
from rollouts import sample_chain
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from lit_vgrpo.core.noise import image_generators
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot, trainable_parameters
from lit_vgrpo.core.types import RolloutRequest, RolloutSpec
from lit_vgrpo.objectives import VGRPO
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.policies import FluxPolicy, SD3Policy, SDXLPolicy, UNetPolicy, acceleration
from lit_vgrpo.policies.acceleration import (
    compile_network,
    lora_layers,
    repeated_blocks,
    set_attention_backend,
    shared_view,
)
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.optimizer import OptimizerConfig
from lit_vgrpo.training.strategies import FSDP2, AbsentGPU, ZeRO, strategy_errors

PROMPTS = ["a red circle on the left", "a blue square on the right"]
CONVOLUTIONS = ["to_q", "to_out.0", "conv1", "conv_shortcut", "downsamplers.0.conv", "proj_in"]


@pytest.fixture
def sd3(tiny_sd3):
    return lambda **options: adapted(SD3Policy(str(tiny_sd3), lora_rank=2, max_sequence_length=1, **options))


@pytest.fixture
def unet(tiny_unet):
    return lambda **options: adapted(UNetPolicy(str(tiny_unet), lora_rank=2, **options))


def predict(policy, images=2):
    noise = policy.prior(image_generators(1, 0, 0, range(images)))
    return policy(noise, torch.linspace(0.2, 0.9, images), policy.encode(PROMPTS[:1]).expand(images))


def gradients(policy, prediction=None):
    policy.zero_grad()
    (predict(policy) if prediction is None else prediction).square().mean().backward()
    return [p.grad.clone() for p in trainable_parameters(policy).values() if p.grad is not None]


# --- merged adapters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sd3", "unet"])
def test_merged_predicts_the_same_and_the_network_does_not_change(sd3, unet, kind):
    """The UNet's adapter is on convolutions of 1 x 1 and 3 x 3 too."""
    policy = sd3(lora_alpha=4) if kind == "sd3" else unet(lora_alpha=4, lora_targets=CONVOLUTIONS)
    with torch.no_grad():
        expected = predict(policy)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    network = policy.network
    kinds = {type(layer.get_base_layer()) for layer in lora_layers(network).values()}
    assert kinds == ({nn.Linear} if kind == "sd3" else {nn.Linear, nn.Conv2d})
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), policy.sampling():
            assert not lora_layers(policy.network)
            found = predict(policy)
        assert not found.requires_grad
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert policy.network is network
        assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
        assert torch.equal(predict(policy), expected)


def test_the_current_weights_are_merged(sd3):
    policy = sd3()
    copy = Snapshot(policy)
    adapted(policy, std=0.3)
    with torch.no_grad():
        next(iter(lora_layers(policy.network).values())).get_base_layer().weight.add_(1.0)
        current = predict(policy)
    with copy.swapped_into(policy):
        of_the_copy = predict(policy)
        with policy.sampling():
            torch.testing.assert_close(predict(policy), of_the_copy, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(of_the_copy, current, rtol=1e-2)
    with policy.sampling():
        torch.testing.assert_close(predict(policy), current, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "merges"), [({}, True), ({"fold_lora": False}, False), ({"dtype": "bfloat16"}, False)]
)
def test_ode_sampling_merges_where_it_may_and_a_chain_never_does(sd3, options, merges):
    policy = sd3(**options)
    cond, rows, noise = policy.encode(PROMPTS), torch.arange(2), policy.prior(image_generators(1, 0, 0, [0, 1]))
    seen = []
    policy.network.register_forward_pre_hook(lambda network, args: seen.append(not lora_layers(network)))
    sample(policy, cond, rows, RolloutSpec(steps=2), noise)
    assert seen == [merges] * 2
    sample_chain(policy, cond, rows, RolloutSpec("flow_sde", steps=2), noise, image_generators(6, 0, 0, [0, 1]))
    assert seen[2:] == [False] * 2


def test_a_view_shares_weights_and_follows_a_move(sd3):
    network = sd3().network
    view = shared_view(network)
    assert all(a is b for a, b in zip(view.parameters(), network.parameters(), strict=True))
    assert not {id(module) for module in view.modules()} & {id(module) for module in network.modules()}
    network.to(torch.float64)
    assert {value.dtype for value in view.state_dict().values()} == {torch.float64}


def test_what_cannot_be_merged(sd3):
    policy = sd3()
    assert policy.is_folded
    weight = next(iter(lora_layers(policy.network).values())).get_base_layer().weight
    weight.ds_tensor = torch.empty(0)  # how DeepSpeed marks sharded weights
    assert not policy.is_folded


@pytest.mark.parametrize("option", ["compile", "fold_lora", "channels_last"])
def test_a_strategy_that_shards_the_weights_is_refused_and_others_are_not(option):
    policy = (SDXLPolicy if option == "channels_last" else SD3Policy)("any", lora_rank=2, **{option: True})
    for strategy in (FSDP2(), ZeRO(stage=3)):
        (error,) = strategy_errors(strategy, policy, OptimizerConfig(), Sizes(1, 2))
        assert f"model.policy.{option}=true needs whole weights" in error
        assert [*strategy_errors(strategy, SD3Policy("any", lora_rank=2), OptimizerConfig(), Sizes(1, 2))] == []
    assert [*strategy_errors(ZeRO(stage=2), policy, OptimizerConfig(), Sizes(1, 2))] == []


# --- compilation ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch):
    """``compiled(policy)`` compiles without generating code: what is traced, and how often, is the same."""
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounter()
    monkeypatch.setattr(acceleration, "compile_network", partial(compile_network, backend=counter))

    def make(policy):
        acceleration.compile_network(policy.network)
        policy.compile_network = True  # of its views too
        return counter

    yield make
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_predicts_the_same_and_is_trained_the_same(sd3, compiled):
    plain, policy = sd3(), sd3(gradient_checkpointing=True)
    names = [list(policy.state_dict()), list(trainable_parameters(policy))]
    counter = compiled(policy)
    with torch.no_grad():
        torch.testing.assert_close(predict(policy), predict(plain), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 2  # the two kinds of block
    torch.testing.assert_close(gradients(policy), gradients(plain), rtol=1e-4, atol=1e-6)
    assert counter.frame_count > 2
    assert names == [list(policy.state_dict()), list(trainable_parameters(policy))]


@pytest.mark.slow
def test_a_run_compiles_a_bounded_number_of_graphs_and_never_again(unet, compiled):
    """Rollouts folded and micro-batches with gradient, in changing sizes, take turns."""
    policy = unet()
    counter = compiled(policy)
    ledger = PassLedger()
    ledger.attach(policy.network)

    def iteration(rollout, micro):
        with torch.no_grad(), policy.sampling():
            assert not lora_layers(policy.network)
            predict(policy, rollout)
        predict(policy, micro).square().mean().backward()

    sizes = [(4, 2), (6, 3), (1, 1)]
    for pair in sizes:
        iteration(*pair)
    graphs = counter.frame_count
    blocks = len(repeated_blocks(policy.network))
    assert blocks > 1
    assert graphs <= 2 * 4  # not one for each block: they share
    for pair in [*sizes, (7, 5), (3, 8)]:
        iteration(*pair)
    assert counter.frame_count == graphs
    assert not counters["graph_break"]
    assert ledger.counts["update"] == {
        "with_grad": sum(micro for _, micro in [*sizes, *sizes, (7, 5), (3, 8)]),
        "without_grad": sum(rollout for rollout, _ in [*sizes, *sizes, (7, 5), (3, 8)]),
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler on this machine")
def test_generated_code_computes_the_same_in_bfloat16_with_and_without_gradient():
    """Else the ratio of a training pass to a pass without gradient would not be 1 before any update."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = SD3Transformer2DModel(
        sample_size=4, patch_size=2, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=1, joint_attention_dim=8, caption_projection_dim=8, pooled_projection_dim=8,
        pos_embed_max_size=2,
    ).to(torch.bfloat16)  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 4, 4),
        "timestep": torch.tensor([100.0, 900.0]),
        "encoder_hidden_states": torch.randn(2, 2, 8),
        "pooled_projections": torch.randn(2, 8),
    }

    def run(grad):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            return network(**inputs, return_dict=False)[0].detach()

    plain = run(False)
    compile_network(network)
    with inductor.patch(compile_threads=1):  # each worker of a pool would import torch
        assert torch.equal(run(True), plain)
        assert torch.equal(run(False), plain)
    torch._dynamo.reset()


def test_the_option_compiles(sd3):
    blocks = repeated_blocks(sd3(compile=True).network)
    assert len(blocks) == 2
    assert all(block._compiled_call_impl is not None for block in blocks)


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.fixture
def flux(flux_folder):
    policy = FluxPolicy(str(flux_folder()), lora_rank=2, max_sequence_length=16)
    yield adapted(policy)
    policy.network.reset_attention_backend()


@pytest.mark.slow
def test_every_layer_of_this_network_alone_takes_the_backend(flux):
    default = _AttentionBackendRegistry.get_active_backend()
    with torch.no_grad():
        before = predict(flux)
        set_attention_backend(flux.network, "_native_math")
        after = predict(flux)
    processors = [module.processor for module in flux.network.modules() if hasattr(module, "processor")]
    assert {processor._attention_backend for processor in processors} == {AttentionBackendName._NATIVE_MATH}
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert _AttentionBackendRegistry.get_active_backend() == default


UNUSABLE = {
    "_sage_qk_int8_pv_fp16_cuda": "has no backward pass. Use flash",
    "cosmic": "does not exist. Use one of: .*xformers.* There are 27",
    "Xformer": "does not exist. Did you mean xformers?",
    "_native_npu": ": .*missing package",
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_backends_that_cannot_be_used_are_found_before_loading(name, tiny_sd3):
    with pytest.raises(LoadError, match=rf"attention_backend={name}.*{UNUSABLE[name]}") as caught:
        set_attention_backend(torch.nn.Linear(1, 1), name)
    for strategy in (SingleDeviceStrategy("cpu"), SingleDeviceStrategy("cpu", accelerator=AbsentGPU())):
        policy = SD3Policy(str(tiny_sd3), attention_backend=name)
        found = [*strategy_errors(strategy, policy, OptimizerConfig(), Sizes(1, 2))]
        is_elsewhere = isinstance(strategy.accelerator, AbsentGPU) and name == "_native_npu"
        assert found == ([] if is_elsewhere else [str(caught.value)])


# --- one precision --------------------------------------------------------------------------------------------------


def test_float32_means_float32_under_an_outer_autocast(sd3):
    """As ``trainer.precision=bf16-mixed`` puts around the forward passes, though not the backward ones."""
    policy, picture = sd3(), torch.full((1, 3, 32, 32), 0.3)

    @torch.no_grad()
    def passes():
        with policy.sampling():
            folded = predict(policy)
        return folded, predict(policy), policy.decode(folded), policy.encode_images(picture)

    expected, expected_gradients = passes(), gradients(policy)
    with torch.autocast("cpu", torch.bfloat16):
        found = passes()
        prediction = predict(policy)
    for one, other in zip([*found, *gradients(policy, prediction)], [*expected, *expected_gradients], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("outer", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_is_1_before_an_update_in_either_precision(sd3, dtype, outer):
    policy = sd3(dtype=dtype)
    objective = VGRPO(RolloutSpec(steps=2), num_mc_samples=2)
    objective.setup(policy)
    rollout = objective.roll_out(policy, RolloutRequest(PROMPTS[:1], [{}], [0], 2, 0, 0))
    # the phases may stand under different outer autocasts: Lightning's own surrounds a training step alone
    experience = objective.prepare(
        PrepareContext(policy, rollout, torch.tensor([1.0, -1.0]), micro_batch_size=2, updates=2)
    )
    with torch.autocast("cpu", outer or torch.bfloat16, enabled=outer is not None):
        _, metrics = objective.loss(policy, experience)
    assert experience.kept["elbo"].dtype == torch.float32
    assert torch.equal(metrics["surrogate"], experience.kept["elbo"])
