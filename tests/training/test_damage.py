"""Damaged checkpoints, and weights that are not finite, are refused in one line wherever a checkpoint is read."""

import shutil
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import yaml
from commands import evaluate, export, run, sample_images
from conftest import tiny_recipe_of
from helpers import Brightness, make_data, make_module, make_trainer

from lit_vgrpo import VGRPOModule
from lit_vgrpo.training.checkpoint_file import CheckpointDamage, read, write
from lit_vgrpo.training.saved_weights import SavedWeights

pytestmark = pytest.mark.slow

NAME = "policy.network.transformer_blocks.0.attn.to_q.weight"
CHECKPOINTS = Path("run/checkpoints")


@pytest.fixture(scope="module")
def ran(tmp_path_factory, tiny_sd3):
    """A folder with a run of three checkpoints, ``run``."""
    folder = tmp_path_factory.mktemp("damage")
    (folder / "tiny.yaml").write_text(tiny_recipe_of(tiny_sd3))
    callbacks = "trainer.callbacks=[EMA,{class_path: RunCheckpoint, init_args: {every_n_iterations: 1}}]"
    with chdir(folder):
        assert run(["tiny.yaml", "run_dir=run", callbacks]) == 0
    return folder


@pytest.fixture
def inside(ran, here):
    """A copy of it as the working directory."""
    shutil.copytree(ran, here, dirs_exist_ok=True)
    assert len(list(CHECKPOINTS.iterdir())) == 3
    return here


def flip_a_bit_of(path, name):
    """One bit of a trained tensor's values, high up in an exponent."""
    value = torch.load(path, weights_only=True)["state_dict"][name]
    data = bytearray(path.read_bytes())
    data[data.index(value.numpy().tobytes()) + 3] ^= 0x40
    path.write_bytes(data)


def put_nan_into(path, name):
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"][name].view(-1)[7] = float("nan")
    write(checkpoint, path)


def every_reader(path, capfd):
    """Message and status of each command and call that is given the checkpoint."""
    asked = f"--checkpoint={path}"
    commands = {
        "export": lambda: export(["run", "--to=exported", asked]),
        "sample": lambda: sample_images(["run", "--prompt=x", "--out=drawn", asked]),
        "eval": lambda: evaluate(["run", "--out=eval.json", asked]),
        "ckpt_path": lambda: run(["run/config.yaml", "name=other", f"ckpt_path={path}", "trainer.max_epochs=3"]),
        "start_from": lambda: run(["run/config.yaml", "name=other", f"model.policy.start_from={path}"]),
    }
    for command in commands.values():
        capfd.readouterr()
        assert command() == 2
        yield capfd.readouterr().err
    recipe = yaml.safe_load(Path("run/config.yaml").read_text())
    module = make_module(recipe["model"]["policy"]["init_args"]["checkpoint"])
    with pytest.raises(CheckpointDamage) as refused:
        make_trainer("plain", 3).fit(module, datamodule=make_data(), ckpt_path=path)
    yield f"{refused.value}\n"
    with pytest.raises(CheckpointDamage) as refused:
        VGRPOModule.load_from_checkpoint(path, policy=module.policy, objective=module.objective, reward=Brightness())
    yield f"{refused.value}\n"


@pytest.mark.parametrize(
    ("damage", "what"),
    [(flip_a_bit_of, "is damaged: archive/data/"), (put_nan_into, f"has values that are not finite, in {NAME}")],
)
def test_a_damaged_weight_is_refused_by_name_wherever_a_checkpoint_is_read(inside, capfd, damage, what):
    path = CHECKPOINTS / "last.ckpt"
    damage(path, NAME)
    for said in every_reader(path, capfd):
        lines = [line for line in said.splitlines() if what in line]
        assert len(lines) == 1, said
        assert "Traceback" not in said
    assert sorted(path.name for path in inside.iterdir()) == ["run", "tiny.yaml"]


def test_a_run_none_of_whose_checkpoints_is_sound_is_left_alone(inside, capsys):
    for path in CHECKPOINTS.iterdir():
        flip_a_bit_of(path, NAME)
    put_nan_into(CHECKPOINTS / "best.ckpt", NAME)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    for command in (
        lambda: run(["run/config.yaml", "--resume", "trainer.max_epochs=3"]),
        lambda: run(["tiny.yaml", "run_dir=run", "--resume", "trainer.max_epochs=3"]),
        lambda: export(["run", "--to=exported"]),
    ):
        assert command() == 2
        *skipped, last = capsys.readouterr().err.splitlines()
        assert len(skipped) == 3
        assert all(line.startswith("Skipped run/checkpoints/") for line in skipped)
        assert last == (
            "None of the 3 checkpoints of run can be loaded. Copy an intact one to run/checkpoints. To start "
            "from the beginning, move the damaged ones away."
        )
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    # A folder is a checkpoint that only the strategy which wrote it can read; a file in the way hides what is there.
    shutil.rmtree(CHECKPOINTS)
    (CHECKPOINTS / "last.ckpt").mkdir(parents=True)
    assert run(["run/config.yaml", "--resume"]) == 2
    assert "Skipped run/checkpoints/last.ckpt: it is not a regular file." in capsys.readouterr().err
    shutil.rmtree(CHECKPOINTS)
    CHECKPOINTS.write_text("")
    assert run(["run/config.yaml", "--resume"]) == 2
    assert capsys.readouterr().err == "Cannot look for checkpoints in run/checkpoints: Not a directory.\n"


def test_images_that_are_not_finite_are_not_written(inside, capsys):
    """Weights of a checkpoint that is whole, so large that the images overflow."""
    checkpoint = read(CHECKPOINTS / "last.ckpt")
    checkpoint["state_dict"] = {name: torch.full_like(value, 1e30) for name, value in checkpoint["state_dict"].items()}
    write(checkpoint, CHECKPOINTS / "huge.ckpt")
    assert SavedWeights.read(CHECKPOINTS / "huge.ckpt")
    assert sample_images(["run", "--prompt=a red circle", "--out=drawn", "--checkpoint=huge.ckpt", "--no-ema"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said = 'The image of prompt "a red circle", seed 0, has values that are not finite. '
    assert err.startswith(said)
    assert err.count("\n") == 1
    assert not Path("drawn").exists()
    assert evaluate(["run", "--checkpoint=huge.ckpt", "--no-ema"]) == 1
    assert "2 of 2 images have NaN or infinite pixels" in capsys.readouterr().out
