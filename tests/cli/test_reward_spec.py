import sys
from pathlib import Path

import pytest

from lit_vgrpo.config.recipe import Command, read_recipe
from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.build import build_reward
from lit_vgrpo.rewards import PythonReward

RECIPE = """
model:
  reward:
    class_path: Weighted
    init_args:
      rewards:
        - python: own_rewards:score
          images: pil
        - ShapesReward
      weights: [1.0, 0.5]
  untrained_reward:
    python: own_rewards:other
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return path


def test_a_class_of_the_current_folder(here, monkeypatch):
    lines = ["from lit_vgrpo.rewards import ShapesReward", "class Mine(ShapesReward):", "    pass"]
    (here / "rewards_of_this_folder.py").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert type(build_reward(["rewards_of_this_folder.Mine"]).rewards[0]).__name__ == "Mine"


@pytest.mark.parametrize("first", ["python:own_rewards:score", "{python: 'own_rewards:score'}"])
def test_a_function_with_options(first):
    (reward,) = build_reward([first, "images=pil", "options={'gain': 2}"]).rewards
    assert isinstance(reward, PythonReward)
    assert (reward.function, reward.images, reward.options) == ("own_rewards:score", "pil", {"gain": 2})


def test_a_recipe_with_its_held_out_reward(recipe):
    reward = build_reward([str(recipe)])
    assert reward.weight_of == {"score": 1.0, "shapes": 0.5, "other": 0.0}
    assert reward.rewards[0].images == "pil"
    assert build_reward(["tiny_shapes"]).part_names == ["colour", "shape", "place"]


def test_overrides_of_a_recipe(recipe):
    reward = build_reward([str(recipe), "model.reward=python:own_rewards:third"])
    assert reward.part_names == ["third", "other"]
    for inline in ("[python:own_rewards:a, ShapesReward]", "[{python: 'own_rewards:a', images: pil}, ShapesReward]"):
        words = [str(recipe), f"model.reward={{class_path: Weighted, init_args: {{rewards: {inline}}}}}"]
        assert build_reward(words).part_names == ["a", "shapes", "other"]


def test_the_key_of_the_file_is_an_override(recipe):
    for before, options in (("ShapesReward", {}), ("{python: 'a:b', images: pil}", {"images": "pil"})):
        words = [str(recipe), f"model.reward={before}", "model.reward.python=own_rewards:third"]
        init_args = {"function": "own_rewards:third", **options}
        found = read_recipe(Command.parse(words)).values["model"]["reward"]
        assert found == {"class_path": "PythonReward", "init_args": init_args}
    words = [
        str(recipe),
        "model.reward=[ShapesReward,ShapesReward]",
        "model.reward.rewards[1].python=own_rewards:third",
    ]
    assert build_reward(words).part_names[:2] == ["shapes", "third"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No reward given"),
        (["PickScor"], "reward=PickScor is not a known class. Did you mean PickScore?"),
        (["JPEGCompressibility", "quality=0"], "reward.quality=0: Use 1 or more"),
        (["JPEGCompressibility", "photo.png"], "photo.png is not an option of a reward"),
        (["no_such.yaml"], "no_such.yaml is not a recipe"),
        (["none.yaml"], "no model.reward"),
        (["trained.yaml"], 'model.untrained_reward and model.reward both have a "score"'),
    ],
)
def test_mistakes_are_lines(here, words, said):
    Path("none.yaml").write_text("data: {}\n")
    Path("trained.yaml").write_text(RECIPE.replace("own_rewards:other", "own_rewards:score"))
    with pytest.raises(UserError) as caught:
        build_reward(words)
    assert said in str(caught.value)
