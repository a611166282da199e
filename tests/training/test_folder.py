"""Run folders: never an old one, never the same twice."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import run

from lit_vgrpo.config.recipe import Command, read_recipe
from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.build import build_recipe
from lit_vgrpo.system.process import is_first_process
from lit_vgrpo.training.folder import LOCK, FolderLock, RunFolder, release, reserve


def take(base, is_resumed=False):
    """The folder that a run takes and leaves at once."""
    lock = FolderLock()
    folder, _ = reserve(base, lock, is_resumed)
    lock.release()
    return folder


def test_an_old_file_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "demo").write_text("mine")
    assert take(tmp_path / "demo").name == "demo-2"
    assert (tmp_path / "demo").read_text() == "mine"


@pytest.mark.parametrize("holds", [None, "lost+found", LOCK])
def test_an_empty_folder_is_free_also_behind_a_link(tmp_path, holds):
    place = tmp_path / "disk"
    place.mkdir()
    (tmp_path / "demo").symlink_to(place)
    if holds is not None:
        (place / holds).touch()
    lock = FolderLock()
    folder, made = reserve(tmp_path / "demo", lock)
    assert (folder.name, made) == ("demo", [])
    assert take(tmp_path / "demo").name == "demo-2"
    release(folder, made)
    lock.release()
    assert place.is_dir(), "a refused run leaves a folder that it did not create"
    (place / "mine").touch()
    assert take(tmp_path / "demo", is_resumed=True).name == "demo"
    (place / LOCK).unlink()
    assert take(tmp_path / "demo").name == "demo-2"
    assert not (place / LOCK).exists()


def test_a_run_folder_that_cannot_be_created_is_one_line(tmp_path):
    gone, file = tmp_path / "gone", tmp_path / "file"
    gone.symlink_to("nowhere")
    file.touch()
    lost = f"{gone} is a link to nowhere, which does not exist"
    for base, is_resumed, why in (
        (gone, True, lost),
        (gone / "demo", True, lost),
        (gone / "demo", False, lost),
        (file, True, "File exists"),
        (file / "demo", False, "Not a directory"),
    ):
        with pytest.raises(UserError, match=f"^Cannot create the run folder {base}: {why}. Set run_dir="):
            take(base, is_resumed)
    assert take(gone).name == "gone-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "gone", "gone-2"]


def no_locks(handle, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_a_folder_in_which_a_run_only_started_is_free(tmp_path, monkeypatch):
    folder = tmp_path / "demo"
    (folder / "tensorboard").mkdir(parents=True)
    recipe = folder / "config.yaml"
    recipe.write_text("model: {}\n")
    assert take(folder).name == "demo-2"  # somebody's file
    recipe.write_text("model: {}\nfound_in: [.]\n")
    lock = FolderLock()
    lock.take(folder)
    assert take(folder).name == "demo-2"  # it is about to train
    lock.release()
    assert take(folder) == folder
    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", no_locks)
        assert take(folder).name == "demo-3"  # nobody can tell
        assert take(tmp_path / "new").name == "new"  # the first to create the lock file
        assert take(tmp_path / "new").name == "new-2"
    (folder / "metrics.csv").touch()
    assert take(folder).name == "demo-2"
    keeper = RunFolder()
    keeper.write_recipe(folder, "new", is_changed=True)
    assert recipe.read_text() == "new"


@pytest.mark.parametrize("exists", [False, True])
def test_many_at_once_get_different_folders(tmp_path, exists):
    if exists:
        (tmp_path / "runs" / "demo").mkdir(parents=True)
    locks = [FolderLock() for _ in range(64)]
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(lambda lock: reserve(tmp_path / "runs" / "demo", lock)[0], locks))
    assert sorted(folder.name for folder in folders) == sorted(["demo", *(f"demo-{n}" for n in range(2, 65))])


TAKES_AND_WAITS = """
import sys
from pathlib import Path
from lit_vgrpo.training.folder import FolderLock, reserve
lock = FolderLock()
print("ready", flush=True)
for base in sys.stdin.readline().split():
    print(reserve(Path(base), lock)[0].name, flush=True)
    lock = FolderLock()
sys.stdin.read()
"""


@pytest.mark.slow
def test_two_processes_at_once_get_different_folders(tmp_path):
    bases = [tmp_path / f"runs-{number}" / "demo" for number in range(200)]
    for base in bases[::2]:
        base.mkdir(parents=True)
    command = [sys.executable, "-c", TAKES_AND_WAITS]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write(" ".join(map(str, bases)) + "\n")
        process.stdin.flush()
    names = [[process.stdout.readline().strip() for _ in bases] for process in both]
    for process in both:
        process.communicate()
    assert [sorted(pair) for pair in zip(*names, strict=True)] == [["demo", "demo-2"]] * len(bases)


def test_release_takes_only_an_empty_folder(tmp_path):
    empty, full = (reserve(tmp_path / name, FolderLock()) for name in ("empty", "full"))
    (full[0] / "file").write_text("")
    release(*empty)
    release(*full)
    assert not empty[0].exists()
    assert full[0].exists()


@pytest.mark.parametrize("word", ["model.policy.checkpoint=/none", "trainer.devices=0", "ckpt_path=none.ckpt"])
def test_a_run_that_is_refused_leaves_no_folder(tiny_recipe, capsys, word):
    assert run([str(tiny_recipe), word]) == 2
    assert run([str(tiny_recipe), word, "run_dir=a/b/c"]) == 2
    assert [path.name for path in tiny_recipe.parent.iterdir()] == [tiny_recipe.name]


def test_a_recipe_behind_a_linked_folder_finds_its_files(tiny_recipe, tmp_path_factory, monkeypatch):
    disk, elsewhere = tmp_path_factory.mktemp("disk"), tmp_path_factory.mktemp("elsewhere")
    Path("runs").symlink_to(disk)
    Path("mine.txt").write_text("a cat")
    cli = build_recipe(read_recipe(Command.parse([str(tiny_recipe), "data.train=mine.txt"])))
    cli.save_recipe()
    cli.lock.release()
    monkeypatch.chdir(elsewhere)
    for folder in (cli.folder, disk / "tiny"):
        assert read_recipe(Command.parse([str(folder)])).values["data"]["train"] == str(tiny_recipe.parent / "mine.txt")


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
