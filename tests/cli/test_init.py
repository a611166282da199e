"""``lightning init``: the folder it writes runs as it is, and with its two marked lines changed it is a real recipe."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from saved_runs import assert_one_line
from stand_ins import StandIns

from lit_vgrpo.cli.init import FILES
from lit_vgrpo.cli.main import main
from lit_vgrpo.config.recipe import Command, read_recipe
from lit_vgrpo.system.paths import resolve_path, shipped_root
from lit_vgrpo.tiny.shapes import PALETTE, render

MARKED = re.compile(r"^( *# CHANGE \d of 2:.*\n)( *)(\w+: .*)\n *# (\3|\w+: .*)\n", re.MULTILINE)


@pytest.fixture
def written(here, monkeypatch, capsys):
    assert main(["init", "first"]) == 0
    assert (
        "\n  cd first && lightning check-reward recipe.yaml\n  lightning run recipe.yaml\n" in capsys.readouterr().out
    )
    monkeypatch.chdir(here / "first")
    return here / "first"


@pytest.mark.slow
def test_it_runs_as_it_is(written):
    assert {path.name for path in written.iterdir()} == {*FILES}
    less = ["trainer.max_epochs=1", "data.prompts_per_iteration=2", "data.heldout_images_per_prompt=1"]
    assert main(["run", "recipe.yaml", *less]) == 0
    summary = json.loads((written / "runs" / "first" / "summary.json").read_text())
    assert (summary["outcome"], summary["iterations"], summary["images"]) == ("finished", 1, 16)
    assert "reward/score" in (written / "runs" / "first" / "metrics.csv").read_text().splitlines()[0]


@pytest.mark.slow
def test_two_marked_lines_make_it_a_real_recipe(written, tmp_path):
    recipe = written / "recipe.yaml"
    text, count = MARKED.subn(r"\1\2\4\n", recipe.read_text())
    assert count == 2
    assert "tiny_sd3" not in text
    assert "lr: 3.0e-4" in text
    recipe.write_text(text)
    with_weights = f"model.policy.checkpoint={StandIns(tmp_path, None).policy('SD3Policy')}"
    assert main(["check", "recipe.yaml", with_weights, "trainer.accelerator=cpu"]) == 0


def test_a_folder_may_have_any_name(here, capsys):
    assert main(["init", "my run (2)"]) == 0
    enter, out = "cd 'my run (2)' && lightning check-reward recipe.yaml", capsys.readouterr().out
    assert " to 'my run (2)'.\n" in out
    assert enter in out
    assert enter in Path("my run (2)/recipe.yaml").read_text()
    assert read_recipe(Command.parse(["my run (2)/recipe.yaml"])).values["name"] == "my_run_2_"


@pytest.mark.parametrize("source", ["sd3_pickscore", "tiny_edit"])
def test_a_shipped_recipe_is_copied_with_its_prompts(source, here, capsys):
    assert main(["init", "mine", "--from", source]) == 0
    assert "cd mine && lightning check recipe.yaml --memory 80GiB" in capsys.readouterr().out
    values, shipped = (read_recipe(Command.parse([name])).values for name in ("mine/recipe.yaml", source))
    assert values.pop("name") == "mine"
    found = values["data"].pop("train"), shipped["data"].pop("train")
    values["data"].pop("heldout"), shipped["data"].pop("heldout")
    assert values == shipped
    assert found[0] == (found[1] if source == "tiny_edit" else "mine/pickscore_train.txt")  # rows with pictures stay
    assert resolve_path(found[0]).read_text() == resolve_path(found[1]).read_text()
    assert f"lightning run {source}" not in Path("mine/recipe.yaml").read_text()
    assert main(["init", "other", "--from", "sd35m_curriculum"]) == 2
    assert "Copy one of them: --from sd35m_stage1\n" in capsys.readouterr().err


def test_nothing_is_overwritten(written, capsys):
    (written / "runs").mkdir()
    for name, said in ((str(written), "is not empty"), ("recipe.yaml", "is a file")):
        line = f"{name} {said} and will not be overwritten. Choose a new folder.\n"
        assert_one_line(main, ["init", name], capsys, line, starts=True)
    before = (shipped_root() / "starter" / "train.txt").read_text()
    assert (written / "train.txt").read_text() == before


def test_the_reward_knows_the_colours():
    spec = importlib.util.spec_from_file_location("starter_reward", shipped_root() / "starter" / "reward.py")
    reward = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reward)
    assert reward.COLOURS == PALETTE
    images = torch.stack([render("red", "circle", "on the left"), torch.ones(3, 32, 32)])
    prompts = ["a red circle on the left", "a blue circle on the left", "a cat"]
    scores = reward.score(images[[0, 0, 0, 1]], [*prompts, prompts[0]], [{}] * 4)
    assert scores[0] > 0.8
    assert scores[1] < 0.2
    assert scores[2:] == [None, 0.0]


def test_it_takes_any_checkpoint(here, capsys):
    assert main(["init", "mine", "--checkpoint", "fal/AuraFlow-v0.3", "--from", "sd3_pickscore_fast"]) == 0
    model = yaml.safe_load((here / "mine" / "recipe.yaml").read_text())["model"]
    assert model["policy"]["checkpoint"] == "fal/AuraFlow-v0.3"
    assert "class_path" not in model["policy"]
    assert "solver" not in model["objective"]["init_args"]["rollout"]  # the pipeline's own; not all follow dpm++
    assert main(["init", "toy", "--checkpoint", "fal/AuraFlow-v0.3"]) == 0
    assert "lightning check recipe.yaml" in capsys.readouterr().out
