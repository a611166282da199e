"""``lightning run``: overrides, errors, run folders, resuming, Ctrl-C."""

from pathlib import Path

import pytest
import yaml
from commands import run
from helpers import prompt_file, read_csv
from saved_runs import assert_one_line

from lit_vgrpo.launch.build import build

POLICY = "model.policy.checkpoint=shipped:assets/tiny_sd3"


def metrics(folder):
    return read_csv(Path(folder, "metrics.csv"))


def test_seed_everything_seeds_model_and_data(tiny_recipe):
    cli = build([str(tiny_recipe), "seed_everything=11"], make_folder=False)
    assert cli.model.seed == cli.datamodule.seed == 11
    drawn = build([str(tiny_recipe), "seed_everything=true"], make_folder=False)
    assert drawn.model.seed == drawn.datamodule.seed == drawn.config.seed_everything > 1
    assert build([str(tiny_recipe), "seed_everything=false"], make_folder=False).model.seed == 0


def test_a_rank_that_lightning_starts_has_the_first_ones_drawn_seed(tiny_recipe, monkeypatch):
    words = [str(tiny_recipe), "seed_everything=true"]
    first = build(words, make_folder=False)  # leaves its seed in the environment
    assert build([*words, "name=a"], make_folder=False).model.seed != first.model.seed  # another run
    first = build(words, make_folder=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert build(words, make_folder=False).model.seed == first.model.seed


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.policy.checkpoint=shipped:assets/tiny_sd", "model.policy.checkpoint: shipped:assets/tiny_sd is not s"),
        ("trainer.logger=[tensorbord]", "trainer.logger=tensorbord is not a logger. Did you mean tensorboard?"),
        ("model.policy.checkpoint=shipped:../x", "model.policy.checkpoint: shipped:../x leaves the shipped"),
        ("trainer.precision=17", "trainer.precision=17: Use "),
        ("trainer.precision=bf16-mixed", "trainer.precision=16-mixed or bf16-mixed has no effect: the policy comp"),
        ("trainer.precision=bf16-true", "trainer.precision=bf16-true would cast the trained weights. Leave it"),
        ("trainer.plugins=HalfPrecision", "trainer.precision=16-true would cast the trained weights."),
        ("trainer.plugins=AsyncCheckpointIO", "trainer.plugins=AsyncCheckpointIO returns before a checkpoint is on"),
        ("ckpt_path=tiny.yaml", "ckpt_path=tiny.yaml is truncated or not a checkpoint"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(tiny_recipe, capfd, override, line):
    assert_one_line(run, [str(tiny_recipe), override], capfd, line, starts=True)
    assert not list(Path().glob("runs/*"))


def test_resume_replaces_no_results_of_another_program(tiny_recipe, capsys):
    for name in ("metrics.csv", "config.yaml"):
        Path(name).write_text("mine")
    assert run([str(tiny_recipe), "--resume", "run_dir=."]) == 2
    line = ". is not a run folder, and a run would replace its config.yaml, metrics.csv. Set run_dir=/another/folder.\n"
    assert capsys.readouterr().err == line
    assert Path("metrics.csv").read_text() == Path("config.yaml").read_text() == "mine"


def test_several_mistakes_are_several_lines(tiny_recipe, capfd):
    words = ["trainer.devices=3", "model.policy=UNetPolicy", POLICY, "model.objective.rollout.solver=euler"]
    assert run([str(tiny_recipe), *words]) == 2
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
    chosen = [f"trainer.callbacks+={name}" for name in ("ModelCheckpoint", "RewardLogger", "RichProgressBar")]
    cli = build([str(tiny_recipe), *chosen])
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert [names.count(name) for name in ("RewardLogger", "ModelCheckpoint", "RichProgressBar")] == [1, 1, 1]
    assert "ProgressBar" not in names, "another bar replaces ours"
    assert cli.checkpoints.every_n_iterations == 10, "a ModelCheckpoint replaced ours"


def test_a_value_that_is_refused_in_training_is_one_line(tiny_recipe, capfd):
    assert run([str(tiny_recipe), "model.objective.time_range=[0.4,0.41]", "model.evaluate_at_start=false"]) == 1
    err = capfd.readouterr().err
    assert "model.objective.time_range=[0.4, 0.41] contains none of the sampler's times" in err
    assert "Traceback" not in err


def test_ctrl_c_while_a_recipe_is_read_leaves_no_folder(here, monkeypatch, capsys):
    def stopped(self, policy):
        assert (here / "runs/tiny_shapes").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_vgrpo.data.PromptDataModule.read_for", stopped)
    assert run(["tiny_shapes", "trainer.accelerator=cpu"]) == 130
    assert capsys.readouterr().err == "Stopped.\n"
    assert not (here / "runs").exists()
