import shutil

import httpx
import pytest
import torch
from fake_hub import FakeHub, Pages
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file, save_file
from transformers import CLIPModel

from lit_vgrpo.system import hub
from lit_vgrpo.system.hub import (
    LoadError,
    download_small_files,
    explain_unloadable,
    headers_only,
    load_network,
    loading,
    local_folder,
    tokenizer_error,
)

NAME = "nobody/nothing-of-this-name"


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty cache, and no requests to the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_folder_without_the_file_or_no_folder_is_told(tmp_path):
    assert "has no model_index.json" in explain_unloadable(str(tmp_path), "model_index.json", "key")
    for path in (str(tmp_path / "no"), "./no", "~/no-such-folder", "a/b/c"):
        message = explain_unloadable(path, "model_index.json", "key")
        assert "is not a folder. Set key to a folder with model_index.json" in message
    assert "leaves the shipped" in explain_unloadable("shipped:../..", "x", "key")


def test_a_hub_that_does_not_answer_is_left_soon(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.1)
    monkeypatch.setattr(Pages, "about", lambda page, name: page.server.owner.closing.wait(3) or page.refuse(404))
    with FakeHub() as server:
        server.use(monkeypatch, tmp_path)
        with pytest.raises(Exception, match="timed out"):
            download_small_files("owner/name")


def test_a_hub_name_is_no_path_unless_a_folder_has_that_name(here):
    assert local_folder("some/model") is None
    assert local_folder("gpt2") is None
    (here / "some" / "model").mkdir(parents=True)
    assert local_folder("some/model").is_dir()


def test_offline_is_honoured_and_says_what_to_run(offline):
    assert explain_unloadable(NAME, "config.json", "model.policy.checkpoint") == (
        f"Cannot load {NAME}: not in the local cache and HF_HUB_OFFLINE is set. "
        f"Run: hf download {NAME}, or set model.policy.checkpoint=/a/local/folder."
    )


def test_a_gated_model_names_its_licence(offline, monkeypatch):
    def refuse(url, **options):
        raise GatedRepoError("403", response=httpx.Response(403, request=httpx.Request("HEAD", url)))

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    line = f"you must accept its licence on the hub, {constants.ENDPOINT}/{NAME}, and log in. Run: hf download {NAME},"
    assert line in explain_unloadable(NAME, "config.json", "key")


def test_what_is_cached_can_be_loaded(offline):
    snapshot = offline / f"models--{NAME.replace('/', '--')}"
    (snapshot / "refs").mkdir(parents=True)
    (snapshot / "refs" / "main").write_text("0" * 40)
    (snapshot / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (snapshot / "snapshots" / ("0" * 40) / "config.json").touch()
    assert explain_unloadable(NAME, "config.json", "key") is None
    assert explain_unloadable(NAME, "other.json", "key") is not None


def test_weights_that_are_not_downloaded_yet_are_no_finding(offline, tiny_clip):
    snapshot = offline / f"models--{NAME.replace('/', '--')}"
    folder = snapshot / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_clip, folder)
    (snapshot / "refs").mkdir()
    (snapshot / "refs" / "main").write_text("0" * 40)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").touch()
    weights = load_file(folder / "model-00001-of-00002.safetensors")
    del weights["logit_scale"]
    save_file(weights, folder / "model-00001-of-00002.safetensors")
    with headers_only():
        load_network(CLIPModel, NAME, "")
        with pytest.raises(LoadError, match="1 weight missing, such as logit_scale"):
            load_network(CLIPModel, str(folder), "")


@pytest.mark.parametrize("size", [2**60, 2**62])
def test_too_little_memory_is_not_called_damage(size):
    """As torch's allocator, numpy and the system say it, also as the cause of another error."""
    with (
        pytest.raises(LoadError, match=r"^Cannot load x: out of memory \(.*\)\. Free memory, raise its limit"),
        loading("x", "y"),
    ):
        torch.empty(size, dtype=torch.uint8)
    error = RuntimeError("Unable to load weights")
    error.__cause__ = OSError(12, "Cannot allocate memory")
    with pytest.raises(LoadError, match="out of memory"), loading("x", "Download or save it again."):
        raise error
    with pytest.raises(LoadError, match="Free memory"), loading("x", "Download or save it again."):
        raise RuntimeError("can't start new thread")
    with pytest.raises(LoadError, match=r"^Cannot load x: no memory of it\. y$"), loading("x", "y"):
        raise ValueError("no memory of it")


def words(vocabulary):
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_a_tokenizer_knows_its_encoders_words():
    """Encoders have a few embeddings more than words, never fewer."""
    known = words(["<unk>", *(letter * 3 for letter in "abcdefghijklmnopqrstuvwxyz")])
    assert [tokenizer_error(known, size) for size in (27, 28, 30)] == [None] * 3
    assert tokenizer_error(known, 26) == "has 27 tokens, but its encoder 26"
    assert tokenizer_error(known, 31) == "has 27 tokens, but its encoder 31"
    known.add_tokens(["<new>"])
    assert tokenizer_error(known, 27) is None
    known.model_max_length = 0
    assert tokenizer_error(known, 27) is not None
    unread = words(["<unk>", *(letter * 3 + "\u00a0" for letter in "abcdefghijklmnopqrstuvwxyz")])
    assert tokenizer_error(unread, 27) == "finds no word of its own vocabulary, as without its merges"
    assert tokenizer_error(words(["<unk>", "aaa\u00a0", "b"]), 3) is None  # too few to tell


def test_a_hub_that_cannot_be_reached_is_one_line(offline, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    message = explain_unloadable(NAME, "config.json", "key")
    said = f"Cannot load {NAME}: not in the local cache and asking the hub for config.json ended with "
    assert message.startswith(said)
