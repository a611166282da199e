"""Modular pipelines: read from folders and repositories, and called like diffusers' other pipelines."""

import json
import shutil

import pytest
import torch
import zoo
from fake_hub import FakeHub

from lit_vgrpo.policies import AutoPolicy
from lit_vgrpo.policies.meta import policy_on_meta
from lit_vgrpo.policies.modular import MODULAR_INDEX, as_pipeline, own_folder, part_folder
from lit_vgrpo.report.model_card import loading_lines

SIZE = {"height": 32, "width": 48}
NAME = "Flux3ModularPipeline"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modular")
    zoo.save(NAME, folder / "draft")
    return (folder / "draft").rename(folder / "flux3")  # its index names the draft


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "flux3")


def edit_index(folder, change):
    path = folder / MODULAR_INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def parts_in(folder):
    return {name for name in ("text_encoder", "tokenizer", "transformer", "vae") if (folder / name).is_dir()}


def test_a_folder_is_enough(saved):
    policy, given = AutoPolicy(str(saved), **SIZE), AutoPolicy(zoo.build(NAME), **SIZE).load()
    assert (policy.pipeline_class, policy.network_names, policy.path_kind) == (NAME, ("transformer",), "flow")
    assert policy.check() == []
    assert policy_on_meta(policy).description() == policy.load().description() == given.description()
    z, t = torch.randn(1, *policy.latent_shape), torch.tensor([0.5])
    one, other = (each(z, t, each.encode(["a red circle"]), 3.0) for each in (policy, given))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_times_in_16_bits_are_learned_exactly(saved):
    assert AutoPolicy(str(saved), **SIZE, dtype="bfloat16", lora_rank=2).load().description()[0] == "time: timestep = t"


def test_what_rewrites_the_prompt_is_left_out(saved):
    whole = zoo.build(NAME)
    called = as_pipeline(whole)
    assert "prompt_upsampler" in whole.blocks.sub_blocks.keys() & whole.components.keys()
    assert not {"prompt_upsampler", "prompt_upsampler_processor"} & {*called.blocks.sub_blocks, *called.components}
    assert as_pipeline(called) is called
    lines = loading_lines(AutoPolicy(str(saved), **SIZE).load(), str(saved), torch.float32)
    assert lines[:2] == ["blocks = diffusers.Flux3AutoBlocks()", 'blocks.sub_blocks.pop("prompt_upsampler")']


def test_parts_may_be_elsewhere(folder, tmp_path):
    (folder / "transformer").rename(tmp_path / "network")
    source = {"pretrained_model_name_or_path": str(tmp_path), "subfolder": "network"}
    edit_index(folder, lambda index: index["transformer"][2].update(source))
    assert AutoPolicy(str(folder), **SIZE).check() == []
    assert AutoPolicy(str(folder), **SIZE).load().latent_shape == (16, 4, 6)


def test_a_scheduler_elsewhere_is_read_before_loading(tmp_path):
    folder = zoo.save("StableDiffusionXLModularPipeline", tmp_path / "sdxl")
    (folder / "scheduler").rename(tmp_path / "elsewhere")
    source = {"pretrained_model_name_or_path": str(tmp_path), "subfolder": "elsewhere"}
    edit_index(folder, lambda index: index["scheduler"][2].update(source))
    assert AutoPolicy(str(folder)).path_kind == "vp"


def test_another_index_takes_precedence(folder):
    assert own_folder(folder, "transformer") == folder / "transformer"
    edit_index(folder, lambda index: index["transformer"][2].update(subfolder="other"))
    assert own_folder(folder, "transformer") == folder / "other"
    (folder / "model_index.json").write_text("{}")
    assert own_folder(folder, "transformer") == folder / "transformer"
    assert part_folder(folder, "transformer", "owner/name") == folder / "transformer"


def test_components_are_refused_in_one_line(folder):
    (error,) = AutoPolicy(str(folder), **SIZE, components={"vae": str(folder)}).check()
    assert error.startswith("model.policy.components is not for modular pipelines.")


def test_a_repository_whose_parts_are_in_two(folder, tmp_path, monkeypatch):
    def moved(index):
        for name in parts_in(folder):
            repository = "lab/encoders" if name == "text_encoder" else "lab/flux3"
            index[name][2].update(pretrained_model_name_or_path=repository, revision=None)
        rewriter = {"pretrained_model_name_or_path": "lab/rewriter", "subfolder": ""}
        index["prompt_upsampler"][2].update(rewriter)

    edit_index(folder, moved)
    files = {f"{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with FakeHub() as hub:
        hub.use(monkeypatch, tmp_path / "cache")
        for name in ("lab/encoders", "lab/flux3"):
            is_encoder = name == "lab/encoders"
            hub.repositories[name] = {
                path: data for path, data in files.items() if ("text_encoder" in path) == is_encoder
            }
        policy = AutoPolicy("lab/flux3", **SIZE)
        assert policy.check() == []
        assert not [path for path in hub.read if path.endswith(".safetensors")]
        policy.load()
    weights = {path.rpartition("/")[0] for path in hub.read if path.endswith(".safetensors")}
    assert weights == {"lab/encoders/text_encoder", "lab/flux3/transformer", "lab/flux3/vae"}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda index: index.update(_blocks_class_name="MyBlocks"),
            "has blocks that diffusers lacks, MyBlocks. Pass AutoPolicy",
        ),
        (lambda index: index.update(_class_name="MyPipeline"), "is a MyPipeline, which diffusers does not have"),
        (
            lambda index: index["vae"][2].update(type_hint=["my_module", "Vae"]),
            "vae is my_module.Vae, not a class of diffusers or transformers",
        ),
        (
            lambda index: index["transformer"][2].update(pretrained_model_name_or_path=None, subfolder="x"),
            "transformer",
        ),
    ],
    ids=["blocks", "class", "library", "network"],
)
def test_an_index_that_cannot_be_used_is_one_line(folder, change, line):
    edit_index(folder, change)
    (error,) = AutoPolicy(str(folder), **SIZE).check()
    assert line in error
    assert "\n" not in error


@pytest.mark.slow
def test_a_merged_export_keeps_where_the_rewriter_is(folder, tmp_path):
    edit_index(folder, lambda index: index["prompt_upsampler"][2].update(pretrained_model_name_or_path="lab/rewriter"))
    AutoPolicy(str(folder), **SIZE).load().save(tmp_path / "export")
    index = json.loads((tmp_path / "export" / MODULAR_INDEX).read_text())
    sources = {name: index[name][2]["pretrained_model_name_or_path"] for name in ("prompt_upsampler", "transformer")}
    assert sources == {"prompt_upsampler": "lab/rewriter", "transformer": "export"}
    assert AutoPolicy(str(tmp_path / "export"), **SIZE).load().latent_shape == (16, 4, 6)
