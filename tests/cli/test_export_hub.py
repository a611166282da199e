"""``lightning export --to hub:NAME``: what a small hub on loopback receives is what was listed and confirmed."""

import io
from pathlib import Path

import pytest
from commands import export
from fake_hub import FakeHub
from saved_runs import assert_one_line, folder_with, train

TO = "--to=hub:somebody/shapes"


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_sd3):
    """A folder with a run, and the working directory of this file's tests."""
    from conftest import tiny_recipe_of

    with folder_with(tmp_path_factory.mktemp("hub"), tiny_recipe_of(tiny_sd3), tiny_sd3, []):
        train("trainer.max_epochs=1", "trainer.enable_progress_bar=false")
        yield


@pytest.fixture
def hub(place, monkeypatch):
    from huggingface_hub import constants

    with FakeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "writes")
        yield hub


@pytest.mark.slow
def test_the_hub_receives_exactly_the_files_that_were_listed(hub, capsys):
    assert export(["runs/tiny", TO, "--yes"]) == 0
    out = capsys.readouterr().out
    folder = Path("exports/shapes")
    written = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    received = hub.repositories["somebody/shapes"]
    assert received == {".gitattributes": b"", **{name: path.read_bytes() for name, path in written.items()}}
    assert any(name.endswith(".safetensors") for name in written)
    listed = [line.split()[1] for line in out.splitlines() if line.startswith("   ")]
    assert sorted(listed) == sorted(written)
    assert hub.private == {"somebody/shapes": True}
    loads = 'from_pretrained("somebody/shapes"'
    assert loads in received["README.md"].decode()
    assert loads in out

    # Again: the same files are replaced, from a folder next to the first.
    assert export(["runs/tiny", TO, "--yes", "--public"]) == 0
    assert Path("exports/shapes-2/README.md").exists()
    assert hub.private == {"somebody/shapes": True}  # one that exists stays as it is


def test_nothing_is_uploaded_that_was_not_confirmed(hub, monkeypatch, capsys):
    assert_one_line(export, ["runs/tiny", TO], capsys, "stdin is not a terminal. Add --yes.")
    answers = io.StringIO("n\n")
    answers.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", answers)
    assert export(["runs/tiny", "--to=hub:somebody/asked"]) == 130
    out, err = capsys.readouterr()
    assert "README.md" in out
    assert "Upload these files?" in out
    assert err == "Nothing was uploaded. The export is in exports/asked.\n"
    assert Path("exports/asked/README.md").exists()
    assert hub.changes == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "to", "line"),
    [
        ("", TO, "Not logged in to the hub. Run hf auth login, or set HF_TOKEN"),
        ("wrong", TO, "Cannot upload to somebody/shapes: "),
        ("reads", "--to=hub:somebody/new", "Cannot upload to somebody/new: "),
        ("writes", "--to=hub:shapes", "hub:shapes is not a repository name. Use hub:owner/name."),
    ],
)
def test_what_cannot_be_uploaded_is_one_line(hub, monkeypatch, capsys, token, to, line):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "no_such_file")
    assert export(["runs/tiny", to, "--yes"]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert hub.changes == []
