"""A policy learned from watched calls, on small pipelines of many classes."""

import inspect
from functools import wraps

import pytest
import torch
import zoo

from lit_vgrpo.core.sampling import sample
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
from lit_vgrpo.policies.learned import NotLearned
from lit_vgrpo.policies.loading import KEY
from lit_vgrpo.system.hub import LoadError

FAST = ("AuraFlowPipeline", "ZImagePipeline", "StableDiffusionXLPipeline")
"""A pipeline without a file of its own, one that takes lists of images, and one on a variance-preserving path."""
PROMPT = "three green dogs"
WITHOUT_ADAPTERS = ("PRXPipeline", "PixArtSigmaPipeline", "PixArtAlphaPipeline", "LuminaPipeline")
WITHOUT_ADAPTERS += ("EasyAnimatePipeline", "OmniGenPipeline", "AllegroPipeline")
WITHOUT_ADAPTERS += ("CogView3PlusPipeline", "HunyuanDiTPipeline", "LattePipeline")
REFUSED = {
    "consistency model": ("LatentConsistencyModelPipeline",),
    "4 images for one": ("AnimateDiffPipeline", "LattePipeline"),
    "Image too small": ("Flux2KleinKVPipeline",),
    "mixes values": ("Kandinsky5I2VPipeline",),
    "tokenizer that has": ("BriaFiboPipeline",),
    "2 images for one": ("QwenImageLayeredPipeline",),
    "kv_cache": ("QwenImage21Pipeline",),
    "no vae": ("PRXPixelPipeline",),
    "noise schedule": ("SanaSprintPipeline", "AnyFlowPipeline", "CosmosTextToWorldPipeline"),
    "second network": ("Ideogram4Pipeline",),
    "invert_sigmas": ("OmniGenPipeline", "MochiPipeline"),
    "expanded size": ("GlmImagePipeline",),
    "no time": (
        "WanImageToVideoPipeline/expanded",
        "LTXImageToVideoPipeline",
        "Cosmos2TextToImagePipeline",
        "Cosmos2VideoToWorldPipeline",
    ),
    "AssertionError": ("SkyReelsV2DiffusionForcingPipeline",),
    "no processor": ("LTX2Pipeline", "LTX2ImageToVideoPipeline"),
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


def built(name, **options):
    entry, pipeline = zoo.ZOO[name], zoo.build(name)
    size = dict(entry.size)
    if name.endswith("/edit"):
        size |= {"height": 64, "width": 96}
    options |= {key: size.pop(key) for key in ("height", "width", "num_frames") if key in size}
    call = {**size, **entry.options}
    return AutoPolicy(pipeline, call=call, references=int(entry.picture is not None), **options)


def largest_difference(policy, guidance, monkeypatch):
    """The largest difference between the policy's picture and its pipeline's, of 255."""
    pipeline, scheduler, states = policy.pipeline, policy._new_scheduler(), []
    step = scheduler.step

    @wraps(step)
    def watched(*given, **named):
        states.append(inspect.signature(step).bind(*given, **named).arguments["sample"].clone())
        return step(*given, **named)

    scheduler.step = watched
    picture = torch.zeros(1, 3, *policy.image_size)
    given = {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(1), "output_type": "pt"}
    given |= {**policy.pipeline_options, **policy.pipeline_guidance(guidance, 1)}
    given |= policy.pipeline_references(picture) if policy.edits else {}
    given = {key: value for key, value in given.items() if key in policy.watcher.parameters}
    with monkeypatch.context() as patch:
        for part, value in {"scheduler": scheduler, **policy.pipeline_parts(guidance)}.items():
            patch.setattr(pipeline, part, value)
        theirs = pipeline(prompt=PROMPT if policy.pipeline_takes_one else [PROMPT], **given)[0]
    theirs = theirs if isinstance(theirs, torch.Tensor) else torch.stack(list(theirs))
    cond = policy.encode([PROMPT], [picture[0].byte()] if policy.edits else None)
    spec, noise = RolloutSpec(policy.solvers[0], 3, guidance), policy._latents_of(states[0])
    ours = policy.decode(sample(policy, cond, torch.zeros(1, dtype=torch.long), spec, noise)[0])
    return 255 * (ours - theirs.float().reshape(ours.shape)).abs().max().item()


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in zoo.ZOO])
def test_it_draws_what_the_pipeline_draws(name, monkeypatch):
    policy = built(name, **({"train_only": ["*weight"]} if name in WITHOUT_ADAPTERS else {"lora_rank": 2}))
    if reasons := [word for word, names in REFUSED.items() if name in names]:
        with pytest.raises(LoadError, match=reasons[0]):
            policy.load()
        return
    with torch.no_grad():
        for guidance in (1.0, 3.0) if policy.load().guidance_error() is None else (1.0,):
            assert largest_difference(policy, guidance, monkeypatch) < 0.1
    if not policy.edits:
        checks.rows_do_not_depend_on_the_batch(policy)
    checks.gradient_reaches_what_is_trained(policy)
    checks.saved_weights_are_read_back(policy)


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


def test_another_size_is_learned_anew(monkeypatch):
    policy = built("AuraFlowPipeline").load()
    with policy.sized(64, 32):
        assert policy.latent_shape == (4, 16, 8)
        with torch.no_grad():
            assert largest_difference(policy, 3.0, monkeypatch) < 0.1
    assert policy.latent_shape == (4, 8, 12)


def test_what_was_learned_is_described_in_five_lines():
    lines = built("ZImagePipeline").load().description()
    assert [line.partition(":")[0] for line in lines] == ["time", "latents", "prediction", "guidance", "conditioning"]
    assert "t = -1 t +1" in lines[0]
    assert "-1 times" in lines[2]
    assert "g = s +1" in lines[3]
    assert "of any length" in lines[4]


def test_an_unknown_argument_of_the_call_is_refused():
    policy = built("AuraFlowPipeline")
    policy.call["strength"] = 0.5
    with pytest.raises(LoadError, match="takes no strength, which model.policy.call has"):
        policy.load()


def test_a_network_without_adapters_is_trained_whole():
    with pytest.raises(LoadError, match="PRXTransformer2DModel without adapters. Leave out model.policy.lora_rank"):
        built("PRXPipeline", lora_rank=2).load()


def test_a_folder_is_enough(tmp_path):
    zoo.save("AuraFlowPipeline", tmp_path / "aura")
    policy = AutoPolicy(str(tmp_path / "aura"), height=32, width=48)
    assert (policy.pipeline_class, policy.path_kind, policy.solvers[0]) == ("AuraFlowPipeline", "flow", "euler")
    assert policy.check() == []
    assert policy.load().latent_shape == (4, 8, 12)
    with pytest.raises(LoadError, match=KEY):
        AutoPolicy(str(tmp_path)).load()
