"""A frozen base in 4 or 8 bits under a LoRA."""

import pytest
import torch
from commands import export, run, sample_images
from helpers import make_data, make_module, make_trainer
from policies.contract import inputs

from lit_vgrpo import VGRPO, OptimizerConfig
from lit_vgrpo.apps.memory.shares import bytes_of, saved_by_quantisation, tensors_of
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies import SD3Policy
from lit_vgrpo.policies.meta import policy_on_meta
from lit_vgrpo.policies.trained import QuantisedLinear, block_linears
from lit_vgrpo.training.strategies import FSDP2, ZeRO, strategy_errors

SHIPPED = "shipped:assets/tiny_sd3"
MOST = {"nf4": 0.15, "int8": 0.03}


def policy(**options):
    return SD3Policy(SHIPPED, **{"max_sequence_length": 1, "lora_rank": 2, **options})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("nf4", "bfloat16"), ("int8", "float32")])
def test_predictions_are_near_and_the_same_with_and_without_gradient(kind, dtype):
    whole, narrow = policy(dtype=dtype).load(), policy(dtype=dtype, quantisation=kind).load()
    layers = block_linears(narrow.network)
    assert len(layers) > 10
    assert all(isinstance(layer, QuantisedLinear) for layer in layers.values())
    assert {p.dtype for p in trainable_parameters(narrow).values()} == {torch.float32}
    found = narrow(*inputs(narrow))
    with torch.no_grad():
        assert torch.equal(narrow(*inputs(narrow)), found)
        expected = whole(*inputs(whole))
        noise, t, cond = inputs(narrow)
        alone = narrow(noise[1:], t[1:], cond.select(torch.tensor([1])))
    assert 0 < (found - expected).norm() / expected.norm() < MOST[kind]
    torch.testing.assert_close(alone, found[1:], rtol=0, atol=1e-4 if dtype == "float32" else 0.1)
    for one in (whole, narrow):
        one(*inputs(one)).square().mean().backward()
    gradients = [torch.cat([p.grad.flatten() for p in trainable_parameters(one).values()]) for one in (narrow, whole)]
    assert 0 < (gradients[0] - gradients[1]).norm() / gradients[1].norm() < 5 * MOST[kind]
    twin = policy_on_meta(policy(dtype=dtype, quantisation=kind))
    estimated = bytes_of(tensors_of(twin.network)) - saved_by_quantisation(twin)
    codes = sum(layer.code.numel() * 4 for layer in layers.values())
    assert estimated == bytes_of(tensors_of(narrow.network)) - codes


@pytest.mark.slow
def test_a_run_trains_resumes_samples_and_is_exported_merged(tiny_recipe):
    words = [str(tiny_recipe), "model.policy.checkpoint=" + SHIPPED, "model.policy.lora_rank=2", "name=q"]
    assert run([*words, "model.policy.quantisation=nf4", "trainer.max_epochs=1"]) == 0
    assert run(["runs/q/config.yaml", "--resume", "trainer.max_epochs=2"]) == 0
    assert sample_images(["runs/q", "--prompt", "a red circle"]) == 0
    assert export(["runs/q", "--to", "adapter"]) == 0
    assert export(["runs/q", "--to", "merged", "--merge"]) == 0
    merged, base = SD3Policy("merged", max_sequence_length=1).load(), policy().load()
    outside = "pos_embed.proj.weight"
    assert torch.equal(merged.network.get_parameter(outside), base.network.get_parameter(outside))
    whole = base.network.transformer_blocks[0].attn.to_q.base_layer.weight
    first, _, third, *_ = torch.linalg.svdvals(merged.network.transformer_blocks[0].attn.to_q.weight - whole)
    assert third < 1e-3 * first  # the LoRA's rank is 2, that of rounding would be full


@pytest.mark.slow
def test_the_ratio_is_one_before_an_update(tmp_path):
    options = {"lora_rank": 2, "dtype": "bfloat16", "quantisation": "nf4"}
    module = make_module(SHIPPED, VGRPO(RolloutSpec(steps=2), num_mc_samples=2), policy_options=options)
    trainer = make_trainer(tmp_path, iterations=1)
    trainer.fit(module, datamodule=make_data())
    assert trainer.callback_metrics["policy/ratio_deviation"] == 0


def test_what_cannot_be_quantised_is_one_line_before_weights_load():
    for strategy in (FSDP2(), ZeRO(stage=3), ZeRO(stage=2)):
        (error,) = strategy_errors(strategy, policy(quantisation="nf4"), OptimizerConfig(), Sizes(1, 2))
        assert "quantisation=nf4 works on one device and under DDP, not under" in error
