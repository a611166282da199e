"""The ways in which a pipeline's files may lie: variants, revisions, the hub's cache, old formats, one file."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from helpers import make_data, make_module, make_trainer
from huggingface_hub import constants
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file

from lit_vgrpo.apps.memory.meta import policy_on_meta
from lit_vgrpo.apps.report.model_card import from_pretrained
from lit_vgrpo.policies import FluxPolicy, SD3Policy, SDXLPolicy, UNetPolicy
from lit_vgrpo.policies.pipeline_folder import WEIGHTS
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.strategies import scaling_error

COMMIT = "a" * 40


def as_variant(folder, to, variant="fp16"):
    shutil.copytree(folder, to)
    for file in list(to.rglob("*.safetensors")):
        file.rename(file.with_suffix(f".{variant}.safetensors"))
    return to


def same_weights(policy, other):
    pairs = zip(policy.network.parameters(), other.network.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


# --- variants ---------------------------------------------------------------------------------------------------------


def test_a_variant_is_named_by_its_option(families, tmp_path):
    plain = families("sdxl")
    folder = as_variant(plain.folder, tmp_path / "half")
    (error,) = SDXLPolicy(str(folder)).check()
    assert error.startswith(f"model.policy.checkpoint={folder} has its ")
    assert error.endswith(" only as fp16. Set model.policy.variant=fp16.")
    policy = SDXLPolicy(str(folder), variant="fp16")
    assert policy.check() == []
    assert same_weights(policy.load(), plain.shared)


def test_a_variant_that_is_not_there_is_one_line(families, tmp_path):
    folder = families("sdxl").folder
    none = f"model.policy.variant=bf16: {folder} has no such weights. Leave it out."
    assert SDXLPolicy(str(folder), variant="bf16").check() == [none]
    half = SDXLPolicy(str(as_variant(folder, tmp_path / "half")), variant="bf16")
    assert half.check()[0].endswith("Use fp16, or leave it out.")


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("model.safetensors", None),
        ("pytorch_model.bin", None),
        ("diffusion_pytorch_model-00001-of-00002.safetensors", None),
        ("diffusion_pytorch_model.fp16.safetensors", "fp16"),
        ("diffusion_pytorch_model.non_ema.bin", "non_ema"),
        ("model.fp16-00001-of-00002.safetensors", "fp16"),
        ("model-00001-of-00002.fp16.safetensors", "fp16"),
    ],
)
def test_variants_are_read_from_names(name, variant):
    match = WEIGHTS.fullmatch(name)
    assert (match[1] or match[2]) == variant


@pytest.mark.parametrize("name", ["openvino_model.bin", "model.onnx", "model.safetensors.index.fp16.json"])
def test_other_files_are_no_weights(name):
    assert WEIGHTS.fullmatch(name) is None


# --- other files ------------------------------------------------------------------------------------------------------


def test_weights_of_the_older_format_load_silently(families, tmp_path, capfd):
    plain = families("unet_eps")
    folder = shutil.copytree(plain.folder, tmp_path / "old")
    for file in list(folder.rglob("*.safetensors")):
        name = file.name.replace("diffusion_pytorch_model", "model")
        prefix = "diffusion_" if "diffusion" in file.name else ""
        torch.save(load_file(file), file.with_name(f"{prefix}pytorch_{name}").with_suffix(".bin"))
        file.unlink()
    capfd.readouterr()
    assert same_weights(UNetPolicy(str(folder)).load(), plain.shared)
    assert capfd.readouterr().err == ""


def test_one_file_is_told_how_to_become_a_folder(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    (error,) = SDXLPolicy(str(file)).check()
    assert error.startswith(f"model.policy.checkpoint={file} is a single file, not a pipeline folder. Convert it: ")
    call = f'diffusers.StableDiffusionXLPipeline.from_single_file("{file}").save_pretrained("DIR")'
    assert error.endswith(f"python -c 'import diffusers; {call}', then set model.policy.checkpoint=DIR.")


# --- the hub's cache --------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """``cached(folder, name)``: a pipeline folder as a repository of that name in the hub's cache, and no hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(folder, name, branch="main"):
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / branch).write_text(COMMIT)
        shutil.copytree(folder, repository / "snapshots" / COMMIT)
        return name

    return put


def test_a_cached_pipeline_without_t5_loads_silently(families, cached, capfd):
    """Components that are null in its index must be named to diffusers, as for a folder."""
    plain = families("sd3")
    policy = SD3Policy(cached(plain.folder, "some/sd3"), **plain.options)
    assert policy.check() == []
    capfd.readouterr()
    assert same_weights(policy.load(), plain.shared)
    assert capfd.readouterr().err == ""
    line = from_pretrained(policy, "some/sd3", policy.dtype)
    assert 'from_pretrained("some/sd3", text_encoder_3=None, tokenizer_3=None, torch_dtype=torch.float32)' in line


def test_a_cached_pipeline_of_another_family_is_one_line(families, cached):
    policy = UNetPolicy(cached(families("sdxl").folder, "some/sdxl"))
    (error,) = policy.check()
    assert error.endswith(
        "is a StableDiffusionXLPipeline, UNetPolicy needs StableDiffusionPipeline. Use class_path: SDXLPolicy."
    )
    with pytest.raises(LoadError, match="Use class_path: SDXLPolicy"):
        policy.load()


def test_a_variant_in_the_cache_is_seen_once_all_is_there(families, cached, tmp_path):
    name = cached(as_variant(families("sdxl").folder, tmp_path / "half"), "some/half")
    # until then the hub may have other files
    assert SDXLPolicy(name).check() == []
    with pytest.raises(LoadError, match=r"only as fp16. Set model.policy.variant=fp16\.$"):
        SDXLPolicy(name).load()
    policy = SDXLPolicy(name, variant="fp16").load()
    assert f'("{name}", variant="fp16", torch_dtype' in from_pretrained(policy, name, policy.dtype)


def test_a_revision_is_looked_for_by_its_name(families, cached):
    plain = families("sdxl")
    name = cached(plain.folder, "some/model", branch="v2")
    (error,) = SDXLPolicy(name).check()
    assert error.startswith(f"Cannot load {name}: not in the local cache")
    assert "hf download some/model --revision v3, or" in SDXLPolicy(name, revision="v3").check()[0]
    for revision in ("v2", COMMIT):
        assert SDXLPolicy(name, revision=revision).check() == []
    policy = SDXLPolicy(name, revision="v2")
    assert policy_on_meta(policy).device.type == "meta"
    assert same_weights(policy.load(), plain.shared)
    assert f'("{name}", revision="v2", torch_dtype' in from_pretrained(policy, name, policy.dtype)


def test_whether_guidance_is_an_input_is_that_of_the_revision(families, cached):
    name = cached(families("flux_cfg").folder, "some/schnell", branch="v2")
    assert FluxPolicy(name).embeds_guidance  # not known
    assert not FluxPolicy(name, revision="v2").embeds_guidance


def test_a_folder_has_no_revisions(families):
    folder = families("sdxl").folder
    (error,) = SDXLPolicy(str(folder), revision="v2").check()
    assert error == f"model.policy.revision=v2 has no effect on {folder}, which is a folder. Leave it out."


@pytest.fixture
def hub_with_index(tmp_path, monkeypatch):
    """``hub_with_index(text)``: a hub on this machine whose every repository has this index and nothing else."""
    servers = []

    def start(text):
        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.answer(b"")

            def do_GET(self):
                self.answer(text.encode())

            def answer(self, body):
                found = self.path.endswith("/model_index.json")
                self.send_response(200 if found else 404)
                for key, value in {"ETag": '"1"', "X-Repo-Commit": COMMIT, "Content-Length": len(text)}.items():
                    self.send_header(key, str(value) if found or key != "Content-Length" else "0")
                self.end_headers()
                self.wfile.write(body if found else b"")

            def log_message(self, *args):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_family_of_a_repository_is_known_from_its_index_alone(hub_with_index, capfd):
    hub_with_index(json.dumps({"_class_name": "FluxFillPipeline"}))
    said = (
        "model.policy.checkpoint=some/model is a FluxFillPipeline, FluxPolicy needs FluxPipeline. Use a FluxPipeline."
    )
    assert FluxPolicy("some/model").check() == [said]
    assert capfd.readouterr().err == ""


# --- float16 ----------------------------------------------------------------------------------------------------------


def test_float16_keeps_in_float32_what_would_overflow(families):
    """T5's second layer of each block; and the prediction is that of float32, to the precision of the type."""
    plain = families("sd3_t5")
    policy = plain.load(dtype="float16", lora_rank=2)
    types = {name.split(".")[-2]: p.dtype for name, p in policy.pipeline.text_encoder_3.named_parameters()}
    assert (types["wo"], types["q"]) == (torch.float32, torch.float16)
    assert {p.dtype for p in policy.pipeline.vae.parameters()} == {torch.float32}
    noise = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = (p(noise, torch.tensor([0.5]), p.encode(["dogs"])) for p in (policy, plain.shared))
    assert 0 < (found - expected).norm() / expected.norm() < 0.01


def test_float16_is_not_trained_without_a_gradient_scaler(tiny_sd3, tmp_path):
    module = make_module(tiny_sd3, policy_options={"dtype": "float16", "lora_rank": 2})
    with pytest.raises(ValueError, match=r"dtype=float16: gradients underflow, .* trainer.precision=16-mixed, which"):
        make_trainer(tmp_path).fit(module, datamodule=make_data())
    assert not module.policy.loaded
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    assert scaling_error(SingleDeviceStrategy("cpu", precision_plugin=scaled), module.policy) is None
    assert scaling_error(SingleDeviceStrategy("cpu"), SD3Policy("any", dtype="bfloat16")) is None
