"""Loading of policies, and errors for a checkpoint or an option that does not fit."""

import json
import shutil

import pytest
import torch
from helpers import repeating
from policies import contract

from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies import FluxPolicy, SD3Policy, SDXLPolicy, UNetPolicy
from lit_vgrpo.system.hub import LoadError

CLASSES = {"sd3": SD3Policy, "unet_eps": UNetPolicy, "sdxl": SDXLPolicy, "flux": FluxPolicy}


@pytest.mark.parametrize("found", CLASSES)
@pytest.mark.parametrize("asked", CLASSES)
def test_another_family_is_one_line_that_names_the_right_class(families, asked, found):
    family = families(found)
    wrong = CLASSES[asked](str(family.folder))
    if asked == found:
        assert wrong.check() == []
        return
    (error,) = wrong.check()
    kinds = family.policy_class.pipeline_class, CLASSES[asked].pipeline_class
    assert f"is a {kinds[0]}, {CLASSES[asked].__name__} needs {kinds[1]}." in error
    assert error.endswith(f"Use class_path: {family.policy_class.__name__}.")
    with pytest.raises(LoadError, match="Use class_path"):
        wrong.load()


def test_bad_checkpoints_are_one_line(tmp_path):
    assert "is not a folder" in SD3Policy(str(tmp_path / "missing")).check()[0]
    assert "no model_index.json" in SD3Policy(str(tmp_path)).check()[0]
    (tmp_path / "model_index.json").write_text("[1")
    assert "is damaged" in SD3Policy(str(tmp_path)).check()[0]


@pytest.mark.parametrize("name", ["someone/no-such-model", "black-forest-labs/FLUX.1-dev"])
def test_what_is_not_in_the_cache_names_the_way_out(name):
    policy = FluxPolicy(name)
    (error,) = policy.check()
    assert error.startswith(f"Cannot load {name}: not in the local cache and HF_HUB_OFFLINE is set.")
    assert error.endswith(f"Run: hf download {name}, or set model.policy.checkpoint=/a/local/folder.")
    assert policy.embeds_guidance  # until its config is there


@pytest.mark.parametrize("family", ["sd3", "flux"], indirect=True)
def test_damaged_weights_are_one_line(family, tmp_path):
    folder = shutil.copytree(family.folder, tmp_path / "damaged")
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"not weights")
    with pytest.raises(LoadError, match=r"^Cannot load \S+: .*Download or save it again[^\n]*$"):
        family.policy_class(str(folder)).load()


def test_a_schedule_that_is_neither_epsilon_nor_v(families, tmp_path):
    folder = shutil.copytree(families("sdxl").folder, tmp_path / "sample")
    path = folder / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prediction_type": "sample"}))
    with pytest.raises(LoadError, match="predicts 'sample'. SDXLPolicy supports epsilon or v_prediction"):
        SDXLPolicy(str(folder)).load()


def test_lora_targets_that_match_nothing(families):
    policy = SD3Policy(str(families("sd3").folder), lora_rank=2, lora_targets=["nothing_here"])
    with pytest.raises(LoadError, match="matches nothing in SD3Transformer2DModel"):
        policy.load()


@pytest.mark.parametrize("options", [{"lora_rank": 0}, {"dtype": "int8"}, {"max_sequence_length": 513}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        FluxPolicy("x", **options)


def test_whether_guidance_is_an_input_is_known_before_loading(flux_folder):
    policies = {embeds: FluxPolicy(str(flux_folder(embeds)), negative_prompt="fog") for embeds in (True, False)}
    assert {embeds: policy.embeds_guidance for embeds, policy in policies.items()} == {True: True, False: False}
    assert policies[False].check() == []
    (error,) = policies[True].check()
    assert error.startswith("model.policy.negative_prompt='fog' has no effect")


@pytest.mark.parametrize("family", ["sd3", "sdxl", "flux"], indirect=True)
def test_loading_is_silent(family, tmp_path, capfd):
    family.load().save(tmp_path / "again")
    assert capfd.readouterr().err == ""


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "multiple", "wrong"),
    [
        ("sd3", 8, 33),
        ("unet_eps", 4, 33),
        ("sdxl", 4, 33),
        ("flux", 8, 36),
        ("flux", 8, 7),
        ("qwen_image", 8, 36),
        ("flux2", 8, 36),
        ("z_image", 8, 36),
    ],
)
def test_sizes_that_the_vae_or_the_patches_cannot_take(families, name, multiple, wrong):
    lower = wrong // multiple * multiple
    nearest = f"{lower} or {lower + multiple}" if lower else str(multiple)
    for side in ("height", "width"):
        message = rf"model.policy.{side}={wrong} is not a multiple of {multiple} \(.*\). Use {nearest}\."
        with pytest.raises(LoadError, match=message):
            families(name).load(**{side: wrong})


def test_sizes_that_the_positions_do_not_reach(families):
    with pytest.raises(LoadError, match="model.policy.width=40 is more than the network's positions cover. Use 32"):
        families("sd3").load(width=40)


@pytest.mark.parametrize(
    ("name", "height", "width"),
    # latents of 7 x 11 divide by nothing that a UNet halves them by
    [
        ("sd3", 32, 16),
        ("unet_eps", 28, 44),
        ("sdxl", 28, 44),
        ("flux", 40, 24),
        ("flux_cfg", 8, 56),
        ("qwen_image", 40, 24),
        ("flux2", 8, 56),
        ("z_image", 40, 24),
    ],
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
