"""Loading of policies: what is refused, variants, the hub's cache, types and sizes; folders: test_folders.py."""

import json
import shutil

import diffusers
import pytest
import torch
from helpers import make_data, make_module, make_trainer, repeating
from huggingface_hub import constants
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from policies import contract

from lit_vgrpo import OptimizerConfig
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies import FluxPolicy, SD3Policy, SDXLPolicy, UNetPolicy
from lit_vgrpo.policies.loading import distillation_warning
from lit_vgrpo.policies.meta import policy_on_meta
from lit_vgrpo.report.model_card import loading_lines
from lit_vgrpo.system.hub import WEIGHTS, LoadError
from lit_vgrpo.training.strategies import strategy_errors

COMMIT = "a" * 40
LARGE_SIZES = [("qwen_image", 40, 24), ("flux2", 8, 56), ("z_image", 40, 24)]


def test_a_distilled_model_is_warned_of_by_its_name():
    for name, word in {"stabilityai/sd-turbo": "turbo", "a/FLUX.1-schnell": "schnell"}.items():
        assert f"looks distilled to a few steps (its name has {word})" in distillation_warning(SD3Policy(name))
    assert distillation_warning(SD3Policy("own/turbocharged")) is None


def test_a_distilled_model_is_warned_of_by_its_index(families, tmp_path):
    small = families("krea2")
    assert distillation_warning(small.policy_class(str(small.folder))) is None
    folder = shutil.copytree(small.folder, tmp_path / "model")
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "is_distilled": True}))
    found = distillation_warning(small.policy_class(str(folder)))
    assert "looks distilled to a few steps (is_distilled in its model_index.json). Trained directly" in found
    pipeline = families("unet_eps").pipeline()
    assert distillation_warning(UNetPolicy(pipeline)) is None
    pipeline.scheduler = diffusers.LCMScheduler.from_config(pipeline.scheduler.config)
    assert "(its scheduler is LCMScheduler)" in distillation_warning(UNetPolicy(pipeline))
    pipeline.save_pretrained(tmp_path / "few")
    assert "(its scheduler is LCMScheduler)" in distillation_warning(UNetPolicy(str(tmp_path / "few")))


def test_another_family_and_a_damaged_index_are_refused_in_one_line(families, tmp_path):
    with pytest.raises(LoadError, match="is a StableDiffusionXLPipeline, SD3Policy needs StableDiffusion3Pipeline."):
        SD3Policy(str(families("sdxl").folder)).load()
    (tmp_path / "model_index.json").write_text("[1")
    assert "is damaged" in SD3Policy(str(tmp_path)).check()[0]


def test_guidance_as_an_input_is_known_before_loading(flux_folder):
    policies = {embeds: FluxPolicy(str(flux_folder(embeds)), negative_prompt="fog") for embeds in (True, False)}
    assert {embeds: policy.embeds_guidance for embeds, policy in policies.items()} == {True: True, False: False}
    assert FluxPolicy("black-forest-labs/FLUX.1-dev").embeds_guidance  # until its config is there


def test_a_template_that_leaves_no_token_for_a_prompt_is_refused(families):
    message = r"max_sequence_length=20 leaves no token for a prompt: its template takes 28\.$"
    with pytest.raises(LoadError, match=message):
        families("lumina2").load(max_sequence_length=20)


def as_variant(folder, to, variant="fp16"):
    shutil.copytree(folder, to)
    for file in list(to.rglob("*.safetensors")):
        file.rename(file.with_suffix(f".{variant}.safetensors"))
    return to


def same_weights(policy, other):
    pairs = zip(policy.network.parameters(), other.network.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


# --- variants, and the hub's cache ------------------------------------------------------------------------------------


def test_variants_are_read_from_names():
    for name, variant in {
        "diffusion_pytorch_model-00001-of-00002.safetensors": None,
        "diffusion_pytorch_model.non_ema.bin": "non_ema",
        "model.fp16-00001-of-00002.safetensors": "fp16",
        "model-00001-of-00002.fp16.safetensors": "fp16",
    }.items():
        match = WEIGHTS.fullmatch(name)
        assert (match[1] or match[2]) == variant
    for name in ("openvino_model.bin", "model.onnx", "model.safetensors.index.fp16.json"):
        assert WEIGHTS.fullmatch(name) is None


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """``cached(folder, name)``: a pipeline folder as a repository of that name in the hub's cache, and no hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(folder, name, branch="main"):
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / branch).write_text(COMMIT)
        shutil.copytree(folder, repository / "snapshots" / COMMIT)
        return name

    return put


def test_a_cached_pipeline_without_t5_loads_silently(families, cached, capfd):
    """Components that are null in its index must be named to diffusers, as for a folder."""
    plain = families("sd3")
    policy = SD3Policy(cached(plain.folder, "some/sd3"), **plain.options)
    assert policy.check() == []
    capfd.readouterr()
    assert same_weights(policy.load(), plain.shared)
    assert capfd.readouterr().err == ""
    line = loading_lines(policy, "some/sd3", policy.dtype)[0]
    assert 'from_pretrained("some/sd3", text_encoder_3=None, tokenizer_3=None, dtype=torch.float32)' in line


def test_a_variant_in_the_cache_is_loaded(families, cached, tmp_path):
    plain = families("sdxl")
    name = cached(as_variant(plain.folder, tmp_path / "half"), "some/half")
    policy = SDXLPolicy(name, variant="fp16")
    assert policy.check() == []
    assert same_weights(policy.load(), plain.shared)
    assert f'("{name}", variant="fp16", dtype' in loading_lines(policy, name, policy.dtype)[0]


def test_a_revision_is_looked_for_by_its_name(families, cached):
    plain = families("sdxl")
    name = cached(plain.folder, "some/model", branch="v2")
    (error,) = SDXLPolicy(name).check()
    assert error.startswith(f"Cannot load {name}: not in the local cache")
    missing = SDXLPolicy(name, revision="v3", variant="fp16").check()[0]
    assert ".download('some/model', revision='v3', variant='fp16')\", or" in missing
    for revision in ("v2", COMMIT):
        assert SDXLPolicy(name, revision=revision).check() == []
    policy = SDXLPolicy(name, revision="v2")
    assert policy_on_meta(policy).device.type == "meta"
    assert same_weights(policy.load(), plain.shared)
    assert f'("{name}", revision="v2", dtype' in loading_lines(policy, name, policy.dtype)[0]


# --- float16 ----------------------------------------------------------------------------------------------------------


def test_float16_keeps_in_float32_what_would_overflow(families):
    """T5's second layer of each block; and the prediction is that of float32, to the precision of the type."""
    plain = families("sd3_t5")
    policy = plain.load(dtype="float16", lora_rank=2)
    types = {name.split(".")[-2]: p.dtype for name, p in policy.pipeline.text_encoder_3.named_parameters()}
    assert (types["wo"], types["q"]) == (torch.float32, torch.float16)
    assert {p.dtype for p in policy.pipeline.vae.parameters()} == {torch.float32}
    noise = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = (p(noise, torch.tensor([0.5]), p.encode(["dogs"])) for p in (policy, plain.shared))
    assert 0 < (found - expected).norm() / expected.norm() < 0.01


def test_float16_is_refused_where_linear_attention_overflows(families):
    with pytest.raises(LoadError, match="dtype=float16: the linear attention of SanaPolicy overflows under autocast"):
        families("sana").load(dtype="float16")


def test_float16_is_not_trained_without_a_gradient_scaler(tiny_sd3, tmp_path):
    module = make_module(tiny_sd3, policy_options={"dtype": "float16", "lora_rank": 2})
    with pytest.raises(ValueError, match=r"dtype=float16: gradients underflow, .* trainer.precision=16-mixed, which"):
        make_trainer(tmp_path).fit(module, datamodule=make_data())
    assert not module.policy.loaded
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    for plugin, policy in ((scaled, module.policy), (None, SD3Policy("any", dtype="bfloat16"))):
        strategy = SingleDeviceStrategy("cpu", precision_plugin=plugin)
        assert [*strategy_errors(strategy, policy, OptimizerConfig(), Sizes(1, 2))] == []


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes_that_the_vae_or_the_patches_cannot_take(families):
    for name, multiple in (("sd3", 8), ("sdxl", 4), ("flux2", 8), ("wan", 8)):
        with pytest.raises(LoadError, match=rf"model.policy.height=36.* is not a multiple of {multiple} "):
            families(name).load(height=36 if multiple == 8 else 362)


@pytest.mark.parametrize(
    ("name", "height", "width"),
    # latents of 7 x 11 divide by nothing that a UNet halves them by
    repeating([("sd3", 32, 16), ("sdxl", 28, 44), ("flux", 40, 24), *LARGE_SIZES], slow=LARGE_SIZES),
)
def test_any_size_that_the_model_allows(families, name, height, width):
    policy = families(name).load(height=height, width=width)
    noise, t, cond = contract.inputs(policy)
    latents, _ = sample(policy, cond, torch.arange(2), RolloutSpec(policy.solvers[0], 2), noise)
    assert policy.decode(latents).shape == (2, 3, height, width)
    policy(noise, t, cond).mean().backward()


@pytest.mark.parametrize(("name", "side"), [("sd3", 32), ("unet_eps", 32), ("sdxl", 32), ("flux", 512)])
def test_the_size_is_the_pipelines_own_when_none_is_asked_for(families, name, side):
    policy = families(name).load(height=None, width=None)
    assert policy.latent_shape == (8, side // 4, side // 4)


# --- UNets ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", repeating(["unet_eps", "sdxl"], slow=["sdxl"]))
def test_channels_last_changes_the_layout_alone(families, tmp_path, name):
    family = families(name)
    policy = family.load(channels_last=True)
    convolutions = [module for module in policy.network.modules() if isinstance(module, torch.nn.Conv2d)]
    assert all(module.weight.is_contiguous(memory_format=torch.channels_last) for module in convolutions)
    given = contract.inputs(policy)
    with torch.no_grad():
        torch.testing.assert_close(policy(*given), family.shared(*given), rtol=1e-4, atol=1e-5)
    contract.trained_weights_are_saved_as_a_pipeline(family, tmp_path / "out", channels_last=True)


def test_an_empty_negative_prompt_is_what_the_pipeline_makes_of_none(families):
    """Zeros, or where the pipeline's config says otherwise the embedding of an empty prompt."""
    zeros, encoded = (families("sdxl").load() for _ in range(2))
    encoded.pipeline.register_to_config(force_zeros_for_empty_prompt=False)
    assert not any(value.any() for value in zeros.negative().tensors.values())
    for name, value in encoded.encode([""]).tensors.items():
        assert value.any()
        assert torch.equal(encoded.negative().tensors[name], value)


def test_latents_mean_and_deviation_of_the_vae(families):
    policy = families("sdxl").load()
    latents = contract.inputs(policy)[0]
    mean, std = torch.linspace(-1, 1, 8), torch.linspace(0.5, 2, 8)
    policy.pipeline.vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    raw = latents * std.reshape(-1, 1, 1) / 0.8 + mean.reshape(-1, 1, 1)
    expected = (policy.pipeline.vae.decode(raw, return_dict=False)[0] / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(policy.decode(latents), expected)
    again = policy.encode_images(expected)
    encoded = policy.pipeline.vae.encode(expected * 2 - 1).latent_dist.mode()
    torch.testing.assert_close(again, (encoded - mean.reshape(-1, 1, 1)) * 0.8 / std.reshape(-1, 1, 1))
