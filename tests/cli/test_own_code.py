"""Errors in a user's own code and files end in a line that says where, before or after training."""

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from commands import check, evaluate, run, score
from processes import run_command

FILES = {
    "no_colon.py": "def reward(images, prompts, rows)\n    return images.mean()\n",
    "raises.py": "import torch\n\nraise RuntimeError('out of luck')\n",
    "needy.py": "import os\n\nimport no_such_package\n",
    "leaves.py": "raise SystemExit('bye')\n",
    "rewards_of_mine.py": """
import sys
import torch
from lit_vgrpo.rewards import Reward

class Leaves(Reward):
    name = "leaves"
    def __call__(self, images, prompts, rows):
        sys.exit("bye")

class Fragile(Reward):
    name = "fragile"
    def __init__(self):
        raise KeyError("no such key")
    def __call__(self, images, prompts, rows):
        return images.mean(dim=(1, 2, 3))

class TrainsOnly(Reward):
    name = "trains_only"
    def __call__(self, images, prompts, rows):
        self.asked = getattr(self, "asked", 0) + (prompts[0] == "a blue square")
        fails = prompts[0] == "a blue square" and self.asked > 1
        return torch.full((len(images),), float("nan")) if fails else images.mean(dim=(1, 2, 3))

class Unready(Leaves):
    def check(self):
        raise MemoryError("none left")
""",
    "guests.py": """
images_seen = 0

def hungry(images, prompts):
    bytearray(2**62)

def greedy(images, prompts, rows):
    images.sub_(images.mean()).div_(9)
    for row in rows:
        del row["colour"], row["shape"]
    prompts.clear()
    if len(rows) > 1:
        raise OSError("one image at a time")
    return images.square().mean((1, 2, 3))

def stops(images, prompts):
    global images_seen
    images_seen += len(images)
    if images_seen > 2:
        raise KeyboardInterrupt
    return images.mean((1, 2, 3))
""",
    "wanders.py": """
import os
import lightning as L
from lit_vgrpo.rewards import Reward

def wander():
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")

class Wanders(Reward):
    name = "wanders"
    def __init__(self):
        wander()
    def load(self, *args, **kwargs):
        wander()
    def __call__(self, images, prompts, rows):
        wander()
        return images.mean(dim=(1, 2, 3))

class WandersToo(L.Callback):
    def on_train_batch_end(self, *args):
        wander()
""",
    "numbers.jsonl": '{"prompt": "a red circle", "rewards": 3}\n',
    "train.txt": "a red circle\na green triangle\n",
    "heldout.txt": "a blue square\n",
}


EARLY = "{class_path: EarlyStopping, init_args: {monitor: %s}}"
TWO_STOPS = f"trainer.callbacks=[{EARLY % 'heldout/reward'},{EARLY % 'heldout_reward'}]"
NOTHING = "trainer.callbacks={class_path: ModelCheckpoint, init_args: {monitor: nothing}}"


@pytest.fixture
def recipe(tiny_recipe):
    for name, text in FILES.items():
        Path(name).write_text(text)
    return str(tiny_recipe)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.reward=no_colon.X"], "no_colon.py:1: SyntaxError: expected ':'."),
        (["model.reward=raises.X"], "raises.py:3: RuntimeError: out of luck."),
        (["model.reward=needy.X"], "needy.py:3: ModuleNotFoundError: No module named 'no_such_package'"),
        (["model.reward=leaves.X"], "leaves.py:1: SystemExit: bye."),
        (["model.reward=rewards_of_mine.Fragle"], "'rewards_of_mine' has no attribute 'Fragle'. Did you mean Fragile?"),
        (["model.reward=guests.hungry"], "guests.hungry names no class. For a function, write model.reward.python="),
        (["model.reward={python:guests:hungry}"], "names no class. For a function, write model.reward.python="),
        (["model.reward=guests.py:hungry"], "names no class. For a function, write model.reward.python=guests:hungry."),
        (["model.reward.python=guests.py:hungry"], " is not a package). Leave out .py: guests:hungry"),
        (["model.reward=rewards_of_mine.Fragile"], "rewards_of_mine.py:14: KeyError: 'no such key'."),
        (["model.reward=rewards_of_mine.Unready"], "rewards_of_mine.py:27: MemoryError: none left."),
        (["model.reward={python: 'leaves:reward'}"], "leaves:reward cannot be imported (leaves.py:1: SystemExit: bye)"),
        (["trainer.callbacks={class_path: Export, init_args: {folder: ..}}"], "folder=.. is not a separate folder. "),
        ([TWO_STOPS], "callbacks[1].monitor=heldout_reward: runs log no metric with this name. Did you mean heldout/"),
        ([NOTHING], "trainer.callbacks[0].monitor=nothing: runs log no metric with this name. Use one of: heldout/"),
        (["model.reward=[]"], "model.reward.rewards=[] is empty. Name at least one reward, such as PickScore."),
        (["model.untrained_reward=[]"], "model.untrained_reward.rewards=[] is empty. Name at least one reward, "),
        (["data.train=numbers.jsonl"], 'numbers.jsonl line 1: "rewards" is 3. Write the names of rewards, such '),
        (["ckpt_path=."], "ckpt_path=. is not a file. Give a checkpoint file."),
    ],
    ids=lambda value: value[0].partition("=")[2][:40] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_before_training(recipe, capsys, words, said):
    assert run([recipe, *words]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert err.count("\n") == 1, err
    assert "Run folder" not in out
    assert not Path("runs/tiny").exists()


def test_a_reward_that_calls_exit_stops_the_run_and_says_so(recipe, capsys):
    assert run([recipe, "model.reward=rewards_of_mine.Leaves", "data.heldout=null"]) == 1
    err = capsys.readouterr().err
    assert "rewards_of_mine.py:9: SystemExit: bye." in err
    assert "Training failed. " in err


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("hungry", r'Reward "hungry" ran out of memory: .*guests.py:5: MemoryError. Give it fewer images per call: '),
        ("stops", r'4 of 4 images of iteration 1 failed, .* Reward "stops": .*guests.py:20: KeyboardInterrupt\.'),
    ],
)
def test_a_reward_without_memory_or_with_its_own_interrupt_ends_the_run_in_a_line(recipe, capsys, function, said):
    assert run([recipe, f"model.reward={{python: 'guests:{function}'}}"]) == 1
    err = capsys.readouterr().err
    assert re.search(said, err)
    assert "Traceback" not in err
    assert "Training failed. " in err


def test_a_run_continues_after_its_reward_is_mended(recipe, capsys):
    """The iterations before the error are kept, and the printed command continues."""
    code = "calls = 0\n\ndef shine(images, prompts):\n    global calls\n    calls += 1\n    assert calls < 3, 'gone'\n"
    Path("shining.py").write_text(f"{code}    return images.mean((1, 2, 3))\n")
    words = ["model.reward={python: 'shining:shine'}", "data.heldout=null", "trainer.max_epochs=3"]
    assert run([recipe, *words, "trainer.enable_progress_bar=false"]) == 1
    again = "lightning run runs/tiny/config.yaml --resume allow_changes=true"
    kept = "The last checkpoint is runs/tiny/checkpoints/interrupted.ckpt (2 iterations, 2 optimizer steps)."
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"Training failed. {kept} Continue, also after an edit of shining.py: {again}"
    Path("shining.py").write_text(code.replace("< 3", "> 0") + "    return images.mean((1, 2, 3))\n")
    sys.modules.pop("shining")
    assert run(again.split()[2:-1]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"Restore these, or continue with the new ones: {again}"
    assert run(again.split()[2:]) == 0
    assert "Changed: model.reward shine: shining.py changed since the checkpoint was written" in capsys.readouterr().out


def test_what_a_reward_changes_reaches_neither_held_out_prompts_nor_later_iterations(recipe, capsys):
    words = ["data.train=shipped:prompts/shapes_train.jsonl", "data.heldout=shipped:prompts/shapes_heldout.jsonl"]
    words += ["data.heldout_limit=2", "data.prompts_per_iteration=2", "data.group_size=2", "data.micro_batch_size=4"]
    words += ["model.reward=[{python: 'guests:greedy'}, ShapesReward]", "model.optimizer.lr=1e-9"]
    assert run([recipe, *words, "model.untrained_reward=JPEGCompressibility"]) == 0
    assert "failed" not in capsys.readouterr().err
    summary = json.loads(Path("runs/tiny/summary.json").read_text())
    assert summary["outcome"] == "finished"
    assert summary["heldout_reward_end"] == pytest.approx(summary["heldout_reward_start"], abs=1e-3)


def test_code_that_changes_the_current_folder_moves_nothing_else(recipe, tiny_sd3, capsys):
    start = Path.cwd()
    Path("model").symlink_to(tiny_sd3)
    paths = ["model.policy.checkpoint=model", "model.policy.embedding_cache=cache", "data.train=train.txt"]
    callbacks = "trainer.callbacks=[wanders.WandersToo,SampleGrid,EMA]"
    assert run([recipe, "model.reward=wanders.Wanders", *paths, callbacks]) == 0
    written = "runs/tiny: summary.json, metrics.csv, samples, checkpoints.\n"
    assert f"The result: runs/tiny/report.html\nMore is in {written}" in capsys.readouterr().out
    assert Path.cwd() != start
    os.chdir(start)
    assert check([recipe, "model.reward=wanders.Wanders", *paths, callbacks]) == 0
    assert not [path for path in (start / "elsewhere").rglob("*") if path.name != "elsewhere"]
    kept = ("checkpoints/last.ckpt", "samples/after.png", "report/scores.jsonl", "config.yaml", "tensorboard")
    assert all((start / "runs/tiny" / name).exists() for name in kept)
    assert len(list((start / "cache").iterdir())) > 2


@pytest.mark.slow
def test_commands_on_a_run_write_where_they_were_started(recipe, tmp_path, monkeypatch):
    assert run([recipe, "model.reward=wanders.Wanders", "trainer.max_epochs=1"]) == 0
    for command, words, made in (
        (evaluate, ["runs/tiny"], "runs/tiny/eval.json"),
        (score, ["wanders.Wanders", "runs/tiny/report", "--out", "scores.csv"], "scores.csv"),
        (run, ["runs/tiny/config.yaml", "--resume", "trainer.max_epochs=2"], "runs/tiny/checkpoints/previous.ckpt"),
    ):
        monkeypatch.chdir(tmp_path)
        assert command(words) == 0
        assert (tmp_path / made).is_file()
    words = ["model.reward=wanders.Wanders", "trainer.devices=2", "name=two"]
    done = run_command("run", recipe, *words, cwd=tmp_path)  # a process, since its ranks start the same command
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"Loading {recipe} ...\n") == 1
    assert (tmp_path / "runs/two/summary.json").is_file()


def test_a_held_out_reward_of_nan_is_no_success(recipe, capsys):
    words = ["model.reward=rewards_of_mine.TrainsOnly", "data.train=train.txt", "data.heldout=heldout.txt"]
    assert run([recipe, *words, "trainer.max_epochs=1"]) == 1
    said = "No held-out image could be scored at the end. Fix the reward, then run: lightning eval runs/tiny\n"
    assert said in capsys.readouterr().err
    assert json.loads(Path("runs/tiny/summary.json").read_text())["heldout_reward_end"] is None


def test_the_end_names_what_was_written(recipe, capsys):
    """A try with fast_dev_run has no loggers; the commands can be typed."""
    assert run([recipe, "trainer.fast_dev_run=true", "run_dir=my runs"]) == 0
    said = "The result: my runs/report.html\nMore is in my runs: summary.json, checkpoints.\n"
    score = "lightning eval 'my runs' --reference  # Score before and after, with confidence intervals"
    words = "--reference model.untrained_reward=CLIPScore"
    check = f"lightning eval 'my runs' {words}  # Check for cheating with another reward (needs its weights)"
    draw = "lightning sample 'my runs' --prompt 'a red circle on the left'  # Draw a prompt"
    export = "lightning export 'my runs' --to 'my runs_export'  # Write the weights for diffusers"
    assert capsys.readouterr().out.endswith(f"{said}Next:\n  {score}\n  {check}\n  {draw}\n  {export}\n")
    written = {".lock", "config.yaml", "report", "report.html", "summary.json", "checkpoints"}
    assert {path.name for path in Path("my runs").iterdir()} == written
    header = Path("my runs/config.yaml").read_text().splitlines()[0]
    assert header == "# lightning run 'my runs/config.yaml'"


def test_an_exported_run_is_not_to_be_exported_again(recipe, capsys):
    assert run([recipe, "trainer.max_epochs=1", "trainer.callbacks=[Export]", "data.heldout=null"]) == 0
    *_, weights, _, _, publish = capsys.readouterr().out.splitlines()
    assert weights == "The weights for diffusers: runs/tiny/export (see its README.md)"
    assert publish == "  lightning export runs/tiny --to hub:OWNER/tiny  # Publish the weights on the hub"
    assert "--to hub:OWNER/tiny" in Path("runs/tiny/report.html").read_text()


@pytest.mark.slow
def test_a_second_run_and_another_method_say_where_they_go(recipe, capsys):
    words = [recipe, "trainer.max_epochs=1"]
    for more, folder, said in (
        ([], "runs/tiny", "Run folder: runs/tiny\n"),
        ([], "runs/tiny-2", "Run folder: runs/tiny-2 (runs/tiny belongs to another run)\n"),
        (["model.objective=DiffusionNFT"], "runs/tiny_DiffusionNFT", "DiffusionNFT uses its default options"),
        (["model.objective=VGRPO", "name=mine"], "runs/mine", "Run folder: runs/mine\n"),
    ):
        assert run([*words, *more]) == 0
        assert said in capsys.readouterr().out
        assert Path(folder, "summary.json").is_file()
    summary = Path("runs/tiny/summary.json")
    summary.write_text(summary.read_text().replace('"finished"', '"interrupted"'))
    assert run(words) == 0
    assert "(runs/tiny belongs to a run that is not finished: add --resume to continue it)" in capsys.readouterr().out
    assert run([recipe, "ckpt_path=runs/tiny"]) == 2
    assert "Set ckpt_path=runs/tiny/checkpoints/last.ckpt, or continue it with --resume." in capsys.readouterr().err


def test_ctrl_c_before_the_run_listens_stops_without_a_traceback(recipe, capsys, monkeypatch):
    monkeypatch.setattr(socket, "socketpair", lambda *_: signal.raise_signal(signal.SIGINT))
    assert run([recipe]) == 130
    assert capsys.readouterr().err.strip().endswith("Stopped.")


def test_ctrl_c_after_the_last_iteration_says_what_is_saved(recipe, capsys):
    code = "    def finish(self, *args):\n        raise KeyboardInterrupt\n"
    Path("pressed.py").write_text(f"import lightning as L\n\nclass Pressed(L.Callback):\n{code}")
    assert run([recipe, "trainer.max_epochs=1", "trainer.callbacks=[pressed.Pressed]", "data.heldout=null"]) == 130
    saved = "The last checkpoint is runs/tiny/checkpoints/last.ckpt (1 iteration, 1 optimizer step)."
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"Stopped. {saved} Continue: lightning run runs/tiny/config.yaml --resume"
