"""``lightning run``: overrides, errors, run folders, resuming, Ctrl-C."""

import csv
import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import yaml
from commands import run
from helpers import prompt_file
from lightning.pytorch.callbacks import ProgressBar
from processes import started

from lit_vgrpo.launch.build import build
from lit_vgrpo.launch.recipe_cli import fixed_seed
from lit_vgrpo.objectives import VGRPO

POLICY = "model.policy.checkpoint=shipped:assets/tiny_sd3"


def metrics(folder):
    with (Path(folder) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_overrides_reach_inside_interpolations(tiny_recipe):
    cli = build([str(tiny_recipe), "data.group_size=4", "model.objective.num_mc_samples=3"], make_folder=False)
    assert cli.datamodule.sizes.micro_batch_size == 4
    assert isinstance(cli.model.objective, VGRPO)
    assert cli.model.objective.num_mc_samples == 3


def test_seed_everything_seeds_model_and_data(tiny_recipe):
    cli = build([str(tiny_recipe), "seed_everything=11"], make_folder=False)
    assert cli.model.seed == cli.datamodule.seed == 11
    drawn = build([str(tiny_recipe), "seed_everything=true"], make_folder=False)
    assert drawn.model.seed == drawn.config.seed_everything == fixed_seed(True)
    assert build([str(tiny_recipe), "seed_everything=false"], make_folder=False).model.seed == 0


# --- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.train=none.txt", "data.train: none.txt does not exist."),
        (
            "model.policy.checkpoint=shipped:../x",
            "model.policy.checkpoint: shipped:../x leaves the shipped",
        ),
        ("trainer.precision=17", "trainer.precision=17: expected one of"),
        ("trainer.precision=bf16-true", "trainer.precision=bf16-true would cast the trained weights. Leave it"),
        ("trainer.plugins=HalfPrecision", "trainer.precision=16-true would cast the trained weights."),
        ("trainer.plugins=AsyncCheckpointIO", "trainer.plugins=AsyncCheckpointIO returns before a checkpoint is on"),
        ("ckpt_path=none.ckpt", "ckpt_path=none.ckpt is not a file."),
        ("ckpt_path=tiny.yaml", "ckpt_path=tiny.yaml is truncated or not a checkpoint"),
        ("run_dir=tiny.yaml/x", "Cannot create the run folder tiny.yaml/x: "),
    ],
)
def test_a_mistake_is_one_line_and_status_2(tiny_recipe, capfd, override, line):
    assert run([str(tiny_recipe), override]) == 2
    out, err = capfd.readouterr()
    assert err.startswith(line)
    assert err.count("\n") == 1
    assert out == ""
    assert not list(Path().glob("runs/*"))


def test_several_mistakes_are_several_lines(tiny_recipe, capfd):
    assert run([str(tiny_recipe), "trainer.devices=3", "model.policy=UNetPolicy", POLICY]) == 2
    found = capfd.readouterr().err
    assert "is a StableDiffusion3Pipeline, UNetPolicy needs StableDiffusionPipeline" in found
    assert "model.objective.rollout.solver=euler is not a solver of UNetPolicy" in found
    assert "prompts_per_iteration=2 cannot be split over 3 ranks." in found
    assert not list(Path().glob("runs/*"))


def test_what_is_missing_is_named(tmp_path, capsys):
    path = tmp_path / "empty.yaml"
    path.write_text("model: {reward: ShapesReward}\ndata: {train: p.txt}\n")
    assert run([str(path)]) == 2
    assert capsys.readouterr().err.startswith("The recipe lacks model.policy, model.obj")


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_folder_that_is_itself_a_recipe(tiny_recipe, capsys):
    assert run([str(tiny_recipe), "trainer.max_epochs=1", "data.group_size=4"]) == 0
    folder = Path("runs/tiny")
    assert "Run folder: runs/tiny" in capsys.readouterr().out
    assert {"config.yaml", "metrics.csv", "summary.json", "checkpoints"} <= {path.name for path in folder.iterdir()}
    assert list((folder / "tensorboard").glob("events*"))
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["data"]["micro_batch_size"] == 4
    assert saved["data"]["train"] == prompt_file("shapes_train.jsonl")
    assert "seed" not in saved["model"]

    assert run([str(folder / "config.yaml")]) == 0
    again = Path("runs/tiny-2")
    assert [row["reward/mean"] for row in metrics(again)] == [row["reward/mean"] for row in metrics(folder)]
    assert yaml.safe_load((again / "config.yaml").read_text()) == saved


def test_another_progress_bar_replaces_ours(tiny_recipe):
    cli = build([str(tiny_recipe), "trainer.callbacks=[RichProgressBar]"])
    bars = [callback for callback in cli.trainer.callbacks if isinstance(callback, ProgressBar)]
    assert [type(bar).__name__ for bar in bars] == ["RichProgressBar"]
    cli.give_back()


@pytest.mark.slow
def test_what_is_behind_a_checkpoint_is_not_done_again(tiny_recipe, capfd):
    timed = "trainer.callbacks=[{class_path: Timer, init_args: {duration: '00:01:00:00'}}]"
    assert run([str(tiny_recipe), "data.heldout=null", timed]) == 0
    for limit in ("trainer.max_epochs=1", "trainer.max_epochs=2", "trainer.max_steps=1"):
        capfd.readouterr()
        checkpoint = "ckpt_path=runs/tiny/checkpoints/last.ckpt"
        assert run(["runs/tiny/config.yaml", checkpoint, "trainer.max_epochs=9", limit]) == 2
        done = f"{checkpoint} is already at 2 iterations, 2 optimizer steps."
        assert capfd.readouterr().err == f"{done} {limit} leaves nothing to do. Set it higher.\n"
        assert not Path("runs/tiny-2").exists()


@pytest.mark.slow
def test_continuing_without_held_out_prompts(tiny_recipe, capsys):
    assert run([str(tiny_recipe), "trainer.max_epochs=1"]) == 0
    checkpoint = "ckpt_path=runs/tiny/checkpoints/last.ckpt"
    assert run(["runs/tiny/config.yaml", checkpoint, "data.heldout=null", "trainer.max_epochs=2"]) == 0
    assert capsys.readouterr().out.count("Held-out reward") == 1


@pytest.mark.slow
def test_loggers_and_checkpoints_can_be_chosen(tiny_recipe):
    arguments = ["trainer.logger=false", "trainer.enable_checkpointing=false", "trainer.enable_progress_bar=false"]
    assert run([str(tiny_recipe), "trainer.max_epochs=1", *arguments]) == 0
    assert not Path("runs/tiny/checkpoints").exists()
    assert not Path("runs/tiny/tensorboard").exists()
    assert metrics("runs/tiny")
    cli = build([str(tiny_recipe), "trainer.callbacks+=ModelCheckpoint", "trainer.callbacks+=RewardLogger"])
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert names.count("RewardLogger") == names.count("ModelCheckpoint") == 1
    assert cli.checkpoints.every_n_iterations == 0


def test_a_value_that_is_refused_in_training_is_one_line(tiny_recipe, capfd):
    assert run([str(tiny_recipe), "model.objective.time_range=[0.4,0.41]", "model.evaluate_at_start=false"]) == 1
    err = capfd.readouterr().err
    assert "model.objective.time_range=[0.4, 0.41] contains none of the sampler's times" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_checkpoint_of_another_recipe_is_one_line(tiny_recipe, capfd):
    assert run([str(tiny_recipe), "trainer.max_epochs=1", "model.policy.lora_rank=2", "name=lora"]) == 0
    capfd.readouterr()
    assert run([str(tiny_recipe), "ckpt_path=runs/lora/checkpoints/last.ckpt"]) == 2
    err = capfd.readouterr().err
    assert "Cannot continue from ckpt_path=runs/lora/checkpoints/last.ckpt: " in err
    assert "model.policy.lora_rank: 2 in the checkpoint, null now" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_one_word_swaps_the_method_and_its_settings_are_its_own(tiny_recipe, capsys):
    text = tiny_recipe.read_text().replace("num_mc_samples: 2", "num_mc_samples: 2, kl_weight: 1.0, anchor_decay: 0.3")
    tiny_recipe.write_text(text)
    assert run([str(tiny_recipe), "model.objective=DiffusionNFT", "trainer.max_epochs=1"]) == 0
    assert "DiffusionNFT uses its default options" in capsys.readouterr().out
    objective = yaml.safe_load(Path("runs/tiny_DiffusionNFT/config.yaml").read_text())["model"]["objective"]
    assert objective["init_args"]["kl_weight"] == 1e-4
    assert objective["init_args"]["rollout"]["steps"] == 2
    assert run([str(tiny_recipe), "model.objective=MixGRPO"]) == 2
    assert "Use flow_sde or cps or dance_sde" in capsys.readouterr().err


# --- Ctrl-C, in a process of its own ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_that_continues(tiny_recipe):
    words = "run", tiny_recipe, "trainer.max_epochs=100000", "data.heldout=null"
    with started(*words, stderr=subprocess.STDOUT) as process:
        rows = Path("runs/tiny/metrics.csv")
        while not (rows.exists() and len(rows.read_text().splitlines()) > 2):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    checkpoint = Path("runs/tiny/checkpoints/interrupted.ckpt")
    assert f"{checkpoint} is saved. Continue: lightning run runs/tiny/config.yaml --resume" in output
    assert "Traceback" not in output
    done = torch.load(checkpoint, weights_only=True)["epoch"]
    limit = f"trainer.max_epochs={done + 3}"
    assert run(["runs/tiny/config.yaml", f"ckpt_path={checkpoint}", limit]) == 0
    summary = json.loads(Path("runs/tiny-2/summary.json").read_text())
    assert summary["iterations"] == done + 3
