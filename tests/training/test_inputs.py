"""A run goes on with the reward's code, prompts and weights that it was trained with, or says what has changed."""

import shutil
import sys
from pathlib import Path

import pytest
from commands import run
from conftest import TINY_RECIPE
from helpers import make_data, make_module, make_trainer

from lit_vgrpo.config.recipe import Command, read_recipe
from lit_vgrpo.launch.build import build_recipe
from lit_vgrpo.rewards import Frames, PythonReward
from lit_vgrpo.training.resume_guard import changes, inputs_of

pytestmark = pytest.mark.slow

LAST = Path("run/checkpoints/last.ckpt")
REWARD = """
from lit_vgrpo.rewards import Reward
class Brightness(Reward):
    name = "brightness"

    def __call__(self, images, prompts, rows):
        return images.mean(dim=(1, 2, 3))
"""
FUNCTION = """
def contrast(images, prompts):
    return images.std(dim=(1, 2, 3))
"""
OWN = ("own_reward", "own_function")
REWARDS = "{class_path: Weighted, init_args: {rewards: [own_reward.Brightness, {python: own_function:contrast}]}}"


@pytest.fixture(scope="module")
def ran(tmp_path_factory, tiny_sd3):
    """A folder with a run and all that it read: ``own_*.py``, ``train.txt`` and ``pipeline``."""
    place = tmp_path_factory.mktemp("inputs")
    shutil.copytree(tiny_sd3, place / "pipeline")
    for name, text in (("own_reward", REWARD), ("own_function", FUNCTION)):
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
def inside(ran, here, monkeypatch):
    """A copy of it as the working directory: all of it has moved."""
    shutil.copytree(ran, here, dirs_exist_ok=True)
    monkeypatch.syspath_prepend(str(here))
    for name in OWN:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield here
    for name in OWN:
        sys.modules.pop(name, None)


def replaced(file, old, new):
    def change():
        text = Path(file).read_text()
        assert old in text
        Path(file).write_text(text.replace(old, new))

    return change


CHANGES = {
    "class": (replaced("own_reward.py", "return images", "return -images"), "model.reward brightness: own_reward.py"),
    "function": (replaced("own_function.py", "images.std", "-images.std"), "model.reward contrast: own_function.py"),
    "prompts": (replaced("train.txt", "blue", "yellow"), "data.train: prompts"),
    "scheduler": (
        replaced("pipeline/scheduler/scheduler_config.json", '"shift": ', '"shift": 1'),
        "model.policy.checkpoint: scheduler/scheduler_config.json",
    ),
}


@pytest.mark.parametrize(("change", "what"), CHANGES.values(), ids=CHANGES)
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
    command = Command.parse(["run/config.yaml", "trainer.max_epochs=2", "allow_changes=true"], resume=True)
    cli = build_recipe(read_recipe(command), make_folder=False)
    assert f"Changed: {what} changed since the checkpoint was written" in cli.opening()


def test_a_reward_within_another_counts(inside, tiny_sd3):
    reward = PythonReward("own_function:contrast")
    alone, framed = (inputs_of(make_module(tiny_sd3, reward=one), None) for one in (reward, Frames(reward)))
    assert framed == alone
    assert framed["model.reward contrast"].keys() == {"own_function.py"}


def test_with_allow_changes_it_goes_on_and_the_next_checkpoint_knows_the_new_ones(inside, capfd):
    CHANGES["prompts"][0]()
    words = ["run/config.yaml", "--resume", "trainer.enable_progress_bar=false"]
    assert run([*words, "trainer.max_epochs=2", "allow_changes=true"]) == 0
    assert "Changed: data.train: prompts changed since" in capfd.readouterr().out
    assert run([*words, "trainer.max_epochs=3"]) == 0
    assert "Changed" not in capfd.readouterr().out


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


def test_a_file_known_by_another_path_is_no_change(here):
    for name in ("a/train.txt", "b/train.txt"):
        (here / name).parent.mkdir()
        (here / name).write_text("a cat\n")
    for before, now, count in (
        ("train.txt", "a/train.txt", 0),  # the run was started inside a
        (str(here / "a/train.txt"), "a/train.txt", 0),
        ("a/train.txt", "b/train.txt", 1),
        ("gone.txt", "a/train.txt", 1),
    ):
        assert len(changes({"data": {"train": before}}, {"data": {"train": now}})) == count, before


def test_servers_may_be_added_to_a_reward():
    one, two = ({"model": {"reward": {"url": url, "name": "http"}}} for url in ("http://a", ["http://a", "http://b"]))
    assert changes(one, two) == changes(two, one) == []


def test_an_option_added_since_changes_nothing_until_it_is_set():
    for empty in (None, {}, []):
        assert changes({"model": {}}, {"model": {"new": empty}}) == [], empty
        assert changes({"model": {"old": 1}}, {"model": {"old": 1, "new": empty}}) == [], empty
    assert changes({"model": {}}, {"model": {"untrained_reward": "CLIPScore"}}) == []  # nothing is trained on it
    assert changes({"model": {}}, {"model": {"new": 1}}) == ["model.new: not set in the checkpoint, 1 now"]
    assert changes({"model": {"old": ["a"]}}, {"model": {"old": []}}) == [
        "model.old[0]: a in the checkpoint, not set now"
    ]
