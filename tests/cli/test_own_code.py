"""Errors in a user's own code and files end in a line that says where, before or after training."""

import json
from pathlib import Path

import pytest
from commands import run

FILES = {
    "no_colon.py": "def reward(images, prompts, rows)\n    return images.mean()\n",
    "raises.py": "import torch\n\nraise RuntimeError('out of luck')\n",
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
        held_out = prompts[0] == "a blue square"
        return torch.full((len(images),), float("nan")) if held_out else images.mean(dim=(1, 2, 3))
""",
    "numbers.jsonl": '{"prompt": "a red circle", "rewards": 3}\n',
    "train.txt": "a red circle\na green triangle\n",
    "heldout.txt": "a blue square\n",
}


EARLY = "{class_path: EarlyStopping, init_args: {monitor: %s}}"


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
        (["model.reward=leaves.X"], "leaves.py:1: SystemExit: bye."),
        (["model.reward=rewards_of_mine.Fragile"], "rewards_of_mine.py:14: KeyError: 'no such key'."),
        (
            ["model.reward={python: 'leaves:reward'}"],
            "leaves:reward cannot be imported (leaves.py:1: SystemExit: bye).",
        ),
        (["trainer.callbacks={class_path: Export, init_args: {folder: ..}}"], "folder=.. is not a separate folder. "),
        (
            [f"trainer.callbacks=[{EARLY % 'heldout/reward'},{EARLY % 'heldout_reward'}]"],
            "trainer.callbacks[1].monitor=heldout_reward: runs log no metric with this name. Did you mean held",
        ),
        (
            ["trainer.callbacks={class_path: ModelCheckpoint, init_args: {monitor: nothing}}"],
            "trainer.callbacks[0].monitor=nothing: runs log no metric with this name. Use one of: heldout/reward, ",
        ),
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


def test_a_held_out_reward_of_nan_is_no_success(recipe, capsys):
    words = ["model.reward=rewards_of_mine.TrainsOnly", "data.train=train.txt", "data.heldout=heldout.txt"]
    assert run([recipe, *words, "trainer.max_epochs=1"]) == 1
    assert "No held-out image could be scored at the end. Fix the reward, then run: lightning eval runs/tiny\n" in (
        capsys.readouterr().err
    )
    assert json.loads(Path("runs/tiny/summary.json").read_text())["heldout_reward_end"] is None


def test_the_end_names_what_was_written(recipe, capsys):
    """A try with fast_dev_run has no loggers."""
    assert run([recipe, "trainer.fast_dev_run=true"]) == 0
    assert capsys.readouterr().out.endswith(
        "Everything is in runs/tiny: report.html, summary.json, checkpoints.\nThe result: runs/tiny/report.html\n"
    )
    written = {"config.yaml", "report", "report.html", "summary.json", "checkpoints"}
    assert {path.name for path in Path("runs/tiny").iterdir()} == written


@pytest.mark.slow
def test_a_second_run_and_another_method_say_where_they_go(recipe, capsys):
    words = [recipe, "trainer.max_epochs=1"]
    for more, folder, said in (
        ([], "runs/tiny", "Run folder: runs/tiny\n"),
        ([], "runs/tiny-2", "Run folder: runs/tiny-2 (runs/tiny belongs to an earlier run)\n"),
        (["model.objective=DiffusionNFT"], "runs/tiny_DiffusionNFT", "DiffusionNFT uses its default options"),
        (["model.objective=VGRPO", "name=mine"], "runs/mine", "Run folder: runs/mine\n"),
    ):
        assert run([*words, *more]) == 0
        assert said in capsys.readouterr().out
        assert Path(folder, "summary.json").is_file()
    assert run([recipe, "ckpt_path=runs/tiny"]) == 2
    assert "Set ckpt_path=runs/tiny/checkpoints/last.ckpt, or continue it with --resume." in capsys.readouterr().err
