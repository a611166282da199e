"""A run that starts from a LoRA file: each program's naming gives the same picture, and what does not fit is said."""

import json
import math
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from commands import export, run
from diffusers import WanPipeline
from fake_hub import FakeHub
from helpers import repeating
from huggingface_hub import constants
from peft import LoraConfig
from policies.contract import inputs
from policies.families import make_family
from safetensors.torch import load_file, save_file

from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.policies import AutoPolicy
from lit_vgrpo.policies.loading import bare_network
from lit_vgrpo.policies.lora_file import lora_file_error, read_lora
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.resume_guard import changed_inputs
from lit_vgrpo.training.saved_weights import load_policy, policy_errors, start_hashes

GREY_LEVEL = 1 / 255
RANKS = ((2, 1.0), (3, 6.0), (4, 3.0))  # rank and alpha of a LoRA's first, second and third layer
FIRST, SECOND = "transformer_blocks.0", "transformer_blocks.1"
QKV = tuple(f"{FIRST}.attn.to_{x}" for x in "qkv")
MIDDLE = "mid_block.attentions.0.transformer_blocks.0"
LAYERS = {  # of each family; those in one tuple share their down matrix, as fused layers do
    "sd3": (f"{FIRST}.attn.to_q", f"{SECOND}.attn.to_out.0", f"{FIRST}.ff.net.0.proj"),
    "flux": (QKV, f"{FIRST}.attn.to_out.0", "single_transformer_blocks.0.proj_out"),
    "sdxl": (f"{MIDDLE}.attn1.to_q", f"{MIDDLE}.attn2.to_v", f"{MIDDLE}.ff.net.2"),
    "qwen_image": (f"{FIRST}.attn.to_q", f"{FIRST}.attn.add_k_proj", f"{SECOND}.img_mlp.net.2"),
    "chroma": (f"{FIRST}.attn.to_v", f"{FIRST}.attn.to_out.0", "single_transformer_blocks.0.proj_out"),
    "flux2_dev": (QKV[2], f"{FIRST}.attn.to_out.0", "single_transformer_blocks.0.attn.to_qkv_mlp_proj"),
    "lumina2": ("layers.0.attn.to_v", "layers.1.attn.to_out.0"),
    "sana": (f"{FIRST}.attn1.to_v", f"{SECOND}.attn2.to_out.0"),
    **dict.fromkeys(("qwen_image21", "krea2"), (f"{FIRST}.attn.to_v", f"{SECOND}.attn.to_out.0")),
}
NEWER = ("chroma", "flux2_dev", "lumina2", "sana", "qwen_image21", "krea2")
OF_BFL = {
    **dict.fromkeys(QKV, "lora_unet_double_blocks_0_img_attn_qkv"),
    f"{FIRST}.attn.to_out.0": "lora_unet_double_blocks_0_img_attn_proj",
    "single_transformer_blocks.0.proj_out": "lora_unet_single_blocks_0_linear2",
}
NAMINGS = {
    "sd3": ("ours", "diffusers", "kohya", "ai_toolkit", "peft"),
    "flux": ("diffusers", "kohya", "ai_toolkit", "xlabs"),
    "sdxl": ("diffusers", "kohya", "processors"),
    "qwen_image": ("diffusers", "kohya", "ai_toolkit"),
    **dict.fromkeys(NEWER, ("diffusers", "ai_toolkit")),
}
OF_XLABS = {
    "lora_unet_double_blocks_0_img_attn_qkv": "double_blocks.0.processor.qkv_lora1",
    "lora_unet_double_blocks_0_img_attn_proj": "double_blocks.0.processor.proj_lora1",
    "lora_unet_single_blocks_0_linear2": "single_blocks.0.processor.proj_lora",
}
RANK = {"lora_rank": 4, "lora_alpha": 6}
OF_AUTHORS = {  # of each family: name of the model's authors -> diffusers' layers
    "wan": {
        "blocks.0.self_attn.q": "blocks.0.attn1.to_q",
        "blocks.1.cross_attn.o": "blocks.1.attn2.to_out.0",
        "blocks.1.ffn.2": "blocks.1.ffn.net.2",
    },
    "flux2": {
        "double_blocks.0.img_attn.qkv": QKV,
        "double_blocks.0.txt_mlp.2": f"{FIRST}.ff_context.linear_out",
        "single_blocks.0.linear2": "single_transformer_blocks.0.attn.to_out",
    },
    "krea2": {"blocks.0.attn.wq": QKV[0], "blocks.1.mlp.up": f"{SECOND}.ff.up", "first": "img_in"},
    "flux": {
        "double_blocks.0.img_attn.qkv": QKV,
        "double_blocks.0.img_mlp.0": f"{FIRST}.ff.net.0.proj",
        "single_blocks.0.linear2": "single_transformer_blocks.0.proj_out",
    },
    "z_image": {
        "layers.0.attention.to_q": "layers.0.attention.to_q",
        "layers.0.attention.out": "layers.0.attention.to_out.0",
    },
    "lumina2": {
        "layers.0.attention.qkv": tuple(f"layers.0.attn.to_{x}" for x in "qkv"),
        "layers.1.feed_forward.w1": "layers.1.feed_forward.linear_1",
    },
}
PEFT, KOHYA = ("lora_A", "lora_B"), ("lora_down", "lora_up")
SPELLINGS = [
    ("diffusion_model.", PEFT),
    ("diffusion_model.", KOHYA),
    ("lora_unet_", KOHYA),
    ("base_model.model.", PEFT),
]


def with_ranks(layers):
    """Each entry of a table's layers as a tuple, with its rank and alpha."""
    for of, (rank, alpha) in zip(layers, RANKS, strict=False):
        yield (of,) if isinstance(of, str) else of, rank, alpha


class Loras:
    """A LoRA of each family, in memory and as files, and the picture that it gives."""

    def __init__(self, folder, make):
        self.folder, self.family = folder, cache(make)
        self.layers, self.picture = cache(self._layers), cache(self._picture)

    def _layers(self, name):
        """``{layer: (down, up, alpha)}``"""
        modules = dict(self.family(name).shared.network.named_modules())
        draw = torch.Generator().manual_seed(1)
        found = {}
        for layers, rank, alpha in with_ranks(LAYERS[name]):
            down = torch.randn(rank, modules[layers[0]].weight.shape[1], generator=draw)
            for layer in layers:
                found[layer] = down, 0.3 * torch.randn(len(modules[layer].weight), rank, generator=draw), alpha
        return found

    def _picture(self, name):
        """With the LoRA in the network's weights, by hand."""
        policy = self.family(name).load()
        with torch.no_grad():
            for layer, (down, up, alpha) in self.layers(name).items():
                policy.network.get_submodule(layer).weight += alpha / len(down) * up @ down
        return picture(policy)

    def targets(self, name):
        return sorted({layer.split("blocks.")[-1].split(".", 1)[1] for layer in self.layers(name)})

    def started(self, name, start, **options):
        trained = {**RANK, "lora_targets": self.targets(name), **options}
        family = self.family(name)
        return family.policy_class(str(family.folder), **family.all_options({**trained, "start_from": str(start)}))

    def file(self, name, naming):
        path, layers = self.folder / f"{name}_{naming}.safetensors", self.layers(name)
        network, tensors, header = self.family(name).policy_class.network_name, {}, None
        if naming == "ours":
            policy = load_policy(self.started(name, self.file(name, "kohya")))
            return policy.save(self.folder / name)
        if naming == "kohya":
            for layer, (down, up, alpha) in layers.items():
                key = OF_BFL[layer] if name == "flux" else f"lora_unet_{layer.replace('.', '_')}"
                if f"{key}.lora_up.weight" in tensors:
                    up = torch.cat([tensors[f"{key}.lora_up.weight"], up])
                tensors |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
                tensors[f"{key}.alpha"] = torch.tensor(alpha)
        elif naming == "xlabs":
            for layer, (down, up, alpha) in layers.items():
                key, up = OF_XLABS[OF_BFL[layer]], alpha / len(down) * up
                up = torch.cat([tensors[f"{key}.up.weight"], up]) if f"{key}.up.weight" in tensors else up
                tensors |= {f"{key}.down.weight": down, f"{key}.up.weight": up}
        elif naming == "processors":
            for layer, (down, up, alpha) in layers.items():
                key = re.sub(r"(attn\d)\.(to_\w)$", r"\1.processor.\2_lora", layer)
                key = key if key != layer else f"{layer}.lora"
                tensors |= {f"unet.{key}.down.weight": down, f"unet.{key}.up.weight": alpha / len(down) * up}
        elif naming == "peft":
            path = self.folder / "peft" / "adapter_model.safetensors"
            path.parent.mkdir(exist_ok=True)
            for layer, (down, up, _) in layers.items():
                key = f"base_model.model.{layer}"
                tensors |= {f"{key}.lora_A.weight": down.clone(), f"{key}.lora_B.weight": up}
            alphas = {layer.removeprefix("transformer_blocks."): alpha for layer, (_, _, alpha) in layers.items()}
            options = {"lora_dropout": 0.1, "init_lora_weights": "gaussian", "lora_alpha": alphas.pop("0.attn.to_q")}
            LoraConfig(r=4, alpha_pattern=alphas, target_modules=list(layers), **options).save_pretrained(path.parent)
        elif naming == "ai_toolkit":
            for layer, (down, up, alpha) in layers.items():
                key, scale = f"diffusion_model.{layer}", alpha / len(down)
                tensors |= {f"{key}.lora_A.weight": down.clone(), f"{key}.lora_B.weight": scale * up}
        else:
            for layer, (down, up, _) in layers.items():
                tensors |= {f"{network}.{layer}.lora_A.weight": down.clone(), f"{network}.{layer}.lora_B.weight": up}
            header = {
                **{"r": 9, "lora_alpha": 9, "target_modules": list(layers)},
                "rank_pattern": {layer: len(down) for layer, (down, _, _) in layers.items()},
                "alpha_pattern": {layer: alpha for layer, (_, _, alpha) in layers.items()},
            }
            header = {"lora_adapter_metadata": json.dumps({f"{network}.{key}": value for key, value in header.items()})}
        save_file(tensors, path, header)
        return path


def picture(policy):
    noise, _, cond = inputs(policy)
    return policy.decode(sample(policy, cond, torch.arange(2), RolloutSpec(policy.solvers[0], 3), noise)[0])


@pytest.fixture(scope="module")
def loras(tmp_path_factory, sd3_folder, unet_folder, sdxl_folder, flux_folder, large_folder):
    def make(name):
        return make_family(name, sd3_folder, unet_folder, sdxl_folder, flux_folder, large_folder)

    return Loras(tmp_path_factory.mktemp("loras"), make)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "naming"), [(name, naming) for name, known in NAMINGS.items() for naming in known])
def test_each_naming_gives_the_picture_of_the_merged_weights(loras, name, naming):
    start = loras.file(name, naming)
    assert policy_errors(loras.started(name, start)) == []
    found = picture(load_policy(loras.started(name, start)))
    difference = (found - loras.picture(name)).abs().max().item()
    print(f"{name}, {naming}: {255 * difference:.4f} of 255")  # for docs/starting_weights.md
    assert difference <= GREY_LEVEL
    assert (found - picture(loras.family(name).shared)).abs().max() > 10 * GREY_LEVEL


SPELT = [(name, *way) for name in OF_AUTHORS for way in SPELLINGS if (name, way[0]) != ("krea2", "lora_unet_")]


@pytest.mark.parametrize(
    ("name", "prefix", "endings"),
    repeating(SPELT, slow=[one for one in SPELT if one[0] in ("flux", "z_image", "lumina2")]),
)
def test_the_names_of_a_models_authors_are_read_with_their_alphas(loras, tmp_path, name, prefix, endings):
    has_alphas = prefix != "base_model.model."  # of which none has any
    family, draw, tensors, expected = loras.family(name), torch.Generator().manual_seed(2), {}, {}
    policy = family.policy_class(str(family.folder), start_from=str(tmp_path / "a.safetensors"))
    network = bare_network(policy)
    for theirs, (layers, rank, alpha) in zip(OF_AUTHORS[name], with_ranks(OF_AUTHORS[name].values()), strict=True):
        weights = [network.get_submodule(layer).weight for layer in layers]
        down = torch.randn(rank, weights[0].shape[1], generator=draw)
        up = torch.randn(sum(map(len, weights)), rank, generator=draw)
        stem = prefix + (theirs.replace(".", "_") if prefix == "lora_unet_" else theirs)
        tensors |= {f"{stem}.{ending}.weight": matrix for ending, matrix in zip(endings, (down, up), strict=True)}
        tensors |= {f"{stem}.alpha": torch.tensor(alpha)} if has_alphas else {}
        scale = alpha / rank if has_alphas else 1.0
        parts = up.split([len(weight) for weight in weights])
        expected |= {layer: scale * part @ down for layer, part in zip(layers, parts, strict=True)}
    save_file(tensors, tmp_path / "a.safetensors")
    found = {name: up @ down for name, (down, up) in read_lora(policy, tmp_path / "a.safetensors", network).items()}
    assert found.keys() == expected.keys()
    for layer, update in expected.items():
        torch.testing.assert_close(found[layer], update, rtol=1e-5, atol=1e-5)
    if name == "wan" and prefix == "diffusion_model.":  # plain diffusers reads these
        plain = WanPipeline.lora_state_dict(str(tmp_path / "a.safetensors"))
        for layer, update in found.items():
            down, up = (plain[f"transformer.{layer}.lora_{side}.weight"] for side in "AB")
            torch.testing.assert_close(up @ down, update, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("wan", "diffusion_model.blocks.0.self_attn.q.diff_b", "1 of its 7 tensors do not fit, such as "),
        (
            "wan",
            "diffusion_model.blocks.0.self_attn.k.lokr_w1",
            "such as {}. (diffusers: ValueError: `state_dict` shou",
        ),
        ("flux2", "diffusion_model.single_blocks.0.linear1.alpha", "such as {}. Use a plain"),
        ("krea2", "flux2", "is not a LoRA of Krea2Transformer2DModel alone: 6 of its 6 tensors do not fit, such as "),
        ("flux2", "wan", "is not a LoRA of Flux2Transformer2DModel alone: 6 of its 6 tensors do not fit, such as "),
    ],
)
def test_another_kind_of_adapter_is_one_line(loras, tmp_path, name, change, words):
    source = loras.family(change if change in OF_AUTHORS else name)
    modules = dict(bare_network(source.policy_class(str(source.folder))).named_modules())
    tensors = {} if change in OF_AUTHORS else {change: torch.ones(2)}
    names = OF_AUTHORS[change if change in OF_AUTHORS else name]
    for theirs, (layers, rank, _) in zip(names, with_ranks(names.values()), strict=True):
        weights = [modules[layer].weight for layer in layers]
        tensors[f"diffusion_model.{theirs}.lora_A.weight"] = torch.ones(rank, weights[0].shape[1])
        tensors[f"diffusion_model.{theirs}.lora_B.weight"] = torch.ones(sum(map(len, weights)), rank)
    save_file(tensors, tmp_path / "a.safetensors")
    policy = loras.family(name).policy_class(str(loras.family(name).folder), start_from="a.safetensors")
    error = lora_file_error(policy, tmp_path / "a.safetensors")
    assert words.format(change) in error
    assert "\n" not in error
    assert len(error) < 600


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_a_file_of_torch_is_read_without_running_code(loras, tmp_path, suffix):
    plain, file = loras.started("sd3", loras.file("sd3", "kohya")), tmp_path / f"a{suffix}"
    torch.save(load_file(plain.start_from), file)
    start = loras.started("sd3", tmp_path)  # the folder's only file
    assert policy_errors(start) == []
    network = bare_network(start)
    expected, found = read_lora(plain, Path(plain.start_from), network), read_lora(start, file, network)
    assert all(torch.equal(found[name][1], up) for name, (_, up) in expected.items())
    assert start_hashes(start).keys() == {"weights"}
    ran = tmp_path / "ran"
    for content, words in (
        (Trap(ran), "Weights only load failed"),
        ({"r": 4}, "contains no tensors, or something else"),
        ({}, "contains no tensors, or something else"),
    ):
        torch.save(content, file)
        (error,) = policy_errors(start)
        assert words in error
        assert error.endswith(". Download or save it again.")
    assert not ran.exists()


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_an_adapter_of_peft_in_torchs_format_has_its_options(loras, peft_folder):
    folder = peft_folder()
    file = folder / "adapter_model.safetensors"
    policy = loras.started("sd3", folder)
    expected = read_lora(policy, file, bare_network(policy))
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    assert policy_errors(policy) == []
    found = read_lora(policy, file.with_suffix(".bin"), bare_network(policy))
    assert all(torch.equal(found[name][1], up) for name, (_, up) in expected.items())
    assert len(start_hashes(policy)) == 2


def test_what_is_neither_a_run_nor_a_lora_is_named(loras, tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (error,) = policy_errors(loras.started("sd3", tmp_path / "a.gguf"))
    assert error.endswith("a.gguf is neither a run nor a LoRA file, .safetensors, .bin, .pt, .pth.")
    (error,) = policy_errors(loras.started("sd3", tmp_path / "gone.bin"))
    assert error.endswith("gone.bin does not exist.")


def test_full_weights_take_it_in_and_other_ranks_stay_free(loras):
    file = loras.file("sd3", "kohya")
    merged = load_policy(loras.started("sd3", file, lora_rank=None, lora_alpha=None, lora_targets=None))
    assert (picture(merged) - loras.picture("sd3")).abs().max() <= GREY_LEVEL
    wide = load_policy(loras.started("sd3", file, lora_rank=7, lora_targets=[*loras.targets("sd3"), "attn.to_k"]))
    assert (picture(wide) - loras.picture("sd3")).abs().max() <= GREY_LEVEL
    assert {len(p) for name, p in trainable_parameters(wide).items() if "lora_A" in name} == {7}
    assert start_hashes(wide) != start_hashes(loras.started("sd3", loras.file("sd3", "ai_toolkit")))


def test_targets_that_loading_would_find_are_known_to_the_check(loras, tmp_path):
    def auto(**options):
        size = {"height": 32, "width": 32, "call": {"max_sequence_length": 4}}
        return AutoPolicy(str(loras.family("sd3").folder), **size, **RANK, **options)

    saved = auto().load()
    start = auto(start_from=str(saved.save(tmp_path)))
    assert policy_errors(start) == []
    assert load_policy(start).lora_targets == saved.lora_targets != []
    assert "more than this run would train" in policy_errors(auto(start_from=loras.file("sd3", "kohya")))[0]  # ff.net


@pytest.mark.slow
def test_a_run_needs_the_lora_only_to_resume(loras, tiny_recipe, capsys):
    here = Path("start.safetensors")
    here.write_bytes(loras.file("sd3", "kohya").read_bytes())
    targets = ",".join(loras.targets("sd3"))
    words = [str(tiny_recipe), "name=first", "trainer.max_epochs=1", "model.policy.lora_rank=4"]
    words += [f"model.policy.start_from={here}", f"model.policy.lora_targets=[{targets}]"]
    assert run(words) == 0
    here.rename("moved.safetensors")
    assert export(["runs/first", "--to", "exported"]) == 0
    assert run(["runs/first/config.yaml", "--resume", "trainer.max_epochs=2"]) == 2
    assert "start.safetensors does not exist." in capsys.readouterr().err


ODD = ("lora_te_a.lora_down.weight", "clip_l.q.lora_A.weight", "transformer_2.proj_out.lora_B.weight")
ODD += ("transformer.proj_out.dora_scale",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ("other", {}, "alone: 6 of its 6 tensors do not fit, such as x0."),
        *((odd, {}, f"1 of its 7 tensors do not fit, such as {odd}.") for odd in ODD),
        ("transformer.proj_in.alpha", {}, "1 of its 7 tensors do not fit, such as proj_in.alpha. Use a plain LoRA of"),
        ("header", {}, "has two LoRA scales, in its adapter's options and in transformer.a.alpha. Save it with one"),
        ("nan", {}, "contains weights that are not finite."),
        ("", {"lora_rank": 3}, "with rank 4, more than this run would train. Set model.policy.lora_rank=4 "),
        ("", {"lora_targets": None}, "'model.policy.lora_targets=[attn.to_out.0,attn.to_q,ff.net.0.proj]', or more."),
        ("", {"start_weights": "ema"}, "model.policy.start_weights=ema has no effect on a LoRA file. Leave it out."),
    ],
)
def test_what_does_not_fit_is_one_line(loras, tmp_path, change, options, words):
    tensors = load_file(loras.file("sd3", "diffusers"))
    first = min(tensors)
    if change == "other":
        tensors = {
            f"transformer.x{i}.{name.split('.', 2)[2]}": t for i, (name, t) in enumerate(sorted(tensors.items()))
        }
    elif change == "nan":
        tensors[first][0, 0] = torch.nan
    elif change:
        tensors["transformer.a.alpha" if change == "header" else change] = torch.ones(1)
    header = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 2})} if change == "header" else None
    save_file(tensors, tmp_path / "a.safetensors", header)
    policy = loras.started("sd3", tmp_path / "a.safetensors", **options)
    (error,) = policy_errors(policy)  # before any weight is loaded
    with pytest.raises(LoadError, match=re.escape(error)):
        load_policy(policy)
    assert words in error
    assert "\n" not in error


@pytest.fixture
def peft_folder(loras, tmp_path):
    """A copy of an adapter that peft saved, and a function that changes its options."""
    folder = Path(shutil.copytree(loras.file("sd3", "peft").parent, tmp_path / "peft"))

    def change(**options):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | options))
        return folder

    return change


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("init_lora_weights", value) for value in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga", "loftq")],
        *[("use_dora", True), ("alora_invocation_tokens", [1]), ("layer_replication", [[0, 1]]), ("peft_type", "LOHA")],
        ("option_of_a_later_peft", True),
    ],
)
def test_an_option_under_which_the_tensors_are_not_a_plain_lora_is_refused(loras, peft_folder, option, value):
    (error,) = policy_errors(loras.started("sd3", peft_folder(**{option: value})))
    assert f"is not a plain LoRA: its adapter's options have {option}={value}. Use a plain LoRA of this mo" in error


@pytest.mark.parametrize("alpha", [None, "8", math.nan])
def test_a_scale_that_is_no_number_is_one_line(loras, peft_folder, alpha):
    (error,) = policy_errors(loras.started("sd3", peft_folder(lora_alpha=alpha)))
    assert re.fullmatch(r"Cannot load model\.policy\.start_from=.*peft: .*\. Download or save it again\.", error)


def test_another_alpha_is_another_start(loras, peft_folder):
    policy = loras.started("sd3", peft_folder())
    before = start_hashes(policy)
    peft_folder(lora_alpha=9)
    assert changed_inputs({"start": before}, {"start": start_hashes(policy)}) == [
        "start: adapter_config.json changed since the checkpoint was written"
    ]


def test_an_adapter_of_peft_on_the_hub_is_read_with_its_options(loras, tmp_path, monkeypatch):
    local = loras.file("sd3", "peft")
    files = {f"v2/{file.name}": file.read_bytes() for file in local.parent.iterdir()}
    with FakeHub() as hub:
        hub.use(monkeypatch, tmp_path)
        hub.repositories = {"owner/whole": files, "owner/half": {f"v2/{local.name}": local.read_bytes()}}
        whole = loras.started("sd3", f"owner/whole/v2/{local.name}")
        assert policy_errors(whole) == []
        assert (picture(load_policy(whole)) - loras.picture("sd3")).abs().max() <= GREY_LEVEL
        assert start_hashes(whole) == start_hashes(loras.started("sd3", local))
        with pytest.raises(LoadError, match=r"^Cannot load owner/half: 404 .* Set model\.policy\.start_from=[^\n]*$"):
            load_policy(loras.started("sd3", f"owner/half/v2/{local.name}"))


def test_a_name_that_is_no_file_is_looked_for_on_the_hub(loras, here, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for start in ("owner/lora", "owner/lora/some/file.safetensors"):
        (error,) = policy_errors(loras.started("sd3", start))
        assert re.fullmatch(r"Cannot load owner/lora: not in .* set model\.policy\.start_from=/a/local/folder\.", error)
        with pytest.raises(LoadError, match="Cannot load owner/lora"):
            load_policy(loras.started("sd3", start))
    assert policy_errors(loras.started("sd3", "runs/lora"))[0].startswith(
        "model.policy.start_from: runs/lora is not a run."
    )
    Path("many").mkdir()
    for name in ("a", "b"):
        save_file({"a": torch.zeros(1)}, f"many/{name}.safetensors")
    assert "many has 2 files. " in policy_errors(loras.started("sd3", "many"))[0]
