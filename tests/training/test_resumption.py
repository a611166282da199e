"""``--resume``: the run goes on in its own folder, from the last checkpoint that is whole."""

import errno
import fcntl
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from commands import run
from helpers import read_csv, same

from lit_vgrpo.config.recipe import Command, read_recipe
from lit_vgrpo.errors import UserError
from lit_vgrpo.launch import recipe_cli
from lit_vgrpo.launch.build import build, build_recipe
from lit_vgrpo.system.paths import DRAFT_PREFIX, draft_of
from lit_vgrpo.training.folder import FolderLock, release
from lit_vgrpo.training.resume import last_good_checkpoint

pytestmark = pytest.mark.slow

CALLBACKS = "trainer.callbacks=[EMA,{class_path: RunCheckpoint, init_args: {every_n_iterations: 1}}]"


def start(recipe, folder, iterations, *more):
    return run([str(recipe), f"run_dir={folder}", f"trainer.max_epochs={iterations}", CALLBACKS, *more])


def end(folder):
    checkpoint = torch.load(Path(folder) / "checkpoints/last.ckpt", weights_only=True)
    average = next(state for key, state in checkpoint["callbacks"].items() if key.startswith("EMA"))
    return {**checkpoint["state_dict"], **{f"average.{key}": value for key, value in average["average"].items()}}


def logged(folder):
    rows = read_csv(Path(folder) / "metrics.csv")
    wanted = ("iteration", "step", "epoch", "reward/mean", "heldout/reward", "policy/loss", "cost/images")
    return [{key: row[key] for key in wanted} for row in rows]


def assert_same_end(first, second):
    assert same(end(first), end(second))
    assert logged(first) == logged(second)


def test_a_run_goes_on_in_its_folder_past_a_torn_checkpoint_and_ends_like_one_undisturbed(tiny_recipe, capsys):
    assert start(tiny_recipe, "whole", 4) == 0
    assert start(tiny_recipe, "half", 3) == 0
    config = Path("half/config.yaml").read_text()
    torn = Path("half/checkpoints/last.ckpt")
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size * 2 // 3])
    mine = [Path("half", name) for name in ("checkpoints/writing-notes.md", "writing-export/a", "report/2024_01.png")]
    for path in (draft_of(Path("half/checkpoints/last.ckpt")), *mine):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half a file")
    capsys.readouterr()
    assert run(["half/config.yaml", "--resume", "trainer.max_epochs=4"]) == 0
    said = capsys.readouterr()
    assert said.err.count("Skipped half/checkpoints/last.ckpt: it is truncated or not a checkpoint.") == 1
    assert "Continuing from half/checkpoints/previous.ckpt (2 iterations, 2 optimizer steps)." in said.out
    assert_same_end("whole", "half")
    assert Path("half/config.yaml").read_text() == config.replace("max_epochs: 3", "max_epochs: 4")
    assert all(path.read_bytes() == b"half a file" for path in mine)
    assert not [*Path("half").rglob(f"{DRAFT_PREFIX}*")]
    assert not Path("half-2").exists()
    summaries = [json.loads(Path(folder, "summary.json").read_text()) for folder in ("whole", "half")]
    for key in ("heldout_reward_start", "heldout_reward_end", "iterations", "images", "network_passes"):
        assert summaries[0][key] == summaries[1][key], key
    assert [entry["iteration"] for entry in summaries[1]["evaluations"]] == [0, 1, 2, 3, 4]


def test_a_finished_run_says_so_and_touches_nothing(tiny_recipe, capsys):
    assert start(tiny_recipe, "done", 2) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("done").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert run(["done/config.yaml", "--resume", "model.optimizer.lr=0.5"]) == 0  # a change that would have no effect
    assert capsys.readouterr().err == (
        "done is finished: 2 iterations, 2 optimizer steps, and trainer.max_epochs=2. "
        "To continue, add trainer.max_epochs=4.\n"
    )
    assert before == {path: path.stat().st_mtime_ns for path in Path("done").rglob("*") if path.is_file()}

    # Killed after its last iteration, before its last evaluation: what belongs to the end is made up for.
    ends = json.loads(Path("done/summary.json").read_text())
    Path("done/summary.json").unlink()
    assert run(["done/config.yaml", "--resume", "trainer.callbacks=[EMA]"]) == 0
    again = json.loads(Path("done/summary.json").read_text())
    for key in ("outcome", "iterations", "optimizer_steps", "heldout_reward_start", "heldout_reward_end", "images"):
        assert again[key] == ends[key], key


def test_without_a_checkpoint_it_starts_from_the_beginning(tiny_recipe, capsys):
    for _ in range(2):  # once without the folder, once with one that holds a recipe and a table alone
        assert start(tiny_recipe, "new", 1, "--resume") == 0
        assert "No checkpoint yet: starting from the beginning." in capsys.readouterr().out
        assert [row["iteration"] for row in logged("new")] == ["0", "1"]
        shutil.rmtree("new/checkpoints")
        Path("new/summary.json").unlink()  # as after a kill


def test_a_finished_run_without_checkpoints_is_not_overwritten(tiny_recipe, capsys):
    assert start(tiny_recipe, "new", 1) == 0
    shutil.rmtree("new/checkpoints")
    table = Path("new/metrics.csv").read_bytes()
    assert start(tiny_recipe, "new", 2, "--resume") == 2
    assert "new is finished, but its checkpoints are gone" in capsys.readouterr().err
    assert Path("new/metrics.csv").read_bytes() == table


def test_the_last_evaluation_is_in_the_table(tiny_recipe):
    assert start(tiny_recipe, "new", 1) == 0
    assert run(["new/config.yaml", "--resume", "trainer.max_epochs=2", "trainer.check_val_every_n_epoch=5"]) == 0
    evaluated = [row["epoch"] for row in logged("new") if row["heldout/reward"]]
    assert evaluated == ["", "0", "1"]  # the last is not of an iteration that check_val_every_n_epoch names


def test_resume_takes_no_other_checkpoint(tiny_recipe, capsys):
    assert start(tiny_recipe, "new", 1, "--resume", "ckpt_path=missing.ckpt") == 2
    assert capsys.readouterr().err == (
        "ckpt_path=missing.ckpt and --resume name two checkpoints. Leave one of them out.\n"
    )


def test_the_checkpoint_that_is_furthest_wins_whatever_its_age(ran_twice):
    shutil.copy("run/checkpoints/previous.ckpt", "run/checkpoints/epoch=0.ckpt")
    assert last_good_checkpoint(Path("run"), print).checkpoint == Path("run/checkpoints/last.ckpt")


def test_a_recipe_that_lies_in_no_run_folder(tiny_recipe, capsys):
    assert run([str(tiny_recipe), "--resume"]) == 2
    assert "Try: lightning run RUN_DIR/config.yaml --resume, or add run_dir=RUN_DIR." in capsys.readouterr().err


def test_a_folder_that_is_in_use(tiny_recipe, capsys):
    assert start(tiny_recipe, "run", 1, "data.heldout=null") == 0
    lock = FolderLock()
    lock.take(Path("run"))
    assert run(["run/config.yaml", "--resume", "trainer.max_epochs=2"]) == 2
    assert "Another process is still writing to run." in capsys.readouterr().err
    lock.release()
    Path("run/.lock").unlink()
    Path("run/.lock").mkdir()  # a disk that cannot be written to refuses the file in the same way
    assert run(["run/config.yaml", "--resume", "trainer.max_epochs=2"]) == 2
    assert "Cannot write to run: Is a directory." in capsys.readouterr().err
    Path("run/.lock").rmdir()
    assert run(["run/config.yaml", "--resume", "trainer.max_epochs=2"]) == 0


def test_the_folder_is_locked_before_its_checkpoints_are_read(tiny_recipe, monkeypatch):
    def read(*args):
        with pytest.raises(UserError, match="Another process is still writing"):
            FolderLock().take(Path("run"))
        raise UserError("read")

    monkeypatch.setattr(recipe_cli, "last_good_checkpoint", read)
    Path("run").mkdir()
    shutil.copy(tiny_recipe, "run/config.yaml")
    with pytest.raises(UserError, match="^read$"):
        build_recipe(read_recipe(Command.parse(["run/config.yaml"], resume=True)))
    FolderLock().take(Path("run"))  # given back after the error


def test_a_run_that_is_refused_leaves_the_folder_to_its_owner(tiny_recipe, capsys):
    first = FolderLock()
    Path("run").mkdir()
    first.take(Path("run"))
    assert run([str(tiny_recipe), "run_dir=run", "--resume"]) == 2
    assert "Another process is still writing to run." in capsys.readouterr().err
    assert os.listdir("run") == [".lock"]
    assert not first.has_moved(Path("run"))
    first.release()


def test_an_error_before_there_is_a_folder_deletes_nothing(tiny_recipe):
    place = tiny_recipe.parent / "only_a_lock"
    place.mkdir()
    os.chdir(place)
    Path(".lock").touch()
    assert run([str(tiny_recipe), "model.policy.lora_rank=2", "model.policy.train_only=['*']"]) == 2
    assert os.listdir() == [".lock"]
    os.chdir(tiny_recipe.parent)


def test_a_network_disk_that_locks_only_files_open_for_writing(tmp_path, monkeypatch, capsys):
    lock, locks = fcntl.flock, True

    def flock(handle, operation):
        if not locks or fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(handle, operation)

    monkeypatch.setattr("fcntl.flock", flock)
    first = FolderLock()
    first.take(tmp_path)
    with pytest.raises(UserError, match=r"If its machine is gone, run: rm .*/\.lock$"):
        FolderLock().take(tmp_path)
    first.release()
    locks = False
    FolderLock().take(tmp_path)
    assert "cannot be locked (Bad file descriptor). Start no second run in it." in capsys.readouterr().err
    release(tmp_path, [tmp_path])
    assert not tmp_path.exists()


def test_a_checkpoint_of_another_recipe_is_refused_with_what_differs(tiny_recipe, capfd):
    assert start(tiny_recipe, "run", 1, "data.heldout=null") == 0
    capfd.readouterr()
    checkpoint = "run/checkpoints/last.ckpt"
    changed = ["model.optimizer.lr=0.001", "model.policy.lora_rank=2", "trainer.callbacks=[{class_path: EMA, "]
    changed[-1] += "init_args: {decay: 0.5}}]"
    longer = ["run/config.yaml", "--resume", "trainer.max_epochs=2"]  # else the run is finished
    for words in (longer, ["run/config.yaml", f"ckpt_path={checkpoint}", "name=new"]):
        assert run([*words, *changed]) == 2
        first, *lines, last = capfd.readouterr().err.splitlines()
        assert first.endswith(f"{checkpoint}: it is a checkpoint of another recipe.")
        assert sorted(lines) == [
            "model.optimizer.lr: 0.0003 in the checkpoint, 0.001 now",
            "model.policy.lora_rank: null in the checkpoint, 2 now",
            "trainer.EMA.decay: 0.99 in the checkpoint, 0.5 now",
        ]
        assert "allow_changes=true" in last
    assert not Path("runs").exists()
    assert run(["run/config.yaml", "--resume", "trainer.max_epochs=2", changed[0], "allow_changes=true"]) == 0
    assert "Changed: model.optimizer.lr: 0.0003 in the checkpoint, 0.001 now" in capfd.readouterr().out
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["optimizer_states"][0]["param_groups"][0]["weight_decay"] == 1e-4
    assert saved["lit_vgrpo_recipe"]["model"]["optimizer"]["lr"] == 1e-3


def test_what_no_weight_depends_on_may_differ(tiny_recipe, ran_twice):
    free = [
        *("trainer.max_epochs=9", "trainer.strategy=ddp", "trainer.callbacks=[EMA,SampleGrid]"),
        *("trainer.precision=32", "model.gradient_clip_algorithm=norm", "model.advantage_std=global"),
        *("name=other", "data.micro_batch_size=1", "data.eval_batch_size=1", "model.rollout_batch_size=1"),
        *("model.policy.decode_batch_size=1", "model.policy.gradient_checkpointing=true", "data.heldout_limit=1"),
        *("model.evaluate_at_start=false", "model.evaluation={steps: 1}", "seed_everything=7"),
        *("model.optimizer={lr: 3.0e-4, weight_decay: 0.0001}", "model.objective.clip=null"),
    ]
    build([str(tiny_recipe), "ckpt_path=run/checkpoints/previous.ckpt", *free], make_folder=False)


@pytest.fixture(scope="module")
def two_iterations(tmp_path_factory, tiny_sd3):
    from conftest import tiny_recipe_of

    folder = tmp_path_factory.mktemp("two")
    recipe = folder / "tiny.yaml"
    recipe.write_text(tiny_recipe_of(tiny_sd3))
    assert start(recipe, folder / "run", 2, "data.heldout=null") == 0
    return folder / "run"


@pytest.fixture
def ran_twice(two_iterations, here):
    """The folder ``run`` in an empty working directory: two iterations."""
    shutil.copytree(two_iterations, "run")


SECRETS = {"LR": "0.0004", "WHO": "hunter2", "PROMPTS": "hunter2.txt"}
FROM_ENVIRONMENT = ("model.optimizer.lr=${oc.env:LR}", "name=of-${oc.env:WHO}", "data.train=${oc.env:PROMPTS}")


def test_what_comes_from_the_environment_is_not_saved_and_is_read_anew(tiny_recipe, capfd, monkeypatch):
    for name in ("hunter2.txt", "other.txt"):
        Path(name).write_text(f"a red circle\na blue square\n{name}\n")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    assert start(tiny_recipe, "run", 1, "data.heldout=null", *FROM_ENVIRONMENT) == 0
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["model"]["optimizer"]["lr"] == "${oc.env:LR}"
    assert config["name"] == "of-${oc.env:WHO}"
    assert config["data"]["train"] == "${oc.env:PROMPTS}"
    held = [file for file in Path("run").rglob("*") if file.is_file() and b"hunter2" in file.read_bytes()]
    assert not held
    again = ["run/config.yaml", "--resume", "trainer.max_epochs=2"]
    monkeypatch.setenv("PROMPTS", "other.txt")
    capfd.readouterr()
    assert run(again) == 2
    changed = [line for line in capfd.readouterr().err.splitlines() if " in the checkpoint, " in line]
    hashed = r"\$\{oc.env:PROMPTS\} \(value #\w{6}\)"
    assert re.fullmatch(rf"data.train: {hashed} in the checkpoint, {hashed} now", changed[0])
    monkeypatch.delenv("PROMPTS")
    assert run(again) == 2
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["run/config.yaml: data.train: the variable PROMPTS is not set. Set it: export PROMPTS=..."]
    monkeypatch.setenv("PROMPTS", SECRETS["PROMPTS"])
    assert run([*again, "model.optimizer.lr=0.0004"]) == 0  # the same value, written out
