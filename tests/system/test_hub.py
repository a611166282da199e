import pytest
from huggingface_hub import constants

from lit_vgrpo.system.hub import explain_unloadable, local_folder

NAME = "nobody/nothing-of-this-name"


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """An empty cache, and no requests to the hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_folder_without_the_file_or_no_folder_is_told(tmp_path):
    assert "has no model_index.json" in explain_unloadable(str(tmp_path), "model_index.json", "key")
    for path in (str(tmp_path / "no"), "./no", "~/no-such-folder", "shipped:no", "a/b/c"):
        message = explain_unloadable(path, "model_index.json", "key")
        assert "is not a folder. Set key to a folder with model_index.json" in message
    assert "leaves the shipped" in explain_unloadable("shipped:../..", "x", "key")


def test_a_hub_name_is_no_path_unless_a_folder_has_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_folder("some/model") is None
    assert local_folder("gpt2") is None
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert local_folder("some/model").is_dir()


def test_offline_is_honoured_and_says_what_to_run(offline):
    assert explain_unloadable(NAME, "config.json", "model.policy.checkpoint") == (
        f"Cannot load {NAME}: not in the local cache and HF_HUB_OFFLINE is set. "
        f"Run: hf download {NAME}, or set model.policy.checkpoint=/a/local/folder."
    )


def test_what_is_cached_can_be_loaded(offline):
    snapshot = offline / f"models--{NAME.replace('/', '--')}"
    (snapshot / "refs").mkdir(parents=True)
    (snapshot / "refs" / "main").write_text("0" * 40)
    (snapshot / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (snapshot / "snapshots" / ("0" * 40) / "config.json").touch()
    assert explain_unloadable(NAME, "config.json", "key") is None
    assert explain_unloadable(NAME, "other.json", "key") is not None


def test_a_hub_that_cannot_be_reached_is_one_line(offline, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    message = explain_unloadable(NAME, "config.json", "key")
    said = f"Cannot load {NAME}: not in the local cache and asking the hub for config.json ended with "
    assert message.startswith(said)
