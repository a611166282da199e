"""What a pipeline lacks or has too much of, in a folder or in memory: one line from check, and the same from load."""

import inspect
import json
import re
import shutil
from dataclasses import replace

import diffusers
import pytest
import torch
from commands import check
from fake_hub import FakeHub, Pages
from helpers import Brightness, make_data, make_trainer, repeating
from policies.contract import same_image_as_the_pipeline
from policies.families import FAMILIES
from safetensors.torch import load_file, save_file
from transformers import CLIPModel, CLIPTokenizer, T5Config, T5ForConditionalGeneration

from lit_vgrpo import VGRPO, RolloutSpec, VGRPOModule
from lit_vgrpo.policies import SD3Policy, UNetPolicy
from lit_vgrpo.policies.checks import inputs
from lit_vgrpo.policies.meta import NotEstimated, drawing_errors, policy_on_meta
from lit_vgrpo.system import hub
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.saved_weights import policy_errors

KEY = "model.policy.checkpoint="
SCHEDULER = "scheduler/scheduler_config.json"


def rewritten(part, change):
    """A change of a part's tensors; ``change`` gets them by name and returns others."""

    def fault(folder):
        (file,) = (folder / part).glob("*.safetensors")
        weights = {name: weight.contiguous() for name, weight in change(load_file(file)).items()}
        save_file(weights, file, metadata={"format": "pt"})

    return fault


def without(part, *patterns):
    return rewritten(part, lambda w: {name: x for name, x in w.items() if not any(p in name for p in patterns)})


def renamed(part, old, new):
    return rewritten(part, lambda w: {name.replace(old, new, 1): x for name, x in w.items()})


def added(part, tensors):
    return rewritten(part, lambda w: {**w, **tensors})


def indexed(**entries):
    return edited("model_index.json", **entries)


def edited(file, **entries):
    def fault(folder):
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return fault


def removed(*names):
    def fault(folder):
        for path in (folder / name for name in names):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return fault


def rebuilt(part, **entries):
    """A network of other settings, with weights that fit it."""

    def fault(folder):
        config = json.loads((folder / part / "config.json").read_text())
        shutil.rmtree(folder / part)
        getattr(diffusers, config["_class_name"]).from_config({**config, **entries}).save_pretrained(folder / part)

    return fault


def as_bin(folder):
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    del weights["conv_in.bias"]
    torch.save(weights, file.with_suffix(".bin"))
    file.unlink()


def in_shards(folder):
    part = folder / "transformer"
    network = diffusers.SD3Transformer2DModel.from_pretrained(part)
    shutil.rmtree(part)
    network.save_pretrained(part, max_shard_size="50KB")
    shard = sorted(part.glob("*.safetensors"))[2]
    save_file(dict([*load_file(shard).items()][1:]), shard, metadata={"format": "pt"})


def without_index(folder):
    in_shards(folder)
    (folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").unlink()


def linked(name):
    def fault(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "gone")

    return fault


def without_merges(folder):
    file = folder / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = []
    file.write_text(json.dumps(content))


def with_scheduler(kind, **entries):
    def fault(folder):
        shutil.rmtree(folder / "scheduler")
        getattr(diffusers, kind)(**entries).save_pretrained(folder / "scheduler")
        edited("model_index.json", scheduler=["diffusers", kind])(folder)

    return fault


FIRST = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.weight"
Q = "transformer_blocks.0.attn.to_q.weight"
GONE = r"it was saved with a LoRA in it: call fuse_lora\(\) and unload_lora_weights\(\) before saving\."
MORE, OTHER = {"extra.weight": torch.zeros(1)}, {Q: torch.zeros(3, 4)}
VAE_FILE, CONFIG = "vae/diffusion_pytorch_model.safetensors", "tokenizer/tokenizer_config.json"
FAULTS = {
    "UNet without a tensor": ("unet_eps", without("unet", FIRST), rf"/unet: 1 weight missing, such as {FIRST}\."),
    ".bin without a tensor": ("unet_eps", as_bin, r"/unet: 1 weight missing, such as conv_in\.bias\."),
    "shard without a tensor": ("sd3", in_shards, r"/transformer: 1 weight missing, such as \w"),
    "shards without an index": ("sd3", without_index, " has no weights in transformer/. Download or save"),
    "T5 without tensors": ("sd3_t5", without("text_encoder_3", "0.layer.1"), "3: 3 weights missing, such as encoder"),
    "second network of two": ("wan22", without("transformer_2", "blocks.0.attn1.to_q.bias"), "_2: 1 weight missing"),
    "language model": ("qwen_image", without("text_encoder", "layers.0.self_attn.q_proj.bias"), ": 1 weight missing"),
    "compiled": ("sd3", renamed("transformer", "", "_orig_mod."), "75 weights missing.*; 75 weights not read"),
    "with an adapter": ("sd3", renamed("transformer", "0.attn.to_q.", "0.attn.to_q.base_layer."), GONE),
    "more than the network": ("sd3", added("transformer", MORE), r"r: 1 weight not read, such as extra\.weight\."),
    "more than the encoder": ("sd3", edited("text_encoder/config.json", num_hidden_layers=1), "16 weights not read"),
    "another shape": ("sd3", added("transformer", OTHER), rf"1 weight of another shape, such as {Q} \(3 x 4\)\."),
    "no weights": ("sd3", removed(VAE_FILE), r" has no weights in vae/\. Download or save"),
    "a link to nowhere": ("sd3", linked(VAE_FILE), r" has no weights in vae/\. Download or save"),
    "no config": ("sd3", removed("text_encoder/config.json"), r"/text_encoder: it has no config\.json\."),
    "no folder": ("sd3", removed("vae"), " lacks vae, which its model_index.json names"),
    "no folder of T5": ("sd3_t5", removed("text_encoder_3"), r"again, or set text_encoder_3 to \[null, null\] there"),
    "half a file": ("sd3", lambda folder: (folder / VAE_FILE).write_bytes(b"half"), "^Cannot load .*/vae: .* again"),
    "unknown class": ("sd3", indexed(vae=["diffusers", "AutoencoderX"]), "vae is diffusers.AutoencoderX, not a class"),
    "no class": ("sd3", indexed(vae=["diffusers", "utils"]), "vae is diffusers.utils, not a class"),
    "odd entry": ("sd3", indexed(vae=[]), "has no vae, but SD3Policy needs it"),
    "tokenizer's words": ("sd3", removed("tokenizer_2/tokenizer.json"), "a tokenizer_2 that has 3 tokens, but its "),
    "processor's words": ("qwen_image21", removed("processor/tokenizer.json"), "a processor that has 7 tokens, but"),
    "tokenizer's config": ("sd3", removed(CONFIG), "lacks tokenizer/tokenizer_config.json, which its model_index"),
    "tokenizer's merges": ("sd3", without_merges, "a tokenizer that finds no word of its own vocabulary, as without"),
    "tokenizer that cuts": ("sd3", edited(CONFIG, model_max_length=2), "finds no word of its"),
    "inpainting": ("unet_eps", rebuilt("unet", in_channels=17), "unet of 17 channels for latents of 8: it inpaint"),
    "FLUX.1 Fill": (
        "flux",
        rebuilt("transformer", in_channels=80, out_channels=32),
        "a transformer of 80 channels for",
    ),
    "image to video": ("wan", rebuilt("transformer", in_channels=12), "of 12 channels for latents of 4: it"),
    "consistency model": ("unet_eps", rebuilt("unet", time_cond_proj_dim=8), "is a consistency model"),
    "EDM": ("sdxl", with_scheduler("EDMEulerScheduler"), "EDMEulerScheduler: it was trained on another kind"),
    "thresholds": ("unet_v", edited(SCHEDULER, thresholding=True), "a scheduler with thresholding"),
    "clips": ("sdxl", with_scheduler("DDIMScheduler"), "has a scheduler with clip_sample, which is not"),
    "pure noise": ("sdxl", edited(SCHEDULER, rescale_betas_zero_snr=True), "ends in pure noise"),
    "sample": ("sdxl", edited(SCHEDULER, prediction_type="sample"), "predicts 'sample', not epsilon or v_prediction"),
    "noisy": ("flux", edited(SCHEDULER, stochastic_sampling=True), "without stochastic_sampling"),
    "Heun": ("sd3", with_scheduler("FlowMatchHeunDiscreteScheduler"), "comes with FlowMatchHeunDiscreteScheduler: "),
    "inverted": ("flux", edited(SCHEDULER, invert_sigmas=True), "FlowMatchEulerDiscreteScheduler and invert_sigmas: "),
    "other timesteps": (
        "flux",
        edited(SCHEDULER, num_train_timesteps=500),
        "and num_train_timesteps: a rectified flow",
    ),
}
SLOW = [name for name, (family, _, _) in FAULTS.items() if family not in ("sd3", "sd3_t5", "unet_eps", "sdxl", "flux")]


@pytest.mark.parametrize("fault", repeating(FAULTS, slow=SLOW))
def test_a_folder_with_a_fault_is_one_line_from_check_and_load(families, tmp_path, fault):
    name, change, message = FAULTS[fault]
    family = families(name)
    folder = shutil.copytree(family.folder, tmp_path / "pipeline")
    change(folder)
    policy = family.policy_class(str(folder), **family.all_options({}))
    with pytest.raises(LoadError, match=message) as caught:
        policy.load()
    assert "\n" not in str(caught.value)
    assert not policy.loaded
    (error,) = policy.check()
    assert str(folder) in error
    if fault != "half a file":  # the library reads it in two ways
        assert error == str(caught.value)


UNDRAWN = {
    "another text encoder's": ("unet_eps", rebuilt("unet", cross_attention_dim=32), "unet would fail: .*one model?"),
    "learned variance": ("unet_eps", rebuilt("unet", out_channels=16), r"it returns \[16, 6, 8\] for latents"),
    "no chat template": (
        "flux2",
        removed("tokenizer/chat_template.jinja"),
        "its loading would fail: Cannot use chat te",
    ),
}


@pytest.mark.parametrize("fault", repeating(UNDRAWN, slow=["no chat template"]))
def test_parts_that_do_not_work_together_are_found_without_weights(families, tmp_path, fault):
    name, change, message = UNDRAWN[fault]
    family = families(name)
    folder = shutil.copytree(family.folder, tmp_path / "pipeline")
    change(folder)
    (error,) = policy_errors(family.policy_class(str(folder), **family.all_options({})))
    assert error.startswith(f"{KEY}{folder}: ")
    assert re.search(message, error)


def test_check_reports_a_fault_alone_and_never_as_a_missing_estimate(tiny_recipe, tiny_sd3, tmp_path, capsys):
    for number, change in enumerate((without("text_encoder", "q_proj.bias"), removed("tokenizer/tokenizer.json"))):
        folder = shutil.copytree(tiny_sd3, tmp_path / str(number))
        change(folder)
        assert check([str(tiny_recipe), f"{KEY}{folder}"]) == 2
        out, err = capsys.readouterr()
        assert len(err.splitlines()) == 1
        assert "not estimated" not in out


@pytest.mark.parametrize("name", ["sd3_t5", "unet_eps", "sdxl", "flux"])
def test_each_part_that_is_null_is_named(families, tmp_path, name):
    family = families(name)
    index = json.loads((family.folder / "model_index.json").read_text())
    parts = [part for part, entry in index.items() if isinstance(entry, list) and entry[0]]
    kind = getattr(diffusers, family.policy_class.pipeline_class)
    assert set(parts) <= set(inspect.signature(kind).parameters)
    for part in parts:
        folder = shutil.copytree(family.folder, tmp_path / part)
        edited("model_index.json", **{part: [None, None]})(folder)
        policy = family.policy_class(str(folder), **family.options)
        found = policy.check()
        if part == "text_encoder_3":  # SD 3 works without T5
            assert found == []
        else:
            where = "In its model_index.json, it is null or absent."
            line = f"has no {part}, but {type(policy).__name__} needs it. {where}"
            assert found == [f"{KEY}{folder} {line} To take another checkpoint's, set model.policy.components."]


def test_files_in_place_of_a_folder(tmp_path):
    for name, advice in {
        "model.safetensors": 'Convert it: python -c "import diffusers; diffusers.StableDiffusion3Pipeline.from_single',
        "model.ckpt": "Convert it: python -c ",
        "model.gguf": "Use a folder with model_index.json and unquantised weights, or a hub name.",
    }.items():
        (tmp_path / name).write_bytes(b"")
        (error,) = SD3Policy(str(tmp_path / name)).check()
        assert f"/{name} is a file, not a pipeline folder. {advice}" in error


def test_a_folder_of_another_variant_is_named(families, tmp_path):
    folder = shutil.copytree(families("sd3").folder, tmp_path / "half")
    for file in folder.rglob("*.safetensors"):
        file.rename(file.with_suffix(".fp16.safetensors"))
    (error,) = SD3Policy(str(folder)).check()
    assert error.endswith(" has no weights in text_encoder/. Set model.policy.variant=fp16.")
    assert SD3Policy(str(folder), variant="fp16", **families("sd3").options).check() == []
    (error,) = SD3Policy(str(families("sd3").folder), variant="fp16").check()
    assert error.endswith(" has no weights of model.policy.variant=fp16. Leave it out.")


# --- what is left out on purpose --------------------------------------------------------------------------------------


def test_names_that_libraries_drop_or_tie_are_silent(families, tmp_path, tiny_clip):
    """Position ids, batches that a norm has seen, tied embeddings, and the other parts of a larger model."""
    folder = shutil.copytree(families("sd3_t5").folder, tmp_path / "pipeline")
    ids = {"text_model.embeddings.position_ids": torch.zeros(1, 12), "bn.num_batches_tracked": torch.zeros(1)}
    rewritten("text_encoder", lambda weights: {**weights, **ids})(folder)
    config = json.loads((folder / "text_encoder_3" / "config.json").read_text())
    shutil.rmtree(folder / "text_encoder_3")
    T5ForConditionalGeneration(T5Config(**{**config, "num_decoder_layers": 1})).save_pretrained(
        folder / "text_encoder_3"
    )
    without("text_encoder_3", "encoder.embed_tokens", "lm_head")(folder)
    policy = SD3Policy(str(folder), **families("sd3_t5").all_options({}))
    assert policy.check() == []
    policy.load()

    small = families("unet_eps")
    folder = shutil.copytree(small.folder, tmp_path / "sd")
    whole = CLIPModel.from_pretrained(tiny_clip)
    wide = whole.config.text_config.hidden_size
    rebuilt("unet", cross_attention_dim=wide)(folder)
    whole.save_pretrained(folder / "text_encoder")  # as CLIPModel: its pictures' part is not read
    for file in tiny_clip.glob("token*"):
        shutil.copy(file, folder / "tokenizer")
    policy = UNetPolicy(str(folder), **small.all_options({}))
    assert policy_errors(policy) == []
    policy(*inputs(policy.load()))


def with_old_names(folder):
    for new, old in {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}.items():
        renamed("vae", f"attentions.0.{new}.", f"attentions.0.{old}.")(folder)


def in_old_shards(folder):
    """As .bin files with an index, next to files that nothing reads."""
    for file in [*folder.rglob("*.safetensors")]:
        weights, stem = load_file(file), "pytorch_model" if file.stem == "model" else file.stem
        names = [f"{stem}-0000{number}-of-00002.bin" for number in (1, 2)]
        places = {name: names[number % 2] for number, name in enumerate(weights)}
        for shard in names:
            torch.save({name: weights[name] for name in weights if places[name] == shard}, file.with_name(shard))
        file.with_name(f"{stem}.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        file.with_name(f"{stem}.non_ema.bin").write_bytes(b"")
        file.unlink()


def with_a_new_word(folder):
    """A token for textual inversion, which the encoder has no embedding for."""
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    tokenizer.add_tokens(["<cat-toy>"])
    tokenizer.save_pretrained(folder / "tokenizer")


CHECKER = {
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
    "feature_extractor": ["transformers", "CLIPFeatureExtractor"],
    "image_encoder": [None, None],
    "requires_safety_checker": True,
}
PUBLISHED = {
    "old names of attention": ("unet_eps", with_old_names),
    "shards of .bin": ("unet_eps", in_old_shards),
    "safety checker left out": ("unet_eps", indexed(**CHECKER)),
    "a word more than embeddings": ("unet_eps", with_a_new_word),
    "unknown writer": ("sd3", edited("text_encoder/config.json", architectures=None)),
    "more null parts": ("flux", indexed(image_encoder=[None, None], feature_extractor=[None, None])),
    "another scheduler": ("sdxl", with_scheduler("EulerAncestralDiscreteScheduler")),
}


@pytest.mark.parametrize("shape", PUBLISHED)
def test_folders_as_published_are_not_refused(families, tmp_path, shape):
    name, change = PUBLISHED[shape]
    family = families(name)
    folder = shutil.copytree(family.folder, tmp_path / "pipeline")
    change(folder)
    assert policy_errors(family.policy_class(str(folder), **family.all_options({}))) == []
    read, plain = family.load(folder), family.load()
    assert torch.equal(read(*inputs(read)), plain(*inputs(plain)))


SD2_UNET = {"attention_head_dim": [2, 4], "use_linear_projection": True, "upcast_attention": True}
FLOW = with_scheduler("FlowMatchEulerDiscreteScheduler", shift=3.0)


def sd15_scheduler(folder):
    with_scheduler("PNDMScheduler", skip_prk_steps=True)(folder)
    edited(SCHEDULER, clip_sample=False)(folder)  # published, though the class has no such option


V = {"prediction_type": "v_prediction"}
LEADING = {**V, "timestep_spacing": "leading"}
ZERO_SNR = {**V, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
FLAGS = {
    "SD 1.5": ("unet_eps", "unet", {}, sd15_scheduler),
    "SD 2.1": ("unet_v", "unet", SD2_UNET, with_scheduler("DDIMScheduler", clip_sample=False, **LEADING)),
    "NoobAI v": ("sdxl", "unet", {"upcast_attention": None}, with_scheduler("EulerDiscreteScheduler", **ZERO_SNR)),
    "SD 3": ("sd3", "transformer", {"qk_norm": None}, FLOW),
    "SD 3.5 M": ("sd3", "transformer", {"dual_attention_layers": [0], "pos_embed_max_size": 12}, FLOW),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", FLAGS)
def test_published_flags_draw_the_pipelines_picture(families, tmp_path, model):
    name, network, flags, change = FLAGS[model]
    folder = shutil.copytree(families(name).folder, tmp_path / "published")
    rebuilt(network, **flags)(folder)
    change(folder)
    family = replace(families(name), folder=folder)
    same_image_as_the_pipeline(family, family.policy_class.solvers[0], 3.0)


@pytest.mark.parametrize("name", ["unet_eps", "z_image"])
def test_encoders_without_values_are_refused_at_the_first_prompts(families, tmp_path, name):
    folder = shutil.copytree(families(name).folder, tmp_path / "zeros")
    rewritten("text_encoder", lambda weights: {name: torch.zeros_like(x) for name, x in weights.items()})(folder)
    policy = families(name).load(folder)
    policy.encode(["dogs"])
    for _ in range(2):
        with pytest.raises(LoadError, match="'a cat on a dog' and 'a dog on a cat' have the same embedding: [CQ]"):
            policy.encode(["a red circle", "a blue square"])


def test_prompts_that_an_edit_repeats_and_those_that_differ_in_case_are_no_damage(families):
    pictures = [torch.full((3, *families("kontext").shared.image_size), grey, dtype=torch.uint8) for grey in range(3)]
    families("kontext").load().encode(["make it red", "make it red", "make it blue"], pictures)
    families("sana").load().encode(["a red circle", " A red circle"])


def test_a_check_is_not_repeated_and_hands_its_pipeline_on(families):
    policy = families("sd3").policy_class(str(families("sd3").folder), **families("sd3").options)
    assert policy.check() == []
    draft = policy.draft
    assert drawing_errors(policy) == policy.check() == drawing_errors(policy) == []
    assert policy_on_meta(policy).pipeline is draft
    assert policy.draft is None
    assert policy_on_meta(policy).pipeline is not draft


# --- a pipeline in memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", repeating(FAMILIES, slow=[n for n in FAMILIES if n not in ("sd3", "unet_v", "flux")]))
def test_a_pipeline_in_memory_is_as_good_as_its_folder(families, name):
    family = families(name)
    policy = family.policy_class(family.pipeline(), **family.all_options({"lora_rank": 2}))
    assert policy.checkpoint == str(family.folder)
    assert (policy.embeds_guidance, policy.network_names) == (
        family.shared.embeds_guidance,
        family.shared.network_names,
    )
    assert policy_errors(policy) == []
    other = family.load(lora_rank=2)
    with torch.no_grad():
        assert torch.equal(policy.load()(*inputs(policy)), other(*inputs(other)))
    assert policy.given is None


def meta(pipeline):
    pipeline.text_encoder.to("meta")


def adapted(pipeline):
    pipeline.unet.add_adapter(__import__("peft").LoraConfig(r=2, target_modules=["to_q"]))


IN_MEMORY = {
    "null": (lambda pipeline: setattr(pipeline, "vae", None), "has no vae, but UNetPolicy needs it."),
    "empty": (meta, "has networks without weights, on the meta device."),
    "compiled": (lambda p: setattr(p, "unet", torch.compile(p.unet)), "has a compiled unet. Pass it uncompiled, with "),
    "adapted": (
        adapted,
        r"has a LoRA in its unet. Call fuse_lora\(\) and unload_lora_weights\(\) of the pipeline first.",
    ),
    "offloaded": (lambda p: p.enable_model_cpu_offload(device="cpu"), "is offloaded by accelerate. Call its "),
    "cast": (
        lambda p: p.unet.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
        "has diffusers' hooks layerwise_casting in its unet. Load it again, without a cache",
    ),
    "grouped": (
        lambda p: p.unet.enable_group_offload(torch.device("cpu"), offload_type="leaf_level"),
        "has diffusers' hooks group_offloading in its unet.",
    ),
    "inpainting": (
        lambda p: p.unet.register_to_config(in_channels=9),
        "has a unet of 9 channels for latents of 8: it in",
    ),
    "thresholds": (lambda p: p.scheduler.register_to_config(thresholding=True), "has a scheduler with thresholding"),
    "tokenizer": (
        lambda p: setattr(p, "tokenizer", type(p.tokenizer)()),
        "has a tokenizer that has 2 tokens, but its ",
    ),
}


@pytest.mark.parametrize("fault", IN_MEMORY)
def test_a_pipeline_in_memory_with_a_fault_is_one_line(families, fault):
    change, message = IN_MEMORY[fault]
    pipeline = families("unet_eps").pipeline()
    change(pipeline)
    for call in (UNetPolicy(pipeline).check, UNetPolicy(pipeline).load):
        with pytest.raises(LoadError, match=rf"^{KEY}\S+ {message}"):
            raise LoadError(*call())


def test_a_check_downloads_the_small_files_and_no_weights(families, tmp_path, monkeypatch):
    folder = families("sd3").folder
    files = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with FakeHub() as hub:
        hub.use(monkeypatch, tmp_path)
        half = {name: data for name, data in files.items() if not name.startswith("vae/")}
        hub.repositories = {"owner/whole": files, "owner/half": half}
        whole, other = SD3Policy("owner/whole"), SD3Policy("owner/half")
        assert whole.check() == other.check() == []
        names = {name: weight.shape for name, weight in policy_on_meta(whole).network.named_parameters()}
        assert names == {n: w.shape for n, w in families("sd3").pipeline().transformer.named_parameters()}
        assert other.draft is None
        with pytest.raises(NotEstimated, match="Run: hf download owner/half "):
            policy_on_meta(other)
        read = sorted(name.removeprefix("owner/whole/") for name in hub.read if "whole" in name)
        assert read == sorted(name for name in files if not name.endswith(".safetensors"))


def test_a_hub_that_never_answers_is_left_for_its_cache(families, tmp_path, monkeypatch):
    repository = tmp_path / "models--owner--whole"
    shutil.copytree(families("sd3").folder, repository / "snapshots" / ("1" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)
    monkeypatch.setattr(Pages, "route", lambda page, pages: page.server.owner.closing.wait(60))
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    with FakeHub() as server:
        server.use(monkeypatch, tmp_path)
        with pytest.warns(UserWarning, match=r"did not answer within 0\.2 s\. Only its cache is used\."):
            policy = SD3Policy("owner/whole").load()
        assert policy.network is not None


def test_what_is_no_pipeline_of_the_family(families):
    pipeline = families("unet_eps").pipeline()
    (error,) = SD3Policy(pipeline).check()
    assert error.endswith(" is a StableDiffusionPipeline, SD3Policy needs StableDiffusion3Pipeline.")
    for other in (pipeline.unet, None, 5):
        with pytest.raises(
            TypeError, match=f"checkpoint is of {type(other).__name__}. Give a hub name, a folder or a "
        ):
            SD3Policy(other)
    built = type(pipeline)(**pipeline.components, requires_safety_checker=False)
    with pytest.raises(NotEstimated):
        policy_on_meta(UNetPolicy(built))
    assert UNetPolicy(built).checkpoint == "StableDiffusionPipeline"
    assert UNetPolicy(families("unet_eps").folder).checkpoint == str(families("unet_eps").folder)


def test_a_pipeline_in_memory_trains(families, tmp_path):
    policy = UNetPolicy(families("unet_eps").pipeline(), lora_rank=2)
    module = VGRPOModule(policy, VGRPO(RolloutSpec("ddim", 2), num_mc_samples=2), Brightness())
    make_trainer(tmp_path, 1).fit(module, datamodule=make_data())
    assert module.record.updates == 1
