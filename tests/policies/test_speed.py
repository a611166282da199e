import json
import runpy
import warnings
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from lit_vgrpo.core.noise import image_generators
from lit_vgrpo.core.pass_counter import PassLedger
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import RolloutRequest, RolloutSpec
from lit_vgrpo.objectives import VGRPO
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.policies import FluxPolicy, SD3Policy, UNetPolicy
from lit_vgrpo.policies.fold import lora_layers
from lit_vgrpo.policies.speed import (
    attention_processors,
    compile_network,
    compiler_error,
    repeated_blocks,
    set_attention_backend,
    use_channels_last,
)
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.strategies import whole_weights_error

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "policy_speed.py"
PROMPT = "a red circle on the left"


def adapted(policy):
    policy.load()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainable_parameters(policy).items():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    return policy


@pytest.fixture
def sd3(tiny_sd3):
    return lambda **options: adapted(SD3Policy(str(tiny_sd3), lora_rank=2, max_sequence_length=1, **options))


@pytest.fixture
def unet(tiny_unet):
    return lambda **options: adapted(UNetPolicy(str(tiny_unet), lora_rank=2, **options))


def predict(policy, images=2):
    noise = policy.prior(image_generators(1, 0, 0, range(images)))
    return policy(noise, torch.linspace(0.2, 0.9, images), policy.encode([PROMPT]).expand(images))


def gradients(policy):
    policy.zero_grad()
    predict(policy).square().mean().backward()
    return [p.grad.clone() for p in trainable_parameters(policy).values() if p.grad is not None]


# --- compilation ----------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    """``compiled(policy)`` compiles without generating code: what is traced, and how often, is the same."""
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounter()

    def make(policy):
        compile_network(policy.network, backend=counter)
        return counter

    yield make
    torch._dynamo.reset()


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
        with policy.sampling():
            assert all(layer.merged for layer in lora_layers(policy.network))
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
@pytest.mark.skipif(compiler_error() is not None, reason="no compiler on this machine")
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


def test_without_a_compiler_it_is_said_before_anything_runs(sd3, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(LoadError, match=r"needs a C\+\+ compiler: no-such-compiler is not found.*set compile to false"):
        sd3(compile=True)


@pytest.mark.parametrize("option", ["compile", "fold_lora"])
def test_a_strategy_that_shards_the_weights_is_refused_and_others_are_not(option):
    from lit_vgrpo.training.strategies import FSDP2, ZeRO

    policy = SD3Policy("any", lora_rank=2, **{option: True})
    for strategy in (FSDP2(), ZeRO(stage=3)):
        assert f"model.policy.{option}=true needs whole weights" in whole_weights_error(strategy, policy)
        assert whole_weights_error(strategy, SD3Policy("any", lora_rank=2)) is None
    assert whole_weights_error(ZeRO(stage=2), policy) is None


def test_a_network_without_repeated_blocks_is_not_compiled():
    with pytest.raises(LoadError, match="Linear has no repeated blocks"):
        compile_network(torch.nn.Linear(2, 2), backend="eager")


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.fixture
def flux(flux_folder):
    policy = FluxPolicy(str(flux_folder()), lora_rank=2, max_sequence_length=16)
    yield adapted(policy)
    policy.network.reset_attention_backend()


def test_every_layer_takes_the_backend(flux):
    with torch.no_grad():
        before = predict(flux)
        set_attention_backend(flux.network, "_native_math")
        after = predict(flux)
    processors = attention_processors(flux.network)
    assert processors
    assert {processor._attention_backend for processor in processors} == {AttentionBackendName._NATIVE_MATH}
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)


def test_no_other_network_takes_the_backend(flux):
    before = _AttentionBackendRegistry.get_active_backend()
    set_attention_backend(flux.network, "_native_math")
    assert _AttentionBackendRegistry.get_active_backend() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("_native_mth", "is not a diffusers backend. Did you mean _native_math"),
        ("cosmic", "is not a diffusers backend. Use one of: flash, "),
        (
            "xformers",
            "attention_backend=xformers cannot be used: .*pip|attention_backend=xformers cannot be used: .*nstall",
        ),
        ("sage", "attention_backend=sage has no backward pass"),
    ],
)
def test_a_backend_that_cannot_be_used(flux, name, message):
    with pytest.raises(LoadError, match=message) as error:
        set_attention_backend(flux.network, name)
    assert "\n" not in str(error.value)


def test_a_network_that_would_ignore_the_backend_is_refused(sd3, unet):
    with pytest.raises(LoadError, match="ignored by SD3Transformer2DModel: its JointAttnProcessor2_0 always use"):
        sd3(attention_backend="_native_math")
    with pytest.raises(LoadError, match="ignored by UNet2DConditionModel: its AttnProcessor2_0 always use"):
        unet(attention_backend="_native_math")


# --- memory layout --------------------------------------------------------------------------------------------------


def test_channels_last_predicts_the_same(unet):
    plain, policy = unet(), unet(channels_last=True)
    convolution = policy.network.conv_in.weight
    assert convolution.is_contiguous(memory_format=torch.channels_last)
    assert not convolution.is_contiguous()
    with torch.no_grad():
        torch.testing.assert_close(predict(policy), predict(plain), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(policy), gradients(plain), rtol=1e-3, atol=1e-5)


def test_a_transformer_is_not_laid_out_by_channels(sd3):
    with pytest.raises(LoadError, match="channels_last=true is for UNets: SD3Transformer2DModel"):
        use_channels_last(sd3().network)


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
        loss = predict(policy).square().mean()
    policy.zero_grad()
    loss.backward()
    found_gradients = [p.grad for p in trainable_parameters(policy).values() if p.grad is not None]
    for one, other in zip([*found, *found_gradients], [*expected, *expected_gradients], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("outer", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_is_1_before_an_update_in_either_precision(sd3, dtype, outer):
    policy = sd3(dtype=dtype)
    objective = VGRPO(RolloutSpec(steps=2), num_mc_samples=2)
    objective.setup(policy)
    rollout = objective.roll_out(policy, RolloutRequest([PROMPT], [{}], [0], 2, 0, 0))
    # the phases may stand under different outer autocasts: Lightning's own surrounds a training step alone
    experience = objective.prepare(
        PrepareContext(policy, rollout, torch.tensor([1.0, -1.0]), micro_batch_size=2, updates=2)
    )
    with torch.autocast("cpu", outer or torch.bfloat16, enabled=outer is not None):
        _, metrics = objective.loss(policy, experience)
    assert experience.extras["old_surrogate"].dtype == torch.float32
    assert torch.equal(metrics["surrogate"], experience.extras["old_surrogate"])


# --- the benchmark --------------------------------------------------------------------------------------------------


def test_the_benchmark_runs_the_tiny_model_on_a_cpu(tmp_path):
    script = runpy.run_path(str(BENCHMARK))
    words = "--model tiny --device cpu --dtype float32 --steps 2 --pairs 1 --batch 2 --repeats 1 --side 32 --rank 2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script["main"]([*words.split(), "--no-compile", "--out", str(tmp_path / "speed.json")])
    rows = json.loads((tmp_path / "speed.json").read_text())
    assert [(row["phase"], row["variant"]) for row in rows] == [
        ("rollout", "folded"),
        ("rollout", "plain"),
        ("training", "plain"),
    ]
    for row in rows:
        assert row["seconds_per_image"] > 0
        assert row["tflop_per_image"] > 0
        assert row["million_parameters"] < 1
    newer = [{**row, "seconds_per_image": 0.0} for row in rows[:1]]
    assert script["merged"](rows, newer) == [*newer, *rows[1:]]  # a row of the same variant is replaced
    # a training pass is a forward and a backward: its operations are 2 to 3 times those of a pass of the rollout
    by_phase = {row["phase"]: row["tflop_per_image"] for row in rows}
    assert 1.0 < by_phase["training"] / (by_phase["rollout"] / 2) <= 3.0
