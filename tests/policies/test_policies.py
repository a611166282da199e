"""Every family through the same checks, on small real pipelines."""

import shutil
from pathlib import Path

import diffusers
import pytest
import torch

from lit_vgrpo.hub import LoadError
from lit_vgrpo.policies import SD3Policy, UNetPolicy
from lit_vgrpo.policies.schedulers import flow_scheduler
from lit_vgrpo.rollout import RolloutSpec, image_generators, sample
from lit_vgrpo.snapshots import trainable_parameters

PROMPTS = ["a red circle on the left", "a blue square on the right"]


@pytest.fixture(params=["sd3", "sd3_t5", "unet_eps", "unet_v"])
def family(request, sd3_folder, unet_folder):
    """A policy class, its folder and options, and the matching pipeline's options."""
    return {
        "sd3": lambda: (SD3Policy, sd3_folder(t5=False), {"max_sequence_length": 4}),
        "sd3_t5": lambda: (SD3Policy, sd3_folder(t5=True), {"max_sequence_length": 8}),
        "unet_eps": lambda: (UNetPolicy, unet_folder("epsilon"), {}),
        "unet_v": lambda: (UNetPolicy, unet_folder("v_prediction"), {}),
    }[request.param]()


def load(family, **options):
    cls, folder, own = family
    return cls(str(folder), **own, **options).load()


def plain_pipeline(policy):
    cls = getattr(diffusers, policy.pipeline_class)
    pipeline = cls.from_pretrained(policy.checkpoint, **policy.null_components(Path(policy.checkpoint)))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def cases():
    for solver in ("euler", "dpm++", "unipc", "ddim"):
        for guidance in (1.0, 3.0):
            yield solver, guidance


@pytest.mark.parametrize(("solver", "guidance"), list(cases()))
def test_same_noise_same_image_as_the_pipeline(family, solver, guidance):
    policy = load(family)
    if solver not in policy.solvers:
        with pytest.raises(ValueError, match="does not exist on the"):
            policy.scheduler(solver, 3)
        return
    noise = policy.prior(image_generators(1, 0, 0, [0, 1]))
    latents, times = sample(policy, policy.encode(PROMPTS), torch.arange(2), RolloutSpec(solver, 5, guidance), noise)
    assert len(times) == 5
    pipeline = plain_pipeline(policy)
    pipeline.scheduler = policy.scheduler(solver, 5)
    extra = {"max_sequence_length": policy.max_sequence_length} if isinstance(policy, SD3Policy) else {}
    images = pipeline(
        PROMPTS,
        num_inference_steps=5,
        guidance_scale=guidance,
        latents=noise.clone(),
        output_type="pt",
        height=32,
        width=32,
        **extra,
    ).images
    torch.testing.assert_close(policy.decode(latents), images, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_gradient_reaches_exactly_the_trainable_weights(family, lora_rank):
    policy = load(family, lora_rank=lora_rank)
    noise = policy.prior(image_generators(1, 0, 0, [0, 1]))
    cond = policy.encode(PROMPTS)
    policy(noise, torch.tensor([0.3, 0.7]), cond).square().mean().backward()
    trained = trainable_parameters(policy)
    assert trained
    for name, parameter in policy.named_parameters():
        assert (parameter.grad is not None) == (name in trained) or "add_k_proj" in name or "context" in name, name
    if lora_rank is not None:
        assert all("lora" in name for name in trained)
    for helper in policy.helpers():
        assert not helper.training
        assert not any(p.requires_grad for p in helper.parameters())
    assert not any("vae" in name or "text_encoder" in name for name, _ in policy.named_parameters())


def test_stays_in_eval_mode(family):
    policy = load(family).train()
    assert not policy.network.training


def test_a_fresh_adapter_changes_nothing(family):
    plain, adapted = load(family), load(family, lora_rank=4, lora_alpha=8)
    noise, t = plain.prior(image_generators(1, 0, 0, [0, 1])), torch.tensor([0.3, 0.7])
    with torch.no_grad():
        torch.testing.assert_close(
            adapted(noise, t, adapted.encode(PROMPTS)), plain(noise, t, plain.encode(PROMPTS)), rtol=1e-5, atol=1e-6
        )


def test_a_row_does_not_depend_on_its_batch(family):
    policy = load(family)
    noise, t = policy.prior(image_generators(1, 0, 0, [0, 1])), torch.tensor([0.3, 0.7])
    cond = policy.encode(PROMPTS)
    with torch.no_grad():
        both = policy(noise, t, cond)
        alone = policy(noise[1:], t[1:], cond.select(torch.tensor([1])))
    torch.testing.assert_close(both[1:], alone, rtol=1e-4, atol=1e-5)


def test_noise_depends_on_the_image_number_alone(family):
    policy = load(family)
    many, one = (policy.prior(image_generators(1, 0, 5, ids)) for ids in ([3, 4, 5], [4]))
    assert torch.equal(many[1:2], one)


def test_decode_and_encode_are_inverse_up_to_the_vae(family):
    policy = load(family)
    images = policy.decode(policy.prior(image_generators(1, 0, 0, [0, 1])))
    assert images.shape == (2, 3, 32, 32)
    assert images.min() >= 0
    assert images.max() <= 1
    assert policy.encode_images(images).shape == (2, *policy.latent_shape)


def test_full_weights_are_saved_as_a_pipeline(family, tmp_path):
    policy = load(family)
    with torch.no_grad():
        next(iter(trainable_parameters(policy).values())).add_(0.1)
    policy.save(tmp_path / "out")
    again = type(policy)(str(tmp_path / "out"), **family[2]).load()
    for (name, saved), (_, kept) in zip(again.named_parameters(), policy.named_parameters(), strict=True):
        assert torch.equal(saved, kept), name


def test_lora_is_saved_so_that_the_pipeline_loads_it(family, tmp_path):
    policy = load(family, lora_rank=2, lora_alpha=4)
    with torch.no_grad():
        for name, parameter in trainable_parameters(policy).items():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    noise, t = policy.prior(image_generators(1, 0, 0, [0, 1])), torch.tensor([0.3, 0.7])
    cond = policy.encode(PROMPTS)
    policy.save(tmp_path / "lora")
    pipeline = plain_pipeline(policy)
    pipeline.load_lora_weights(str(tmp_path / "lora"))
    other = type(policy)(policy.checkpoint, **family[2]).adopt(pipeline)
    fresh = load(family)
    with torch.no_grad():
        trained = policy(noise, t, cond)
        torch.testing.assert_close(other(noise, t, cond), trained, rtol=1e-4, atol=1e-5)
        assert (fresh(noise, t, cond) - trained).abs().max() > 1e-3


def test_bfloat16_autocast_keeps_trained_weights_in_float32(family):
    policy = load(family, lora_rank=2, dtype="bfloat16")
    assert {p.dtype for p in trainable_parameters(policy).values()} == {torch.float32}
    frozen = {p.dtype for p in policy.network.parameters() if not p.requires_grad}
    assert frozen == {torch.bfloat16}
    noise, t = policy.prior(image_generators(1, 0, 0, [0, 1])), torch.tensor([0.3, 0.7])
    prediction = policy(noise, t, policy.encode(PROMPTS), guidance=2.0)
    assert prediction.dtype == torch.float32
    assert policy.decode(noise).dtype == torch.float32
    prediction.mean().backward()


@pytest.mark.parametrize("solver", ["euler", "dpm++", "unipc"])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_solvers_integrate_a_linear_field_exactly(solver, shift):
    """With v = eps - x for one known x, every solver must end at that x."""
    base = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler = flow_scheduler(solver, shift, base)
    scheduler.set_timesteps(8)
    x, z = torch.full((1, 1, 2, 2), 0.7), torch.randn(1, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    for timestep, t in zip(scheduler.timesteps, scheduler.sigmas, strict=False):
        z = scheduler.step((z - x) / t, timestep, z, return_dict=False)[0]
    torch.testing.assert_close(z, x, rtol=1e-3, atol=1e-3)


def test_dynamic_shift_gives_the_pipelines_own_times(sd3_folder):
    policy = SD3Policy(str(sd3_folder(t5=False)), max_sequence_length=4).load()
    config = {**policy.pipeline.scheduler.config, "use_dynamic_shifting": True}
    policy.pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_config(config)
    pipeline = policy.pipeline
    noise = policy.prior(image_generators(1, 0, 0, [0]))
    pipeline(PROMPTS[:1], num_inference_steps=4, latents=noise, output_type="latent", height=32, width=32)
    torch.testing.assert_close(pipeline.scheduler.timesteps, policy.scheduler("euler", 4).timesteps)


def test_wrong_family_is_one_line_that_names_the_right_class(sd3_folder, unet_folder):
    (fault,) = UNetPolicy(str(sd3_folder(t5=False))).check()
    assert "is a StableDiffusion3Pipeline, UNetPolicy needs StableDiffusionPipeline" in fault
    assert "Use class_path: SD3Policy." in fault
    with pytest.raises(LoadError, match="Use class_path: UNetPolicy"):
        SD3Policy(str(unet_folder("epsilon"))).load()


def test_bad_checkpoints_are_one_line(tmp_path):
    assert "is no folder" in SD3Policy(str(tmp_path / "missing")).check()[0]
    assert "no model_index.json" in SD3Policy(str(tmp_path)).check()[0]
    (tmp_path / "model_index.json").write_text("[1")
    assert "is damaged" in SD3Policy(str(tmp_path)).check()[0]


def test_unreachable_hub_names_the_way_out(monkeypatch):
    (fault,) = SD3Policy("someone/no-such-model").check()
    assert fault.startswith("Cannot load someone/no-such-model")
    assert "model.policy.checkpoint=/a/local/folder" in fault


def test_lora_targets_that_match_nothing(sd3_folder):
    policy = SD3Policy(str(sd3_folder(t5=False)), lora_rank=2, lora_targets=["nothing_here"])
    with pytest.raises(LoadError, match="matches nothing in SD3Transformer2DModel"):
        policy.load()


def test_sizes_the_vae_cannot_take(sd3_folder):
    with pytest.raises(LoadError, match="height=33 is not a multiple of 8.*Use 32 or 40"):
        SD3Policy(str(sd3_folder(t5=False)), height=33).load()


def test_any_size_the_model_allows(sd3_folder):
    policy = SD3Policy(str(sd3_folder(t5=False)), max_sequence_length=4, height=24, width=32).load()
    noise = policy.prior(image_generators(1, 0, 0, [0]))
    latents, _ = sample(policy, policy.encode(PROMPTS[:1]), torch.zeros(1, dtype=int), RolloutSpec(steps=2), noise)
    assert policy.decode(latents).shape == (1, 3, 24, 32)


@pytest.mark.parametrize("options", [{"lora_rank": 0}, {"dtype": "int8"}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SD3Policy("x", **options)


def test_long_prompts_are_cut_with_one_warning(family, capfd):
    policy = load(family)
    long = "a red circle on the left " * 12
    with pytest.warns(UserWarning, match="1 of 2 prompts are longer than the 12 tokens") as caught:
        policy.encode([PROMPTS[0], long])
        policy.encode([long])
    assert len([w for w in caught if "longer than" in str(w.message)]) == 1
    assert "truncated" not in capfd.readouterr().err


def test_damaged_weights_are_one_line(sd3_folder, tmp_path):
    folder = shutil.copytree(sd3_folder(t5=False), tmp_path / "damaged")
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"not weights")
    with pytest.raises(LoadError, match=r"^Cannot load \S+: .*Download or save it again[^\n]*$"):
        SD3Policy(str(folder)).load()


def test_loading_is_silent(sd3_folder, tmp_path, capfd):
    policy = SD3Policy(str(sd3_folder(t5=False))).load()
    policy.save(tmp_path / "again")
    assert capfd.readouterr().err == ""
