"""A run goes on with the reward's code, prompts and weights that it was trained with, or says what has changed."""

import json
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from commands import run
from conftest import TINY_RECIPE
from helpers import Brightness, make_data, make_module, make_trainer
from safetensors.torch import load_file, save_file

from lit_vgrpo.launch.build import build
from lit_vgrpo.policies import SD3Policy
from lit_vgrpo.rewards import PickScore
from lit_vgrpo.system import file_fingerprint
from lit_vgrpo.training.checkpoint_file import INPUTS_KEY, read, write
from lit_vgrpo.training.inputs import code_of, inputs_of

LAST = Path("run/checkpoints/last.ckpt")
REWARD = """
from lit_vgrpo.rewards import Reward
from own_helper import mean

class Brightness(Reward):
    name = "brightness"

    def __call__(self, images, prompts, rows):
        return mean(images)
"""
HELPER = """
def mean(images):
    return images.mean(dim=(1, 2, 3))
"""
FUNCTION = """
def contrast(images, prompts):
    return images.std(dim=(1, 2, 3))
"""
OWN = ("own_reward", "own_helper", "own_function")
REWARDS = "{class_path: Weighted, init_args: {rewards: [own_reward.Brightness, {python: own_function:contrast}]}}"


@pytest.fixture(scope="module")
def ran(tmp_path_factory, tiny_sd3):
    """A folder with a run and all that it read: ``own_*.py``, ``train.txt`` and ``pipeline``."""
    place = tmp_path_factory.mktemp("inputs")
    shutil.copytree(tiny_sd3, place / "pipeline")
    for name, text in (("own_reward", REWARD), ("own_helper", HELPER), ("own_function", FUNCTION)):
        (place / f"{name}.py").write_text(text)
    (place / "train.txt").write_text("a red circle\na blue square\na green triangle\n")
    recipe = TINY_RECIPE.replace("CHECKPOINT", "pipeline").replace("JPEGCompressibility", REWARDS)
    recipe = recipe.replace("TRAIN", "train.txt").replace("HELDOUT", "null")
    (place / "own.yaml").write_text(recipe.replace("max_epochs: 2", "max_epochs: 1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(str(place))
        for name in OWN:  # as a new process has them; another file's tests may have left one
            sys.modules.pop(name, None)
        assert run(["own.yaml", "run_dir=run"]) == 0
    return place


@pytest.fixture
def inside(ran, tmp_path, monkeypatch):
    """A copy of it as the working directory: all of it has moved."""
    shutil.copytree(ran, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in OWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in OWN:
        sys.modules.pop(name, None)


def replaced(file, old, new):
    def change():
        text = Path(file).read_text()
        assert old in text
        Path(file).write_text(text.replace(old, new))

    return change


def other_weights(part):
    def change():
        file = next(Path("pipeline", part).glob("*.safetensors"))
        tensors = load_file(file)
        tensors[min(tensors)].view(-1)[0] += 1
        save_file(tensors, file, {"format": "pt"})

    return change


CHANGES = {
    "class": (replaced("own_reward.py", "return mean", "return -mean"), "model.reward brightness: own_reward.py"),
    "import": (replaced("own_helper.py", "images.mean", "-images.mean"), "model.reward brightness: own_helper.py"),
    "function": (replaced("own_function.py", "images.std", "-images.std"), "model.reward contrast: own_function.py"),
    "prompts": (replaced("train.txt", "blue", "yellow"), "data.train: prompts"),
    "network": (other_weights("transformer"), "model.policy.checkpoint: transformer"),
    "encoder": (other_weights("text_encoder_2"), "model.policy.checkpoint: text_encoder_2"),
    "scheduler": (
        replaced("pipeline/scheduler/scheduler_config.json", '"shift": ', '"shift": 1'),
        "model.policy.checkpoint: scheduler",
    ),
}
REPEATS = ("function", "encoder", "scheduler")
"""Found as the class and the network are."""


@pytest.mark.parametrize(
    ("change", "what"),
    [pytest.param(*CHANGES[name], id=name, marks=[pytest.mark.slow] * (name in REPEATS)) for name in CHANGES],
)
def test_what_changed_is_said_and_refused(inside, capfd, change, what):
    change()
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    for words in (["--resume", "trainer.max_epochs=2"], [f"ckpt_path={LAST}", "name=new", "trainer.max_epochs=2"]):
        assert run(["run/config.yaml", *words]) == 2
        first, *lines, last = capfd.readouterr().err.splitlines()
        assert first.endswith(f"{LAST}: it was trained with other files.")
        assert lines == [f"{what} changed since the checkpoint was written"]
        assert "allow_changes=true" in last
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    assert not Path("runs").exists()
    cli = build(["run/config.yaml", "--resume", "trainer.max_epochs=2", "allow_changes=true"], make_folder=False)
    assert f"Changed: {what} changed since the checkpoint was written" in cli.opening()


def test_with_allow_changes_it_goes_on_and_the_next_checkpoint_knows_the_new_ones(inside, capfd):
    CHANGES["prompts"][0]()
    words = ["run/config.yaml", "--resume", "trainer.enable_progress_bar=false"]
    assert run([*words, "trainer.max_epochs=2", "allow_changes=true"]) == 0
    assert "Changed: data.train: prompts changed since" in capfd.readouterr().out
    assert run([*words, "trainer.max_epochs=3"]) == 0
    assert "Changed" not in capfd.readouterr().out


def test_what_moved_is_the_same(inside):
    for old, new in (("pipeline", "elsewhere/model"), ("train.txt", "elsewhere/prompts.jsonl")):
        Path(new).parent.mkdir(exist_ok=True)
        Path(old).rename(new)
    rows = [json.dumps({"prompt": line}) for line in Path("elsewhere/prompts.jsonl").read_text().splitlines()]
    Path("elsewhere/prompts.jsonl").write_text("\n\n".join(rows))
    config = Path("elsewhere/model/transformer/config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "_diffusers_version": "99"}))
    moved = ["model.policy.checkpoint=elsewhere/model", "data.train=elsewhere/prompts.jsonl"]
    cli = build(["run/config.yaml", "--resume", "trainer.max_epochs=2", *moved], make_folder=False)
    assert not cli.allowed_changes


def test_a_checkpoint_that_knows_of_none_goes_with_all(inside):
    checkpoint = dict(read(LAST))
    assert checkpoint.pop(INPUTS_KEY).keys() == {
        "data.train",
        "model.policy.checkpoint",
        "model.reward brightness",
        "model.reward contrast",
    }
    write(checkpoint, Path("old.ckpt"))
    CHANGES["prompts"][0]()
    build(["run/config.yaml", "name=new", "ckpt_path=old.ckpt", "trainer.max_epochs=2"], make_folder=False)


def test_what_was_downloaded_only_later_is_compared_before_training(inside, capfd, monkeypatch):
    """As with a hub name whose files are not there yet when the command starts."""
    checkpoint = dict(read(LAST))
    checkpoint[INPUTS_KEY] = {**checkpoint[INPUTS_KEY], "model.policy.checkpoint": {"transformer": "another"}}
    write(checkpoint, Path("other.ckpt"))
    monkeypatch.setattr("lit_vgrpo.launch.recipe_cli.inputs_of", lambda module, data: {})
    words = ["run/config.yaml", "name=new", "ckpt_path=other.ckpt", "trainer.max_epochs=2"]
    assert run(words) == 2
    assert "model.policy.checkpoint: " in capfd.readouterr().err.splitlines()[-1]
    with pytest.warns(UserWarning, match="model.policy.checkpoint: .* changed since the checkpoint was written"):
        assert run([*words, "allow_changes=true"]) == 0


def test_a_trainer_of_ones_own_warns(tiny_sd3, tmp_path):
    (tmp_path / "train.txt").write_text("a red circle\na blue square\n")
    data = {"train": str(tmp_path / "train.txt"), "heldout": None, "heldout_limit": None}
    trainer = make_trainer(tmp_path, 1)
    trainer.fit(make_module(tiny_sd3), datamodule=make_data(**data))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / "train.txt").write_text("a red circle\na blue triangle\n")
    with pytest.warns(UserWarning, match="data.train: prompts changed since the checkpoint was written"):
        trainer = make_trainer(tmp_path, 2)
        trainer.fit(make_module(tiny_sd3), datamodule=make_data(**data), ckpt_path=tmp_path / "a.ckpt")


# --- fingerprints ----------------------------------------------------------------------------------------------------


def test_weights_of_a_reward_and_a_row_of_prompts(tiny_sd3, tiny_clip, tmp_path):
    shutil.copytree(tiny_clip, tmp_path / "clip")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "colour": "red"}\n{"prompt": "b", "colour": "blue"}\n')

    def found(clip, prompts):
        module = make_module(tiny_sd3, reward=PickScore(str(clip), str(clip)))
        return inputs_of(module, make_data(train=str(prompts), heldout=None, heldout_limit=None))

    first = found(tiny_clip, tmp_path / "train.jsonl")
    assert first["model.reward pickscore"].keys() == {"checkpoint", "processor"}
    assert found(tmp_path / "clip", tmp_path / "train.jsonl") == first
    file = next((tmp_path / "clip").glob("*.safetensors"))
    tensors = load_file(file)
    tensors[max(tensors)].view(-1)[0] += 1
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "colour": "red"}\n{"prompt": "b", "colour": "green"}\n')
    second = found(tmp_path / "clip", tmp_path / "train.jsonl")
    assert {key for key in first if first[key] != second[key]} == {"model.reward pickscore", "data.train"}


def test_large_files_are_sampled(tmp_path, monkeypatch):
    monkeypatch.setattr(file_fingerprint, "READ_WHOLE", 1000)
    monkeypatch.setattr(file_fingerprint, "SAMPLES", 4)
    torch.manual_seed(0)
    tensors = {f"w{number}": torch.rand(64, 64) for number in range(20)}
    save_file(tensors, tmp_path / "a.safetensors")
    torch.save(tensors, tmp_path / "a.pt")
    assert zipfile.is_zipfile(tmp_path / "a.pt")
    before = {path: file_fingerprint.file_fingerprint(path) for path in tmp_path.iterdir()}
    for path in before:
        copy = path.with_name("b" + path.suffix)
        shutil.copy(path, copy)
        assert file_fingerprint.file_fingerprint(copy) == before[path]
    tensors["w7"][0, 5] += 1
    save_file(tensors, tmp_path / "b.safetensors")
    torch.save({**tensors, "w7": tensors["w7"]}, tmp_path / "b.pt")
    assert all(file_fingerprint.file_fingerprint(path.with_name("b" + path.suffix)) != before[path] for path in before)


def test_code_of_this_package_and_of_installed_ones_is_left_out():
    assert code_of(SD3Policy) == code_of(PickScore) == {}
    assert code_of(Brightness).keys() == {"helpers.py"}
