"""Run folders: never an old one, never the same twice."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import run

from lit_vgrpo.system.process import is_first_process
from lit_vgrpo.training.folder import FolderLock, RunFolder, release, reserve


def test_an_old_file_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "demo").write_text("mine")
    assert reserve(tmp_path / "demo").name == "demo-2"
    assert (tmp_path / "demo").read_text() == "mine"


def no_locks(handle, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_folder_in_which_a_run_only_started_is_free(tmp_path, monkeypatch):
    folder = tmp_path / "demo"
    (folder / "tensorboard").mkdir(parents=True)
    recipe = folder / "config.yaml"
    recipe.write_text("model: {}\n")
    assert reserve(folder).name == "demo-2"  # somebody's file
    recipe.write_text("model: {}\nfound_in: [.]\n")
    lock = FolderLock()
    lock.take(folder)
    assert reserve(folder).name == "demo-3"  # it is about to train
    lock.release()
    assert reserve(folder) == folder
    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", no_locks)
        assert reserve(folder).name == "demo-4"  # nobody can tell
    (folder / "metrics.csv").touch()
    assert reserve(folder).name == "demo-5"
    keeper = RunFolder()
    keeper.write_recipe(folder, "new", is_changed=True)
    assert recipe.read_text() == "new"


def test_many_at_once_get_different_folders(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(lambda _: reserve(tmp_path / "runs" / "demo"), range(64)))
    assert sorted(folder.name for folder in folders) == sorted(["demo", *(f"demo-{n}" for n in range(2, 65))])


def test_release_takes_only_an_empty_folder(tmp_path):
    empty, full = reserve(tmp_path / "empty"), reserve(tmp_path / "full")
    (full / "file").write_text("")
    release(empty)
    release(full)
    assert not empty.exists()
    assert full.exists()


@pytest.mark.parametrize("word", ["model.policy.checkpoint=/none", "trainer.devices=0", "ckpt_path=none.ckpt"])
def test_a_run_that_is_refused_leaves_no_folder(tiny_recipe, capsys, word):
    assert run([str(tiny_recipe), word]) == 2
    assert run([str(tiny_recipe), word, "run_dir=a/b/c"]) == 2
    assert [path.name for path in tiny_recipe.parent.iterdir()] == [tiny_recipe.name]


def test_is_first_process(monkeypatch):
    for key in ("RANK", "SLURM_PROCID", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(key, raising=False)
    assert is_first_process()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not is_first_process()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert is_first_process()
    monkeypatch.setenv("NODE_RANK", "1")
    assert not is_first_process()
