"""``lightning check``: every error, no training, nothing written."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from lit_vgrpo.cli.check import check, checkpoint_bytes, disk_errors
from lit_vgrpo.launch.build import build


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_good_recipe(tiny_recipe, capsys):
    assert check([str(tiny_recipe)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "images" in out
    assert "no errors found for world size 1" in out
    assert sorted(path.name for path in tiny_recipe.parent.iterdir()) == ["tiny.yaml"]


def test_sizes_and_files_in_one_call(tiny_recipe, capsys):
    assert check([str(tiny_recipe), "data.micro_batch_size=3", "data.train=none.txt"]) == 2
    found = lines(capsys)
    assert len(found) == 2
    assert any("micro_batch_size=3" in line for line in found)
    assert any("none.txt does not exist" in line for line in found)


def test_bad_keys_values_files_and_checkpoints_in_one_call(tiny_recipe, capsys):
    overrides = ["trainer.max_epoch=3", "data.group_size=1", "data.train=none.txt", "model.policy.checkpoint=/none"]
    assert check([str(tiny_recipe), *overrides, "model.objective.clp=.1"]) == 2
    found = "\n".join(lines(capsys))
    assert "trainer.max_epoch is not an option of Trainer. Did you mean max_epochs?" in found
    assert "model.objective.clp is not an option of VGRPO. Did you mean clip?" in found
    assert "data.group_size=1 " in found
    assert "none.txt does not exist" in found
    assert "/none is not a folder. Set model.policy.checkpoint" in found


def test_scouts(tiny_recipe, capsys):
    key = "model.objective.rollout.scouts"
    assert check([str(tiny_recipe), f"{key}={{factor: 3, steps: 1}}"]) == 0
    assert "(3 per image)" in next(line for line in capsys.readouterr().out.splitlines() if "passes, scouts" in line)
    for words, line in (
        ("{factor: 1, steps: 1}", f"{key}.factor=1"),
        ("{factr: 2}", f"{key}.factr is not an option of ScoutSpec. Did you mean factor?"),
        ("{steps: 1, solver: ddim}", f"{key}.solver=ddim is not a solver of SD3Policy."),
    ):
        assert check([str(tiny_recipe), f"{key}={words}"]) == 2
        assert any(found.endswith(line) or line in found for found in lines(capsys)), words


def test_weights_of_a_reward_that_cannot_be_had(tiny_recipe, capsys):
    assert check([str(tiny_recipe), "model.reward=PickScore", "model.reward.checkpoint=/none"]) == 2
    assert "/none" in lines(capsys)[0]


def test_no_estimate_is_mentioned_where_an_error_prevents_it(tiny_recipe, capsys):
    assert check([str(tiny_recipe), "model.policy.checkpoint=."]) == 2
    out, err = capsys.readouterr()
    assert "model_index.json" in err
    assert "memory" not in out


def test_too_little_disk(tiny_recipe, monkeypatch):
    cli = build([str(tiny_recipe)], make_folder=False)
    assert disk_errors(cli) == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert "0.0 GiB free" in disk_errors(cli)[0]


def test_a_checkpoint_is_as_large_as_the_weights_that_are_read(tiny_recipe, tiny_sd3, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_vgrpo.cli.check.SMALLEST_NEED", 0)
    folder = tmp_path / "both"
    shutil.copytree(tiny_sd3, folder)
    weights = folder / "transformer/diffusion_pytorch_model.safetensors"
    for name in ("diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin", "other.safetensors"):
        (weights.parent / name).write_bytes(b"x" * 1000)

    def needed(*words):
        return checkpoint_bytes(build([str(tiny_recipe), f"model.policy.checkpoint={folder}", *words], False))

    assert needed() == 4 * weights.stat().st_size
    assert needed("model.policy.variant=fp16") == 4 * 1000


def test_a_run_dir_that_cannot_be_written(tiny_recipe, monkeypatch):
    cli = build([str(tiny_recipe), "run_dir=there"], make_folder=False)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert disk_errors(cli)[0].startswith("Cannot create the run folder there: ")


def test_a_recipe_that_is_not_there(tiny_recipe, capsys):
    assert check(["tiny_shape"]) == 2
    assert "Did you mean tiny_shapes?" in lines(capsys)[0]


@pytest.mark.parametrize("devices", [2, 4])
def test_the_plan_is_that_of_the_world_size(tiny_recipe, capsys, devices):
    status = check([str(tiny_recipe), f"trainer.devices={devices}", "trainer.strategy=ddp"])
    out, err = capsys.readouterr()
    assert (status == 0) == (devices == 2)
    assert ("ranks                     2" in out) == (devices == 2)
    assert ("4 ranks" in err) == (devices == 4)


HOSTILE = """
model:
  policy:
    class_path: SD3Policy
    init_args: {checkpoint: someone/some-weights, start_from: someone/loras/deep/style.safetensors}
  objective: {class_path: VGRPO, init_args: {rollout: {solver: euler, steps: 2}}}
  reward:
    class_path: Weighted
    init_args:
      rewards:
        - python: trap.functions:score
        - class_path: ${oc.env:REWARD_CLASS,trap.Reward}
        - PickScore
        - class_path: HTTPReward
          init_args: {url: "http://${oc.env:REWARD_HOST}:8000/score", connection: {token_env: SECRET_OF_MINE}}
        - {class_path: VLMJudge, init_args: {url: "${data.judge}/v1", model: m}}
data: {train: prompts.txt, heldout: someone/prompts, judge: "https://judge.example"}
trainer:
  logger: WandbLogger
  strategy: trap.strategies.Mine
  callbacks:
    - {class_path: FID, init_args: {features: network.pt, reference: ../elsewhere/reference.npz}}
    - options.yaml
ckpt_path: /somebody/last.ckpt
"""


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A folder whose modules note that they were imported."""
    (tmp_path / "trap").mkdir()
    for name in ("__init__", "functions", "strategies"):
        (tmp_path / "trap" / f"{name}.py").write_text("open('sprung', 'w').close()")
    (tmp_path / "recipe.yaml").write_text(HOSTILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET_OF_MINE", "hunter2")
    monkeypatch.setenv("REWARD_HOST", "hunter2")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    assert not any(name.partition(".")[0] == "trap" for name in sys.modules)


def named(out):
    """Return the listed names by the first word of their paragraph."""
    found, part = {}, None
    for line in out.splitlines():
        if line.startswith("  "):
            thing, _, keys = line.strip().partition("  ")
            found[part][thing] = keys.strip()
        else:
            part = line.split()[0]
            found[part] = {}
    return found


def test_what_somebody_elses_recipe_names_is_listed_and_nothing_of_it_imported(trap, capsys):
    before = dict(os.environ)
    assert check(["recipe.yaml", "model.heldout_reward=trap.Heldout", "--untrusted"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "hunter2" not in out
    found = named(out)
    rewards = "model.reward.rewards"
    assert found["Code"] == {
        "trap.functions:score": f"{rewards}[0].function",
        "$REWARD_CLASS": f"{rewards}[1].class_path",
        "trap.Reward": f"{rewards}[1].class_path",
        "trap.Heldout": "model.heldout_reward",
        "trap.strategies.Mine": "trainer.strategy",
        "WandbLogger": "trainer.logger",
        "network.pt": "trainer.callbacks[0].features",
        "options.yaml": "trainer.callbacks[1]",
    }
    assert list(found["Environment"]) == ["REWARD_CLASS", "REWARD_HOST", "SECRET_OF_MINE"]
    assert found["Environment"]["SECRET_OF_MINE"] == f"{rewards}[3].connection.token_env"
    assert found["Hosts"] == {
        "http://$REWARD_HOST:8000": f"{rewards}[3].url",
        "https://judge.example": f"{rewards}[4].url, data.judge",
    }
    assert found["Repositories"]["someone/some-weights"] == "model.policy.checkpoint"
    assert found["Repositories"]["someone/loras/deep/style.safetensors"] == "model.policy.start_from"
    assert found["Repositories"]["someone/prompts"] == "data.heldout"
    assert found["Repositories"]["yuvalkirstain/PickScore_v1"] == f"{rewards}[2], unless it is set"
    assert list(found["Files"]) == ["../elsewhere/reference.npz", "/somebody/last.ckpt"]
    assert not Path("sprung").exists()
    assert dict(os.environ) == before


def test_overlays_and_the_stages_of_a_curriculum_count_too(trap, capsys):
    Path("over.yaml").write_text("trainer: {callbacks: [trap.Callback]}")
    Path("two.yaml").write_text("stages: [recipe, tiny_shapes]\noverrides: ['stage2.model.reward=trap.Second']\n")
    assert check(["two.yaml", "over.yaml", "--untrusted"]) == 0
    found = named(capsys.readouterr().out)
    assert found["Code"]["trap.Callback"] == "stage1.trainer.callbacks[0], stage2.trainer.callbacks[0]"
    assert found["Code"]["trap.Second"] == "stage2.model.reward.class_path"
    assert found["Hosts"]["https://judge.example"].startswith("stage1.")


@pytest.mark.parametrize("recipe", ["tiny_shapes", "sd3_pickscore", "sd35m_curriculum", "sdxl_preference"])
def test_our_own_recipes_name_no_code_of_others(recipe, capsys):
    assert check([recipe, "--untrusted"]) == 0
    found = named(capsys.readouterr().out)
    assert found["Code"] == found["Environment"] == found["Hosts"] == found["Files"] == {"none": ""}
    assert bool(found["Repositories"] != {"none": ""}) == (recipe != "tiny_shapes")


def test_the_environment_is_read_again_after_a_listing(trap, monkeypatch):
    monkeypatch.setenv("REWARD_CLASS", "x")
    check(["recipe.yaml", "--untrusted"])
    assert OmegaConf.to_container(OmegaConf.create({"a": "${oc.env:REWARD_CLASS}"}), resolve=True) == {"a": "x"}


def test_a_name_cannot_take_over_the_terminal(trap, capsys):
    assert check(["recipe.yaml", 'model.heldout_reward="trap.\x1b[2JX"', "--untrusted"]) == 0
    assert "\x1b" not in capsys.readouterr().out
