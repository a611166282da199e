"""Parts of a pipeline from other checkpoints."""

import json
import shutil

import diffusers
import pytest
import torch
import transformers
import zoo
from fake_hub import FakeHub

from lit_vgrpo.policies import AutoPolicy, SD3Policy, UNetPolicy
from lit_vgrpo.policies.meta import drawing_errors
from lit_vgrpo.report.model_card import loading_lines
from lit_vgrpo.system.hub import LoadError


@pytest.fixture(scope="module")
def others(families, tmp_path_factory):
    """A whole pipeline with other weights, and its parts alone."""
    folder = shutil.copytree(families("sd3").folder, tmp_path_factory.mktemp("other") / "whole")
    torch.manual_seed(5)
    for name in ("vae", "transformer"):
        kind = {"vae": diffusers.AutoencoderKL, "transformer": diffusers.SD3Transformer2DModel}[name]
        kind.from_config(kind.load_config(folder / name)).save_pretrained(folder / name)
    return folder


def same(network, folder):
    wanted = type(network).from_pretrained(folder).state_dict()
    return all(torch.equal(tensor, wanted[name]) for name, tensor in network.state_dict().items())


def test_parts_from_a_folder_and_from_a_whole_pipeline(families, others):
    given = {"vae": str(others / "vae"), "transformer": str(others), "tokenizer_2": str(others)}
    policy = SD3Policy(str(families("sd3").folder), components=given)
    assert policy.check() == []
    policy.load()
    assert same(policy.pipeline.vae, others / "vae")
    assert same(policy.network, others / "transformer")
    assert same(policy.pipeline.text_encoder, families("sd3").folder / "text_encoder")
    variables = {"diffusers": diffusers, "transformers": transformers, "torch": torch}
    exec(loading_lines(policy, str(families("sd3").folder), torch.float32)[0], variables)
    assert same(variables["pipe"].vae, others / "vae")
    assert same(variables["pipe"].transformer, others / "transformer")


def test_a_network_of_another_class_is_read_as_what_it_is(families, tmp_path):
    small = families("unet_eps")
    tiny = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4, latent_channels=8
    )
    tiny.save_pretrained(tmp_path / "vae")
    policy = UNetPolicy(str(small.folder), components={"vae": str(tmp_path / "vae")})
    assert policy.check() == []
    assert type(policy.draft.vae) is diffusers.AutoencoderTiny


def test_a_pipeline_that_lacks_an_encoder(tmp_path):
    """HiDream-I1's repository has no Llama, which its pipeline needs."""
    folder = zoo.save("HiDreamImagePipeline", tmp_path / "hidream")
    whole = AutoPolicy(str(folder)).load().description()
    for name in ("text_encoder_4", "tokenizer_4"):
        shutil.copytree(folder / name, tmp_path / "llama", dirs_exist_ok=True)
        shutil.rmtree(folder / name)
    index = json.loads((folder / "model_index.json").read_text())
    lacking = {name: entry for name, entry in index.items() if not name.endswith("_4")}
    (folder / "model_index.json").write_text(json.dumps(lacking))
    policy = AutoPolicy(str(folder))
    (error,) = policy.check() or drawing_errors(policy)
    assert "has no text_encoder_4 and no tokenizer_4" in error
    assert "model.policy.components" in error
    given = dict.fromkeys(("text_encoder_4", "tokenizer_4"), str(tmp_path / "llama"))
    policy = AutoPolicy(str(folder), components=given)
    assert policy.check() == []
    assert policy.load().description() == whole


def test_parts_from_the_hub(families, others, tmp_path, monkeypatch):
    def files(folder):
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    alone = {**files(others / "vae"), "original.safetensors": b"other", "sub/model.safetensors": b"other"}
    with FakeHub() as hub:
        hub.use(monkeypatch, tmp_path)
        hub.repositories = {"owner/vae": alone, "owner/whole": files(others)}
        given = {"vae": "owner/vae", "transformer": "owner/whole", "tokenizer": "owner/whole"}
        policy = SD3Policy(str(families("sd3").folder), components=given)
        assert policy.check() == []
        assert not any(name.endswith(".safetensors") for name in hub.read)
        policy.load()
        assert same(policy.pipeline.vae, others / "vae")
        assert same(policy.network, others / "transformer")
        weights = {name for name in hub.read if name.endswith(".safetensors")}
        network = "diffusion_pytorch_model.safetensors"
        assert weights == {f"owner/vae/{network}", f"owner/whole/transformer/{network}"}
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert same(SD3Policy(policy.checkpoint, components=given).load().pipeline.vae, others / "vae")


def test_components_that_do_not_fit_are_one_line(families, tmp_path):
    folder = str(families("sd3").folder)
    wrong = {
        "veo": (folder, "components.veo is not an option of StableDiffusion3Pipeline. Did you mean vae?"),
        "scheduler": (folder, "components.scheduler is not an option of StableDiffusion3Pipeline. Use one of: "),
        "vae": (str(tmp_path), "has no config.json. Set model.policy.components.vae to a folder"),
        "transformer": (f"{folder}/vae", "is a AutoencoderKL. The transformer of StableDiffusion3Pipeline is a SD3T"),
    }
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    wrong["text_encoder"] = str(tmp_path / "damaged"), "damaged/config.json is damaged. Save or download it again."
    shutil.copytree(f"{folder}/vae", tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    for source, message in [wrong.pop("vae"), (str(tmp_path / "bare"), "components.vae=")]:
        assert message in SD3Policy(folder, components={"vae": source}).check()[0]
    for name, (source, message) in wrong.items():
        (error,) = SD3Policy(folder, components={name: source}).check()
        assert message in error, error
    with pytest.raises(ValueError, match="Set the parts of your pipeline before"):
        SD3Policy(families("sd3").pipeline(), components={"vae": folder})
    with pytest.raises(LoadError, match="components.veo"):
        SD3Policy(folder, components={"veo": folder}).load()
