"""A policy learned from watched calls, on small pipelines of many classes."""

import inspect
import re
from copy import deepcopy
from functools import wraps

import diffusers
import pytest
import torch
import zoo
from diffusers import DiffusionPipeline
from PIL import Image
from policies.contract import inputs

from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies import (
    AutoPolicy,
    ChromaPolicy,
    Flux2DevPolicy,
    Flux2Policy,
    FluxPolicy,
    Krea2Policy,
    Lumina2Policy,
    QwenImagePolicy,
    SanaPolicy,
    SD3Policy,
    SDXLPolicy,
    UNetPolicy,
    WanPolicy,
    ZImagePolicy,
    checks,
)
from lit_vgrpo.policies.acceleration import set_attention_backend
from lit_vgrpo.policies.learned import leaves
from lit_vgrpo.policies.loading import KEY
from lit_vgrpo.policies.meta import NotEstimated, flops_per_image
from lit_vgrpo.policies.placement import restored_on_error
from lit_vgrpo.policies.unet import vp_scheduler
from lit_vgrpo.policies.watching import NEVER, PROJECTED, NotLearned
from lit_vgrpo.report.model_card import add_card, sample_lines
from lit_vgrpo.system.hub import LoadError

FAST = ("AuraFlowPipeline", "ZImagePipeline", "StableDiffusionXLPipeline", "Flux3ModularPipeline")
FAST += ("StableDiffusion3Pipeline/no_t5",)
"""One without a policy class, one that takes lists of images, one on a variance-preserving path, a modular pipeline,
and one without one of its text encoders."""
PROMPT = "three green dogs"
WITHOUT_ADAPTERS = ("PRXPipeline", "PixArtSigmaPipeline", "PixArtAlphaPipeline", "LuminaPipeline")
WITHOUT_ADAPTERS += ("EasyAnimatePipeline", "OmniGenPipeline", "AllegroPipeline")
WITHOUT_ADAPTERS += ("CogView3PlusPipeline", "HunyuanDiTPipeline", "LattePipeline")
BY_VALUE = ("PRXPipeline", "HiDreamImagePipeline", "NucleusMoEImagePipeline", "HunyuanVideo15Pipeline")
"""Pipelines that branch on values."""
OMITTED = {
    "LTXImageToVideoPipeline": "the pipeline samples",  # it takes no noise without a picture
    "Kandinsky5T2VPipeline": "the pipeline samples the same image: unipc",  # it overwrites what that solver keeps
    "Krea2ModularPipeline": "prompts change",  # its prompts hardly show
}
"""Checks that an entry cannot pass."""
SEEDED = ("LTXImageToVideoPipeline", "CogVideoXImageToVideoPipeline")
"""Pipelines that draw the picture's latents, and their noise after them."""
REFUSED = {
    "consistency model": ("LatentConsistencyModelPipeline",),
    "4 images for one": ("AnimateDiffPipeline", "LattePipeline"),
    "Image too small": ("Flux2KleinKVPipeline",),
    "mixes values": ("Kandinsky5I2VPipeline",),
    "tokenizer that has": ("BriaFiboPipeline",),
    "2 images for one": ("QwenImageLayeredPipeline",),
    "kv_cache": ("QwenImage21Pipeline", "QwenImage21ModularPipeline"),
    "target_timestep": ("Flux3DistilledModularPipeline",),
    "no vae": ("PRXPixelPipeline",),
    "noise schedule": ("SanaSprintPipeline", "AnyFlowPipeline", "CosmosTextToWorldPipeline"),
    "second network": ("Ideogram4Pipeline",),
    "invert_sigmas": ("OmniGenPipeline", "MochiPipeline"),
    "expanded size": ("GlmImagePipeline",),
    "no time": (
        "Cosmos2TextToImagePipeline",
        "Cosmos2VideoToWorldPipeline",
    ),
    "several steps of its scheduler": (
        "LTX2Pipeline",
        "LTX2ImageToVideoPipeline",
        "SkyReelsV2DiffusionForcingPipeline",
    ),
    "another shape": ("AllegroPipeline",),
    "timestep differs": ("Cosmos2_5_PredictBasePipeline",),
}
"""Classes that a learned policy refuses, by a word of the reason; the tokenizers are those of the zoo."""

FAMILIES = {
    "StableDiffusionPipeline": UNetPolicy,
    "StableDiffusionXLPipeline": SDXLPolicy,
    "StableDiffusion3Pipeline": SD3Policy,
    "FluxPipeline": FluxPolicy,
    "FluxPipeline/schnell": FluxPolicy,
    "ChromaPipeline": ChromaPolicy,
    "Flux2KleinPipeline": Flux2Policy,
    "Flux2Pipeline": Flux2DevPolicy,
    "QwenImagePipeline": QwenImagePolicy,
    "Lumina2Pipeline": Lumina2Policy,
    "ZImagePipeline": ZImagePolicy,
    "Krea2Pipeline": Krea2Policy,
    "SanaPipeline": SanaPolicy,
    "WanPipeline": WanPolicy,
    "WanPipeline/two_networks": WanPolicy,
}
"""Classes that have a policy written by hand."""


def built(name, folder=None, **options):
    entry, pipeline = zoo.ZOO[name], zoo.build(name) if folder is None else str(folder)
    size = dict(entry.size)
    if name.endswith("/edit"):
        size |= {"height": 64, "width": 96}
    options |= {key: size.pop(key) for key in ("height", "width", "num_frames") if key in size}
    call = {**size, **entry.options}
    return AutoPolicy(pipeline, call=call, references=int(entry.picture is not None), **options)


def drawn_by(pipeline, policy, guidance, steps=3, prompt=PROMPT):
    """Return the picture that a pipeline draws as the policy's does, and its scheduler's first latents."""
    scheduler, states = policy._new_scheduler(), []
    step = scheduler.step

    @wraps(step)
    def watched(*given, **named):
        states.append(inspect.signature(step).bind(*given, **named).arguments["sample"].clone())
        return step(*given, **named)

    scheduler.step = watched
    given = {"num_inference_steps": steps, "generator": torch.Generator().manual_seed(1), "output_type": "pt"}
    given |= {**policy.pipeline_options, **policy.pipeline_guidance(guidance, 1)}
    given |= policy.pipeline_references(torch.zeros(1, 3, *policy.image_size)) if policy.edits else {}
    given = {key: value for key, value in given.items() if key in policy.watcher.parameters}
    with pytest.MonkeyPatch.context() as patch:
        for part, value in {"scheduler": scheduler, **policy.pipeline_parts(guidance)}.items():
            patch.setattr(pipeline, part, value)
        picture = pipeline(prompt=prompt, **given)[0]
    return (picture if isinstance(picture, torch.Tensor) else torch.stack(list(picture))).float(), states[0]


def drawn_by_policy(policy, noise, spec, prompt=PROMPT):
    """Return the picture that a policy draws from noise."""
    cond = policy.encode([prompt], policy.blank_references(1))
    return policy.decode(sample(policy, cond, torch.zeros(1, dtype=torch.long), spec, noise)[0]).float()


def largest_difference(policy, guidance, prompt=PROMPT):
    """The largest difference between the policy's picture and its pipeline's, of 255."""
    steps = checks.STEPS[policy.path_kind]
    theirs, start = drawn_by(policy.pipeline, policy, guidance, steps, prompt)
    spec = RolloutSpec(policy.solvers[0], steps, guidance)
    ours = drawn_by_policy(policy, policy._latents_of(start), spec, prompt)
    if not policy.edits:  # its noise is the pipeline's of the same seed
        noise = policy.prior([torch.Generator().manual_seed(1)])
        assert torch.cosine_similarity(policy._latents_of(start).flatten(), noise.flatten(), dim=0) > 0.999
    return 255 * (ours - theirs.reshape(ours.shape)).abs().max().item()


def drawn_by_printed_lines(policy, spec):
    """Return the policy's picture, and that of the lines of an export's card, from the same seed."""
    pipe, lines = policy.pipeline, sample_lines(policy, spec)
    given = ["pipe(", 'generator=torch.Generator().manual_seed(3), output_type="pt", ']
    lines[-1] = lines[-1].replace(given[0], "".join(given)).replace('"a prompt"', repr(PROMPT))
    lines[-1] = re.sub(", output='[a-z]+'", "", lines[-1])  # which the policy's modular pipelines add themselves
    names = {"torch": torch, "diffusers": diffusers, "pipe": pipe}
    names["picture"] = Image.new("RGB", policy.image_size[::-1]) if policy.edits else None
    ours = drawn_by_policy(policy, policy.prior([torch.Generator().manual_seed(3)]), spec)[0]
    with pytest.MonkeyPatch.context() as patch:
        for part in {"scheduler", "guider"} & pipe.components.keys():
            patch.setattr(pipe, part, deepcopy(getattr(pipe, part)))
        exec("\n".join(lines), names)
    return ours, torch.as_tensor(names[lines[-1].partition(" = ")[0]]).float()


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in zoo.ZOO])
def test_it_draws_what_the_pipeline_draws(name):
    policy = built(name, **({"train_only": ["*weight"]} if name in WITHOUT_ADAPTERS else {"lora_rank": 2}))
    if reasons := [word for word, names in REFUSED.items() if name in names]:
        with pytest.raises(LoadError, match=reasons[0]):
            policy.load()
        return
    with torch.no_grad():
        for guidance in (1.0, 3.0) if policy.load().guidance_error() is None else (1.0,):
            assert largest_difference(policy, guidance) < 0.1
        if name not in SEEDED:
            solvers = [s for s in checks.solvers_of(policy) if not OMITTED.get(name, "").endswith(s)]
            ours, theirs = drawn_by_printed_lines(policy, RolloutSpec(solvers[-1], 4, guidance))
            assert 255 * (ours - theirs.reshape(ours.shape)).abs().max() < 0.2
    for title, check in checks.checks_of(policy):
        if name not in OMITTED or not title.startswith(OMITTED[name]):
            check(policy)
    height, width = policy.latent_shape[-2:]
    if policy.path_kind == "flow":  # times are noise levels, up to the rounding of timesteps
        scheduler = policy.scheduler(policy.solvers[0], 3)
        assert (policy.scheduler_times(scheduler) - scheduler.sigmas[:3]).abs().max() < 2e-3
    policy.decode_with_gradient(torch.zeros(1, *policy.latent_shape)[..., : -(-height // 2), : -(-width // 2)])


LEARNABLE = [name for name in zoo.ZOO if not any(name in names for names in REFUSED.values())]


@pytest.mark.parametrize(
    "name", [n if n in ("Flux2Pipeline", FAST[0]) else pytest.param(n, marks=pytest.mark.slow) for n in LEARNABLE]
)
def test_what_is_learned_does_not_depend_on_the_type(name):
    options = {} if name in WITHOUT_ADAPTERS else {"lora_rank": 2}
    wide, narrow = (built(name, dtype=dtype, **options).load() for dtype in ("float32", "bfloat16"))
    first, second = (policy.learned for policy in (wide, narrow))
    for leaf, other in zip(leaves(first.tree), leaves(second.tree), strict=True):
        assert (leaf.name, leaf.kind, leaf.factor, leaf.offset) == (other.name, other.kind, other.factor, other.offset)
    for one, other in ((first.vae_scale, second.vae_scale), (first.vae_shift, second.vae_shift)):
        assert torch.equal(one, other)
    assert first.guidance == second.guidance
    checks.gradient_reaches_what_is_trained(narrow)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_it_predicts_what_the_family_s_class_predicts(name):
    learned, options = built(name).load(), {**zoo.ZOO[name].size, **zoo.ZOO[name].options}
    options.pop("use_resolution_binning", None)
    written = FAMILIES[name](zoo.build(name), **options).load()
    z, t, _ = checks.inputs(written)
    for guidance in (1.0, 3.0):
        one, other = (policy(z, t, policy.encode([PROMPT, 'a "dog"']), guidance) for policy in (learned, written))
        assert checks.difference(one, other) < 2e-6
    for solver in written.solvers:
        schedulers = [(policy, policy.scheduler(solver, 5)) for policy in (learned, written)]
        one, other = (policy.scheduler_times(scheduler) for policy, scheduler in schedulers)
        assert checks.difference(one, other) < 2e-6
    assert checks.difference(learned.decode(z), written.decode(z)) < 2e-6


@pytest.mark.parametrize(
    ("what", "broken"),
    [
        ("timestep", lambda learned: setattr(learned.of_kind("time")[0], "factor", 0.99)),
        ("scheduler", lambda learned: setattr(learned, "sign", -learned.sign)),
        ("hidden_states", lambda learned: setattr(learned, "to_network", torch.arange(384).flip(0))),
        ("VAE", lambda learned: setattr(learned, "vae_shift", learned.vae_shift + 0.1)),
        ("scheduler", lambda learned: setattr(learned.guidance, "offset", 1.0)),
    ],
    ids=["time", "sign", "order", "VAE", "guidance"],
)
def test_wrong_learning_is_caught(what, broken):
    policy = built("AuraFlowPipeline").load()
    broken(policy.learned)
    with pytest.raises(NotLearned, match=what):
        policy._prove()


@torch.no_grad()
def test_a_first_frame_that_is_a_picture_stays_so():
    policy = built("LTXImageToVideoPipeline").load()
    z, t, cond = checks.inputs(policy)
    picture, clean = policy.sampled(z, cond), z - t[:, None, None, None, None] * policy(z, t, cond, 3.0)
    assert torch.allclose(clean[:, :, 0], picture[:, :, 0], atol=1e-5)
    assert not torch.allclose(picture[:, :, 0], z[:, :, 0])
    assert torch.equal(picture[:, :, 1:], z[:, :, 1:])
    assert policy.learned.of_kind("time")[0].where.tolist() == [False, False, True, True]  # its tokens have no time


@pytest.mark.parametrize("name", ["AuraFlowPipeline", pytest.param("ChromaPipeline", marks=pytest.mark.slow)])
def test_another_size_is_learned_anew(name):
    policy = built(name).load()
    policy.encode([PROMPT])  # Chroma's mask covers the image, too
    policy.negative()
    with policy.sized(64, 32):
        assert policy.latent_shape == (4, 16, 8)
        with torch.no_grad():
            assert largest_difference(policy, 3.0) < 0.1
    assert policy.latent_shape == (4, 8, 12)


def test_what_was_learned_is_described_in_five_lines():
    lines = built("ZImagePipeline").load().description()
    assert [line.partition(":")[0] for line in lines] == ["time", "latents", "prediction", "guidance", "conditioning"]
    assert "t = -1 t +1" in lines[0]
    assert "-1 times" in lines[2]
    assert "g = s +1" in lines[3]
    assert "of any length" in lines[4]


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"call": {"strength": 0.5}}, "takes no strength, which model.policy.call has"),
        ({"call": {"negative_prompt": "a dog"}}, "negative_prompt='a dog'.* Set model.policy.negative_prompt"),
        ({"call": {"guidance_scale": 7}}, "guidance_scale=7.* Set model.objective.rollout.guidance"),
        ({"call": {"eta": 1.0}}, "eta=1.0.* Set model.objective.rollout.noise_level"),
        ({"call": {"output_type": "latent"}}, "output_type='latent', which the policy sets itself. Leave it out"),
        ({"num_frames": 5}, "makes no videos. Leave out model.policy.num_frames"),
        ({"references": 1}, "takes no image, but model.policy.references=1"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, advice):
    policy = AutoPolicy(zoo.build("StableDiffusionPipeline"), **options)
    with pytest.raises(LoadError, match=advice):
        policy.load()


def test_an_argument_that_changes_the_sampling_is_named():
    advice = r"takes 5 scheduler steps .* in 6 sampling steps. Leave out model.policy.call.denoising_end, or write"
    with pytest.raises(LoadError, match=advice):
        AutoPolicy(zoo.build("StableDiffusionXLPipeline"), height=32, width=48, call={"denoising_end": 0.8}).load()


def test_a_size_that_the_pipeline_rounds_is_refused():
    policy = AutoPolicy(zoo.build("FluxPipeline"), height=33, width=48, call={"max_sequence_length": 16})
    with pytest.raises(LoadError, match=r"policy.height=33 is a size at which FluxPipeline makes 32. Set height=32"):
        policy.load()


def test_a_side_that_the_pipeline_changes_when_it_is_given_alone_is_refused_with_both_sides():
    options = {"references": 1, "call": {"max_sequence_length": 16}}
    with pytest.raises(LoadError, match=r"width=48 is a size .* Set height=\d+ and width=\d+\.$") as caught:
        AutoPolicy(zoo.build("FluxKontextPipeline"), width=48, **options).load()
    height, width = map(int, re.findall(r"\d+", str(caught.value))[-2:])
    policy = AutoPolicy(zoo.build("FluxKontextPipeline"), height=height, width=width, **options).load()
    assert policy.image_size == (height, width)


def test_a_size_that_the_pipeline_refuses_is_the_advice():
    policy = AutoPolicy(zoo.build("LTXPipeline"), height=40, width=64, num_frames=9, call={"max_sequence_length": 16})
    with pytest.raises(LoadError, match=r"divisible by 32 .*\. Set another model.policy.height or width\.$"):
        policy.load()


def test_a_pipeline_in_memory_is_as_before_after_a_failed_load():
    pipeline = zoo.build("AuraFlowPipeline")

    def state():
        networks = (pipeline.transformer, pipeline.vae, pipeline.text_encoder)
        modules = [(part, part.training, len(part._forward_pre_hooks)) for n in networks for part in n.modules()]
        weights = [(w.data_ptr(), w.dtype, w.requires_grad) for network in networks for w in network.parameters()]
        return modules, weights, dict(vars(pipeline))

    before, options = state(), {"lora_rank": 2, "dtype": "bfloat16", "width": 48, "vae_tiling": True}
    with pytest.raises(LoadError, match="have to be divisible by 8"):
        AutoPolicy(pipeline, height=33, **options).load()
    assert state() == before
    assert not pipeline.vae.use_tiling
    AutoPolicy(pipeline, height=32, **options).load()
    assert state() != before


def test_an_attention_backend_is_as_before_after_an_error():
    pipeline = zoo.build("FluxPipeline")
    processors = [*pipeline.transformer.attn_processors.values()]

    @restored_on_error(pipeline)
    def use(*names):
        for name in names:
            set_attention_backend(pipeline.transformer, name)

    with pytest.raises(LoadError, match="does not exist"):
        use("native", "nativ")
    assert {processor._attention_backend for processor in processors} == {None}


def changed(pipeline, change):
    """The pipeline with a class that diffusers does not have, whose call first makes a change to its scheduler."""

    class Changed(type(pipeline)):
        def __call__(self, *given, **named):
            change(self.scheduler)
            return super().__call__(*given, **named)

    Changed.__call__.__signature__ = inspect.signature(type(pipeline).__call__)
    pipeline.__class__ = Changed
    return pipeline


def test_a_pipeline_of_another_class_than_diffusers_is_learned():
    policy = AutoPolicy(changed(zoo.build("AuraFlowPipeline"), lambda scheduler: None), height=32, width=48).load()
    assert policy.pipeline_class == "Changed"
    with torch.no_grad():
        assert largest_difference(policy, 3.0) < 0.1


def scale_late_latents(scheduler):
    step, taken = scheduler.step, []

    @wraps(step)
    def scaled(*given, **named):
        taken.append(step(*given, **named)[0] * (0.9 if len(taken) > 5 else 1.0))
        return (taken[-1],)

    scheduler.step = scaled


def end_with_noise(scheduler):
    prepare = scheduler.set_timesteps

    @wraps(prepare)
    def prepared(*given, **named):
        prepare(*given, **named)
        scheduler.sigmas[-1] = 0.05

    scheduler.set_timesteps = prepared


@pytest.mark.parametrize("change", [scale_late_latents, end_with_noise])
def test_steps_that_the_policy_would_not_take_are_caught(change):
    policy = AutoPolicy(changed(zoo.build("AuraFlowPipeline"), change), height=32, width=48)
    with pytest.raises(LoadError, match="what its scheduler returns differs|its latents after a step differs"):
        policy.load()


def test_a_prompt_that_changes_what_was_fixed_is_refused():
    policy = built("AuraFlowPipeline").load()
    policy.learned.of_kind("row")[0].kind = "fixed"
    with pytest.raises(NotLearned, match="another kind of encoder_hidden_states for this prompt"):
        policy.encode([PROMPT])


def test_the_shifted_noise_of_cogvideox_is_followed():
    base = zoo.cog_ddim(snr_shift_scale=3.0)
    assert torch.allclose(vp_scheduler("ddim", base).alphas_cumprod, base.alphas_cumprod, atol=1e-6)
    with pytest.raises(ValueError, match="steps=30 does not divide 1000, .* Use 25 or 20."):
        vp_scheduler("ddim", base, 30)


@pytest.mark.slow
def test_checkpointing_that_changes_what_blocks_get_is_refused():
    built("AuraFlowPipeline", gradient_checkpointing=True).load()
    with pytest.raises(
        LoadError, match="computes without ChromaSingleTransformerBlock.attention_mask. Set it to false"
    ):
        built("ChromaPipeline", gradient_checkpointing=True).load()


@pytest.mark.slow
def test_words_in_quotes_reach_the_network():
    policy = built("HunyuanImagePipeline").load()
    one, other = (policy.encode([prompt]).tensors["encoder_hidden_states_2"] for prompt in ('a "dog"', 'a "cat"'))
    assert not torch.equal(one, other)


@pytest.mark.slow
def test_a_mask_may_be_absent():
    policy = built("NucleusMoEImagePipeline").load()
    sizes = policy.encode(["red red ", PROMPT]).tensors["size_of_encoder_hidden_states_mask"]
    assert sizes.flatten().tolist() == [0, 24]
    with torch.no_grad():
        assert largest_difference(policy, 3.0, "red red ") < 0.1
    checks.rows_do_not_depend_on_the_batch(policy)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HunyuanImagePipeline", "LongCatImagePipeline"])
def test_the_printed_lines_load_an_adapter_into_a_pipeline_without_load_lora_weights(name, tmp_path):
    zoo.save(name, tmp_path / "base")
    export, policy = tmp_path / "lora", built(name, tmp_path / "base", lora_rank=2).load()
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.normal_(std=0.3)
    policy.save(export)
    _, lines = add_card(export, tmp_path, policy, export, "trained", 1, spec=RolloutSpec("euler", 3))
    (found,) = [number for number, line in enumerate(lines) if "load_lora_adapter" in line]
    names = {}
    exec("\n".join(lines[: found + 1]).replace('.to("cuda")', ""), names)
    with torch.no_grad():
        given = inputs(policy)
        expected, network = policy(*given), names["pipe"].transformer
        with policy.using(network):
            torch.testing.assert_close(policy(*given), expected, rtol=1e-4, atol=1e-5)
            network.disable_lora()
            assert (policy(*given) - expected).abs().max() > 1e-3


@pytest.mark.slow
def test_the_printed_lines_load_a_network_whose_saved_pipeline_diffusers_cannot_load(tmp_path):
    zoo.save("PRXPipeline", tmp_path / "base")
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "base")
    entry, export = zoo.ZOO["PRXPipeline"], tmp_path / "out"
    policy = AutoPolicy(str(tmp_path / "base"), call=dict(entry.options), train_only=["*weight"], **entry.size)
    with torch.no_grad():
        next(policy.adopt(pipeline).network.parameters()).add_(1)
    policy.save(export)
    _, lines = add_card(export, tmp_path, policy, export, "trained", 1, spec=RolloutSpec("euler", 3))
    names = {}
    exec("\n".join(lines[:3]), names)
    same = zip(names["pipe"].transformer.parameters(), policy.network.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in same), lines


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LTXPipeline", "CogView4Pipeline"])
def test_a_solver_with_other_times_is_refused(name):
    with pytest.raises(ValueError, match=rf"solver='dpm\+\+' cannot follow the times .* of {name}. Use euler"):
        built(name).load().scheduler("dpm++", 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"), [("HunyuanVideo15Pipeline", ""), ("HunyuanImagePipeline/guided", f", {PROJECTED}={NEVER}")]
)
def test_a_guider_is_set_in_lines_of_python(name, more):
    lines = built(name).load().scheduler_lines(RolloutSpec("euler", 3, 2.0))
    assert lines[0] == f"pipe.guider = pipe.guider.new(enabled=True, guidance_scale=2.0{more})"


def test_a_prompt_may_be_as_long_as_the_last_tokenizer_allows():
    assert built("StableDiffusion3Pipeline/no_t5").load().prompt_limit()[1] == 12  # CLIP's, not T5's 16


def test_a_network_without_adapters_is_trained_whole():
    with pytest.raises(LoadError, match="PRXTransformer2DModel without adapters. Leave out model.policy.lora_rank"):
        built("PRXPipeline", lora_rank=2).load()


@pytest.mark.parametrize(
    ("name", "is_estimated"),
    [("ErnieImagePipeline", True), *(pytest.param(name, "PRX" in name, marks=pytest.mark.slow) for name in BY_VALUE)],
)
def test_memory_is_estimated_or_the_run_named_that_measures_it(name, is_estimated, tmp_path):
    entry = zoo.ZOO[name]
    size = {key: entry.size[key] for key in ("height", "width", "num_frames") if key in entry.size}
    policy = AutoPolicy(str(zoo.save(name, tmp_path / name)), call=dict(entry.options), **size)
    if not is_estimated:
        with pytest.raises(NotEstimated, match=r"reads values .* Read peak_memory_bytes .* trainer.max_epochs=1"):
            flops_per_image(policy)
        return
    forward, both = flops_per_image(policy)
    assert 2 * forward < both < 4 * forward


def test_a_folder_is_enough(tmp_path):
    zoo.save("AuraFlowPipeline", tmp_path / "aura")
    policy = AutoPolicy(str(tmp_path / "aura"), height=32, width=48)
    assert (policy.pipeline_class, policy.path_kind, policy.solvers[0]) == ("AuraFlowPipeline", "flow", "euler")
    assert policy.check() == []
    assert policy.load().latent_shape == (4, 8, 12)
    with pytest.raises(LoadError, match=KEY):
        AutoPolicy(str(tmp_path)).load()
