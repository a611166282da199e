"""Pipelines of a family's class that are published with other parts or flags than the small ones of the tests."""

import json
import shutil
from dataclasses import replace

import diffusers
import pytest
from policies import contract

from lit_vgrpo.policies import FluxPolicy, KontextPolicy, SD3Policy, UNetPolicy
from lit_vgrpo.policies.misfits import distillation
from lit_vgrpo.policies.pipeline_folder import distillation_warning
from lit_vgrpo.system.hub import LoadError


def edited(folder, to, file, **entries):
    """A copy of a pipeline folder with other entries in one of its JSON files."""
    shutil.copytree(folder, to)
    path = to / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    return to


def with_scheduler(folder, to, kind, **entries):
    config = edited(folder, to, "scheduler/scheduler_config.json", _class_name=kind, **entries) / "model_index.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "scheduler": ["diffusers", kind]}))
    return to


# --- what is published and works --------------------------------------------------------------------------------------

SD2_UNET = {
    "attention_head_dim": [2, 4],
    "use_linear_projection": True,
    "upcast_attention": True,
    "dual_cross_attention": False,
}
V_FROM_PURE_NOISE = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
PUBLISHED = {
    "SD 1.5": ("unet_eps", "unet", {}, "PNDMScheduler", {"skip_prk_steps": True, "clip_sample": False}),
    "SD 2.1": ("unet_v", "unet", SD2_UNET, "DDIMScheduler", {"timestep_spacing": "leading"}),
    "NoobAI v": ("sdxl", "unet", {"upcast_attention": None}, "EulerDiscreteScheduler", V_FROM_PURE_NOISE),
    "SD 3": ("sd3", "transformer", {"qk_norm": None}, "FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    "SD 3.5 M": (
        *("sd3", "transformer", {"dual_attention_layers": [0], "pos_embed_max_size": 12}),
        *("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
    ),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_flags_draw_the_pipelines_picture(families, tmp_path, model):
    name, network, flags, scheduler, entries = PUBLISHED[model]
    small = families(name)
    folder = with_scheduler(small.folder, tmp_path / "published", scheduler, **entries)
    config = json.loads((folder / network / "config.json").read_text())
    kind = getattr(diffusers, config["_class_name"])
    kind.from_config({**config, **flags}).save_pretrained(folder / network)
    family = replace(small, folder=folder)
    contract.same_image_as_the_pipeline(family, family.policy_class.solvers[0], 3.0)


def test_an_index_of_years_ago_with_its_safety_checker(families, tmp_path):
    """Its classes are not in transformers any more, its weights need not be there."""
    small = families("unet_eps")
    old = {
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPFeatureExtractor"],
        "requires_safety_checker": True,
    }
    folder = edited(small.folder, tmp_path / "old", "model_index.json", **old)
    assert replace(small, folder=folder).load().loaded


# --- what is refused --------------------------------------------------------------------------------------------------

MISFITS = {
    "inpainting": (
        "unet_eps",
        "unet/config.json",
        {"in_channels": 17},
        "its unet takes 17 channels and its VAE has 8",
    ),
    "pix2pix": ("sdxl", "unet/config.json", {"in_channels": 16}, "is not a text-to-image model: its unet takes 16"),
    "fill": ("flux", "transformer/config.json", {"in_channels": 192}, "takes 192 channels and its VAE has 32"),
    "SD3 edit": ("sd3", "transformer/config.json", {"in_channels": 16}, "its transformer takes 16"),
    "LCM": ("unet_eps", "unet/config.json", {"time_cond_proj_dim": 256}, "is a consistency model, distilled"),
    "refiner": ("sdxl", "model_index.json", {"text_encoder": [None, None]}, "has one text encoder, like the refiner"),
    "eps": ("sdxl", "scheduler/scheduler_config.json", {"rescale_betas_zero_snr": True}, "ends in pure noise"),
    "noisy": ("flux", "scheduler/scheduler_config.json", {"stochastic_sampling": True}, "stochastic_sampling: true"),
    "custom": ("sdxl", "model_index.json", {"_class_name": ["pipe", "Mine"]}, r"is a \['pipe', 'Mine'\], SDXLPolicy"),
}
SCHEDULERS = {
    "EDMDPMSolverMultistepScheduler": ("sdxl", "it was trained on another noise schedule than SDXLPolicy's"),
    "FlowMatchHeunDiscreteScheduler": ("sd3", "a rectified flow needs FlowMatchEulerDiscreteScheduler"),
}


def is_refused(small, folder, said):
    policy = small.policy_class(str(folder), **small.options)
    with pytest.raises(LoadError, match=said) as caught:
        policy.load()
    assert policy.check() == [str(caught.value)]
    assert str(caught.value).startswith(f"model.policy.checkpoint={folder} ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", MISFITS)
def test_a_pipeline_that_does_something_else_is_one_line_before_loading(families, tmp_path, kind):
    name, file, entries, said = MISFITS[kind]
    is_refused(families(name), edited(families(name).folder, tmp_path / "other", file, **entries), said)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_of_another_path_is_one_line_before_loading(families, tmp_path, kind):
    name, said = SCHEDULERS[kind]
    is_refused(families(name), with_scheduler(families(name).folder, tmp_path / "other", kind), said)


def test_a_pipeline_in_memory_is_looked_at_too(families):
    small = families("sd3")
    pipeline = small.pipeline()
    pipeline.scheduler = diffusers.FlowMatchHeunDiscreteScheduler()
    with pytest.raises(LoadError, match="comes with FlowMatchHeunDiscreteScheduler"):
        small.policy_class("mine", **small.options).adopt(pipeline)

    class Own(diffusers.FlowMatchEulerDiscreteScheduler):
        """Somebody's own, known by what it was made from."""

    pipeline.scheduler = Own()
    assert small.policy_class("mine", **small.options).adopt(pipeline).loaded


def test_what_looks_distilled_is_warned_of(families, tmp_path):
    small, flux = families("unet_eps"), families("flux_cfg")
    folder = with_scheduler(small.folder, tmp_path / "lcm", "LCMScheduler")
    schnell = edited(flux.folder, tmp_path / "s", "scheduler/scheduler_config.json", use_dynamic_shifting=False)
    told = {
        UNetPolicy(str(folder)): r"its scheduler is LCMScheduler",
        FluxPolicy(str(schnell)): r"neither guidance_embeds nor use_dynamic_shifting, as in FLUX.1-schnell",
        SD3Policy("stabilityai/stable-diffusion-3.5-large-turbo"): r"its name has turbo",
    }
    for policy, why in told.items():
        assert f"looks distilled to a few steps ({why}). Trained directly, it loses" in distillation_warning(policy)
    loaded = replace(small, folder=folder).load()
    assert distillation_warning(loaded) == distillation_warning(UNetPolicy(str(folder)))
    for policy in (small.shared, flux.shared, SD3Policy("own/turbocharged"), KontextPolicy("shipped:assets/tiny_edit")):
        assert distillation_warning(policy) is None
    turbo = {"_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing"}
    assert distillation(turbo) == "EulerAncestralDiscreteScheduler, trailing"
    assert distillation({**turbo, "timestep_spacing": "leading"}) is None
