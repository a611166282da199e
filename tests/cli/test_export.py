"""``lightning export``: what diffusers alone draws with it, in a process of its own, is what our sampler draws."""

import json
import resource
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import yaml
from commands import export, run
from diffusers import DiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file
from saved_runs import IN_16, assert_one_line, assert_same, draw_exports, load_run

from lit_vgrpo.cli.saved_policy import build_policy
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.policies import SD3Policy, UNetPolicy
from lit_vgrpo.policies.export import merge_adapter, save_kohya, save_pipeline
from lit_vgrpo.system.hub import base_name
from lit_vgrpo.training.checkpoint_file import read, write
from lit_vgrpo.training.folder import CONFIG_NAME
from lit_vgrpo.training.saved_weights import SavedWeights

PROMPT = "a red circle on the left"
LORA = {"lora_rank": 2, "lora_alpha": 4}
RECIPE = """
seed_everything: 7
trainer: {accelerator: cpu, devices: 1, logger: false, enable_progress_bar: false}
model:
  objective: {class_path: VGRPO, init_args: {num_mc_samples: 1, rollout: {steps: 2}}}
  reward: JPEGCompressibility
data: {train: train.txt, prompts_per_iteration: 1, group_size: 2, micro_batch_size: 2}
"""
FAMILIES = {
    "sd3": ("SD3Policy", {"max_sequence_length": 4}),
    "unet": ("UNetPolicy", {}),
    "sdxl": ("SDXLPolicy", {}),
    "flux": ("FluxPolicy", {"max_sequence_length": 8, "height": 32, "width": 32}),
}
CASES = {  # name of the folder -> family, kind of the run, options of the command, settings of the evaluation
    **{f"{family}_{kind}": (family, kind, [], {}) for family in FAMILIES for kind in ("lora", "full")},
    "sd3_trained": ("sd3", "lora", ["--no-ema"], {}),
    "sd3_merged": ("sd3", "lora", ["--merge"], {}),
    "flux_merged": ("flux", "lora", ["--merge"], {}),
    "unet_kohya": ("unet", "lora", ["--format", "kohya"], {}),
    "sdxl_kohya": ("sdxl", "lora", ["--format=kohya"], {}),
    "sd3_low": ("sd3", "lora", [], {"solver": "dpm++", "height": 16}),
    "sd3_unipc": ("sd3", "full", [], {"solver": "unipc"}),
    "unet_dpm": ("unet", "lora", [], {"solver": "dpm++"}),
    "sdxl_dpm": ("sdxl", "full", [], {"solver": "dpm++"}),
    "flux_dpm": ("flux", "full", [], {"solver": "dpm++", "height": 48}),
    "flux_unipc": ("flux", "lora", [], {"solver": "unipc"}),
    "sd3_16": ("sd3", "lora", [IN_16], {}),
    "flux_16": ("flux", "lora", [IN_16], {}),
    "sd3_nf4": ("sd3", "lora", ["model.policy.quantisation=nf4"], {}),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, sd3_folder, unet_folder, sdxl_folder, flux_folder):
    """A folder with a run of every family, LoRA and full weights: ``runs/sd3_lora``, ...; of each path one is real."""
    place = tmp_path_factory.mktemp("export")
    checkpoints = {"sd3": sd3_folder(), "unet": unet_folder(), "sdxl": sdxl_folder(), "flux": flux_folder()}
    policies = {}
    for family, (cls, options) in FAMILIES.items():
        arguments = {"checkpoint": str(checkpoints[family]), **options}
        policies[f"{family}_lora"] = {"class_path": cls, "init_args": {**arguments, **LORA}}
        policies[f"{family}_full"] = {"class_path": cls, "init_args": arguments}
    with chdir(place):
        Path("train.txt").write_text(f"{PROMPT}\n")
        average = "trainer.callbacks+={class_path: EMA, init_args: {decay: 0.5}}"
        train("sd3_lora", policies.pop("sd3_lora"), "trainer.max_epochs=2", "model.optimizer.lr=0.2", average)
        train("unet_full", policies.pop("unet_full"), "trainer.max_epochs=1", "model.optimizer.lr=0.01")
        for name, policy in policies.items():
            save_stirred(name, policy)
    return place


def train(name, policy, *words):
    recipe = yaml.safe_load(RECIPE)
    recipe["model"]["policy"] = policy
    Path(f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    assert run([f"{name}.yaml", *words]) == 0


def save_stirred(name, node):
    """A run folder as the real one's, with a policy whose weights are stirred instead of trained."""
    config = yaml.safe_load(Path("runs/unet_full/config.yaml").read_text())
    config["model"]["policy"] = node
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / CONFIG_NAME).write_text(yaml.safe_dump(config))
    policy = build_policy(config).load()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    checkpoint = read(Path("runs/unet_full/checkpoints/last.ckpt"))
    checkpoint["state_dict"] = {f"policy.{n}": p.detach() for n, p in trainable_parameters(policy).items()}
    write(checkpoint, folder / "checkpoints" / "last.ckpt")


@pytest.fixture
def inside(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


@pytest.fixture(scope="module")
def drawn(place, tmp_path_factory):
    """The exports by name: image of plain diffusers, our sampler's, and the start's."""
    cases = []
    for family, kind, options, evaluation in CASES.values():
        variant = "EMA" if (family, kind) == ("sd3", "lora") and "--no-ema" not in options else "trained"
        cases.append((place, f"runs/{family}_{kind}", variant, options, {"prompt": PROMPT}, evaluation))
    return dict(zip(CASES, draw_exports(cases, tmp_path_factory.mktemp("drawn")), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_plain_diffusers_draws_what_our_sampler_draws(drawn, name):
    theirs, ours, start = drawn[name]
    assert_same(theirs, ours, CASES[name][2])
    assert (ours - start).abs().max() > 0.02  # what was trained shows


@pytest.mark.slow
def test_the_average_is_another_adapter(drawn):
    assert (drawn["sd3_trained"][0] - drawn["sd3_lora"][0]).abs().max() > 0.01
    torch.testing.assert_close(drawn["sd3_merged"][0], drawn["sd3_lora"][0], rtol=1e-3, atol=2e-4)


@pytest.mark.slow
def test_the_scale_of_an_adapter_is_in_its_tensors(inside, tmp_path):
    """B @ A of the file is the update that was trained, although alpha is not the rank."""
    policy = load_run("runs/sd3_lora", "trained")
    assert (policy.lora_rank, policy.lora_alpha) == (2, 4)
    policy.save(tmp_path)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    found = updates(load_file(file), ".lora_A", ".lora_B")
    assert_same_updates(found, policy, lambda name: f"{policy.network_name}.{name}")
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["lora_adapter_metadata"])
    base = Path(policy.checkpoint).name  # of the folder, whose path is of no use to others
    assert header[f"{policy.network_name}.base_model_name_or_path"] == base
    assert header[f"{policy.network_name}.lora_alpha"] == header[f"{policy.network_name}.r"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("family", "base"), [("unet", "sd_v1"), ("sdxl", "sdxl_base_v1-0")])
def test_the_names_of_kohya(inside, tmp_path, family, base):
    policy = load_run(f"runs/{family}_lora", "trained")
    save_kohya(policy.network, tmp_path / "a.safetensors", base_name(policy.checkpoint))
    tensors = load_file(tmp_path / "a.safetensors")
    alphas = {tensors.pop(name).item() for name in [name for name in tensors if name.endswith(".alpha")]}
    assert alphas == {2}  # the rank, which makes the scale 1
    found = updates(tensors, ".lora_down", ".lora_up")
    assert_same_updates(found, policy, lambda name: f"lora_unet_{name.replace('.', '_')}")
    with safe_open(tmp_path / "a.safetensors", "pt") as opened:
        header = opened.metadata()
    assert (header["ss_base_model_version"], header["ss_v2"]) == (base, "False")
    assert header["ss_sd_model_name"] == Path(policy.checkpoint).name


def updates(tensors, down, up):
    """B @ A by the name of the layer."""
    layers = {name.removesuffix(f"{down}.weight") for name in tensors if down in name}
    assert tensors.keys() == {f"{layer}{side}.weight" for layer in layers for side in (down, up)}
    return {layer: tensors[f"{layer}{up}.weight"] @ tensors[f"{layer}{down}.weight"] for layer in layers}


def assert_same_updates(found, policy, named):
    layers = {name: layer for name, layer in policy.network.named_modules() if hasattr(layer, "lora_A")}
    expected = {named(name): layer.get_delta_weight("default").detach() for name, layer in layers.items()}
    assert found.keys() == expected.keys()
    for name, update in expected.items():
        torch.testing.assert_close(found[name], update, msg=name)
    assert any(update.any() for update in expected.values())


@pytest.mark.slow
@pytest.mark.parametrize("file", ["pytorch_lora_weights.safetensors", "kohya.safetensors"])
def test_every_kind_of_layer_is_read_back(unet_folder, tmp_path, file):
    """Linear layers in and out of the attention, and convolutions, whose weights lie with the channels last."""
    targets = ["to_q", "to_out.0", "ff.net.2", "conv1", "proj_in", "time_emb_proj", "conv_in"]
    options = {"lora_rank": 3, "lora_alpha": 4, "lora_targets": targets, "channels_last": True}
    policy = UNetPolicy(str(unet_folder()), **options).load()
    plain = UNetPolicy(str(unet_folder())).load()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.normal_(std=0.1)
    if file.startswith("kohya"):
        save_kohya(policy.network, tmp_path / file, "base")
    else:
        policy.save(tmp_path)
    noise, t, cond = torch.randn(1, *policy.latent_shape), torch.full((1,), 0.5), policy.encode([PROMPT])
    with torch.no_grad():
        trained, start = policy(noise, t, cond), plain(noise, t, cond)
        plain.pipeline.load_lora_weights(str(tmp_path / file))
        torch.testing.assert_close(plain(noise, t, cond), trained, rtol=1e-4, atol=1e-5)
    assert (trained - start).abs().max() > 0.1


@pytest.mark.slow
def test_the_folder_is_whole_and_readable(inside, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert export(["runs/sd3_full", "--to", str(tmp_path / "empty")]) == 0
    assert f"Written: {tmp_path / 'empty'} (pipeline in float32): trained weights of " in (capsys.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert not [path for path in (tmp_path / "empty").rglob("*") if path.is_file() and not path.stat().st_mode & 0o044]
    saved = SavedWeights.read(Path("runs/sd3_full/checkpoints/last.ckpt")).tensors["trained"]
    written = load_file(tmp_path / "empty" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(written[name.removeprefix("network.")], tensor) for name, tensor in saved.items())


def test_merging_loses_no_small_update(sd3_folder, tmp_path):
    """Updates far below a step of bfloat16's grid are in the float32 weights that are written."""
    policy = SD3Policy(str(sd3_folder()), max_sequence_length=4, dtype="bfloat16", lora_rank=2, lora_alpha=6).load()
    name = "transformer_blocks.0.attn.to_q"
    before = policy.network.get_submodule(name).base_layer.weight.detach().clone()
    with torch.no_grad():
        for parameter in trainable_parameters(policy).values():
            parameter.normal_(std=2e-3)
        own = policy.network.get_submodule(name)
        update = 3 * own.lora_B["default"].weight @ own.lora_A["default"].weight
    merge_adapter(policy.networks().values())
    save_pipeline(policy.pipeline, policy.networks(), tmp_path)
    after = load_file(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")[f"{name}.weight"]
    assert (before.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    assert ((before + update).bfloat16() != before).float().mean() < 0.1  # as bfloat16 little would be left
    torch.testing.assert_close(after - before, update, rtol=0, atol=2e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "partial", "merged"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_of_one_type_and_loads_without_further_ado(sd3_folder, tmp_path, kind, dtype):
    """Trained in bfloat16, with a frozen part and text encoders of that type."""
    trained = {"full": {}, "partial": {"train_only": ["proj_out.*"]}, "merged": {"lora_rank": 2}}[kind]
    policy = SD3Policy(str(sd3_folder(True)), max_sequence_length=8, dtype="bfloat16", **trained).load()
    before = {name: (value.data_ptr(), value.dtype) for name, value in policy.pipeline.text_encoder.named_parameters()}
    if kind == "merged":
        merge_adapter(policy.networks().values())
        save_pipeline(policy.pipeline, policy.networks(), tmp_path, dtype=dtype)
    else:
        policy.save(tmp_path, dtype=dtype)
    after = {name: (value.data_ptr(), value.dtype) for name, value in policy.pipeline.text_encoder.named_parameters()}
    assert after == before  # a run that exports goes on with what it had
    files = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(files) == 5  # network, VAE, three text encoders
    types = {value.dtype for file in files for value in load_file(file).values() if value.is_floating_point()}
    assert types == {dtype}
    # what holds float32 needs to be told nothing
    told = {} if dtype == torch.float32 else {"dtype": dtype}
    pipeline = DiffusionPipeline.from_pretrained(tmp_path, **told)
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(PROMPT, num_inference_steps=1, height=32, width=32, max_sequence_length=8, output_type="pt").images
    assert image.isfinite().all()


@pytest.mark.slow
def test_a_second_file_that_cannot_be_written_costs_the_first_nothing(inside, large_folder, tmp_path, capsys):
    options = {"checkpoint": str(large_folder("lumina2")), "max_sequence_length": 48, "height": 32, "width": 32}
    save_stirred("lumina2_lora", {"class_path": "Lumina2Policy", "init_args": {**options, "lora_rank": 32}})
    command = ["runs/lumina2_lora", "--format=comfyui"]
    assert export([*command, "--to", str(tmp_path / "whole")]) == 0
    first = tmp_path / "whole" / "pytorch_lora_weights.safetensors"
    assert (tmp_path / "whole" / "README.md").is_file()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (first.stat().st_size, limits[1]))  # the second has a larger rank
    try:
        assert export([*command, "--to", str(tmp_path / "half")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    err = capsys.readouterr().err
    assert f"Cannot write {tmp_path / 'half'}: " in err
    (file,) = (tmp_path / "half").iterdir()
    assert all(torch.equal(load_file(file)[name], tensor) for name, tensor in load_file(first).items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["runs/sd3_lora", "--to", "runs"], "runs is not empty and will not be overwritten. Choose a new folder."),
        (["runs/sd3_lora", "--to=train.txt/x"], "Cannot write train.txt/x: "),
        (["runs/sd3_lora", "--to=x", "data.seed=1"], "data.seed=1 has no effect on an export, which uses only "),
        (["runs/sd3_lora", "--to=x", "model.policy.lora_rank=3"], " would not fit, such as "),
        (["runs/sd3_lora", "--to=x", "model.policy.lora_alpha=24"], " which would scale the adapter by 6. Set "),
        (["runs/sd3_full", "--to=x", "--merge"], "--merge applies to a LoRA: runs/sd3_full trained the "),
        (["runs/sd3_lora", "--to=x", "--format=kohya"], "and XL, not for SD3Policy. Use --format diffusers."),
        (["runs/unet_lora", "--to=x", "--format=comfyui"], "is for Lumina 2 and Wan, not for UNetPolicy. Use "),
        (["runs/unet_lora", "--to=x", "--format=kohya", "--merge"], "but --merge removes it. Use only one of them."),
    ],
)
def test_mistakes_are_one_line(inside, capsys, words, line):
    assert_one_line(export, words, capsys, line)
    assert not Path("x").exists()
