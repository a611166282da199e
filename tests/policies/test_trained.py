"""Trained part of a network: an adapter, all of it, or the parameters of some names."""

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.policies import SD3Policy
from lit_vgrpo.policies.checks import inputs
from lit_vgrpo.system.hub import LoadError


def sd3(folder, **options):
    return SD3Policy(str(folder), max_sequence_length=4, **options)


def trained_layers(policy):
    """The layers with an adapter, by their names in the network."""
    names = trainable_parameters(policy.network)
    return {name.partition(".lora_")[0] for name in names if ".lora_" in name}


def test_an_adapter_has_the_rank_and_the_scale_that_were_asked_for(tiny_sd3):
    policy = sd3(tiny_sd3, lora_rank=3, lora_alpha=12, lora_targets=["attn.to_q"]).load()
    layer = policy.network.get_submodule("transformer_blocks.0.attn.to_q")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert (a.shape[0], b.shape[1]) == (3, 3)
    assert not b.any()
    with torch.no_grad():
        b.normal_()
    x = torch.randn(5, a.shape[1])
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 12 / 3 * x @ a.T @ b.T, rtol=1e-5, atol=1e-5)
    assert sd3(tiny_sd3, lora_rank=3).lora_alpha == 3


def test_an_adapter_goes_to_the_targets_and_nowhere_else(tiny_sd3):
    policy = sd3(tiny_sd3, lora_rank=2, lora_targets=["attn.to_q", "ff.net.2"]).load()
    blocks = [f"transformer_blocks.{number}" for number in range(2)]
    assert trained_layers(policy) == {f"{block}.{end}" for block in blocks for end in ("attn.to_q", "ff.net.2")}
    one = sd3(tiny_sd3, lora_rank=2, lora_targets=["transformer_blocks.1.attn.to_q"]).load()
    assert trained_layers(one) == {"transformer_blocks.1.attn.to_q"}
    assert all(".attn." in name for name in trained_layers(sd3(tiny_sd3, lora_rank=2).load()))


def test_the_adapter_is_the_same_in_every_run(tiny_sd3, monkeypatch):
    adapters, seeds_of_gpus = [], []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds_of_gpus.append)
    for seed in (0, 1):
        torch.manual_seed(seed)
        adapters.append(trainable_parameters(sd3(tiny_sd3, lora_rank=2).load()))
        assert torch.initial_seed() == seeds_of_gpus[-1] == seed
    assert all(torch.equal(tensor, adapters[1][name]) for name, tensor in adapters[0].items())
    assert any(tensor.any() for name, tensor in adapters[0].items() if "lora_A" in name)


@pytest.mark.parametrize("target", ["to_out", "tn.to_q"])  # a list of layers, which is no layer, and half a word
def test_every_target_that_matches_nothing_is_named(tiny_sd3, target):
    policy = sd3(tiny_sd3, lora_rank=2, lora_targets=["attn.to_k", target])
    with pytest.raises(LoadError, match=f"lora_targets: {target!r} matches nothing in SD3Transformer2DModel."):
        policy.load()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lora_targets": ["to_q"]}, "lora_targets=['to_q'] has no effect with lora_rank=None."),
        ({"lora_rank": 2, "train_only": ["*"]}, "train_only and lora_rank are both set"),
        ({"start_weights": "ema"}, "start_weights='ema' has no effect with start_from=None."),
        ({"fold_lora": True}, "fold_lora=true needs lora_rank and dtype=float32."),
        ({"fold_lora": True, "lora_rank": 2, "dtype": "bfloat16"}, "fold_lora=true needs lora_rank and dtype=float32."),
        ({"quantisation": "nf4"}, "quantisation=nf4 needs lora_rank, without compile and without fold_lora."),
        ({"quantisation": "nf4", "lora_rank": 2, "compile": True}, "quantisation=nf4 needs lora_rank, without compile"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, line):
    with pytest.raises(ValueError, match="^[^\n]*$") as caught:
        sd3("x", **options)
    assert str(caught.value).startswith(line)


def test_every_pattern_that_matches_nothing_is_named(tiny_sd3):
    message = "train_only: 'proj_out.wieght' matches nothing in SD3Transformer2DModel. Did you mean proj_out.weight?"
    with pytest.raises(LoadError, match=message):
        sd3(tiny_sd3, train_only=["*.attn.*", "proj_out.wieght"]).load()
    with pytest.raises(LoadError, match="'attn' matches nothing"):  # a whole name is compared
        sd3(tiny_sd3, train_only=["attn"]).load()


def test_what_is_trained_is_float32_and_what_is_frozen_takes_half(tiny_sd3):
    pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(tiny_sd3, text_encoder_3=None, tokenizer_3=None)
    policy = sd3(tiny_sd3, dtype="bfloat16", train_only=["*.attn.*"]).adopt(pipeline)
    types = {(p.requires_grad, p.dtype) for p in policy.network.parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}
    prediction = policy(*inputs(policy))
    assert prediction.dtype == torch.float32
    prediction.square().mean().backward()
    assert any(p.grad is not None and p.grad.any() for p in trainable_parameters(policy).values())


@pytest.mark.parametrize("options", [{}, {"train_only": ["proj_out.*"]}])
def test_training_in_16_bits_starts_from_the_weights_as_they_are_stored(tiny_sd3, options):
    policy = sd3(tiny_sd3, dtype="bfloat16", **options).load()
    stored = load_file(tiny_sd3 / "transformer" / "diffusion_pytorch_model.safetensors")
    trained = trainable_parameters(policy.network)
    assert len(trained) == (2 if options else len(list(policy.network.parameters())))
    assert all(torch.equal(tensor, stored[name]) for name, tensor in trained.items())
    stored = load_file(tiny_sd3 / "vae" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in policy.pipeline.vae.named_parameters())
