"""Every error of a recipe at once."""

from pathlib import Path
from typing import Literal

import pytest

from lit_vgrpo.config.schema import describe, recipe_errors, sound_parts
from lit_vgrpo.objectives import VGRPO
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies import Policy
from lit_vgrpo.rewards import Reward, ShapesReward


class Root:
    """A stand-in of nothing: a class with the kinds of hints that recipes meet."""

    def __init__(
        self,
        objective: Objective,
        rewards: list[Reward],
        kind: Literal["one", "two"] = "one",
        number: int | None = None,
        path: Path | None = None,
        seed: int = 0,
        limit: int = 1,
        width: int = None,  # type: ignore[assignment]  # noqa: RUF013  as older code says it
    ) -> None:
        self.arguments = (objective, rewards, kind, number, path, seed, limit, width)


GOOD = {"objective": {"class_path": "VGRPO"}, "rewards": ["ShapesReward"]}


def errors(**changes):
    return recipe_errors({"model": {**GOOD, **changes}}, {"model": Root}, {"model.seed": "seed_everything"})


def test_a_good_recipe_has_no_error():
    assert errors(number=3, kind="two", path="x", width=None) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"nmber": 3}, "model.nmber is not an option of Root. Did you mean number?"),
        ({"number": "x"}, "model.number=x has the wrong type. Give an int or null."),
        ({"limit": None}, "model.limit=null has the wrong type. Give an int."),
        (
            {"objective": {"class_path": "VGRPO", "init_args": {"rollout": "euler"}}},
            "model.objective.rollout=euler is not a mapping of RolloutSpec's options. Write {solver: ..., steps: ...}.",
        ),
        ({"kind": "tow"}, "model.kind=tow is not a choice. Did you mean two?"),
        ({"seed": 4}, "model.seed follows seed_everything. Set seed_everything=4 instead."),
        ({"rewards": ["ShapeReward"]}, "model.rewards[0]=ShapeReward is not an importable Reward."),
        ({"objective": "no.such.Class"}, "model.objective=no.such.Class is not an importable Objective."),
        ({"objective": {"clip": 1}}, "model.objective has no class_path."),
        ({"objective": {"class_path": "VGRPO", "clip": 1}}, "model.objective.clip is next to class_path."),
        (
            {"objective": {"class_path": "VGRPO", "init_args": {"rollout": {"step": 1}}}},
            "model.objective.rollout.step is not an option of RolloutSpec. Did you mean steps?",
        ),
        (
            {"objective": {"class_path": "VGRPO", "init_args": {"num_mc_samples": 0}}},
            "model.objective.num_mc_samples=0 ",
        ),
    ],
)
def test_one_error_one_line(changes, line):
    found = errors(**changes)
    assert len(found) == 1
    assert found[0].startswith(line)


def test_several_errors_are_all_found():
    recipe = {"model": {"nmber": 1, "kind": "x", "objective": "VGRPOO"}, "modl": 1}
    found = recipe_errors(recipe, {"model": Root}, {})
    assert [line.split(" ")[0] for line in found] == [
        "modl",
        "model.nmber",
        "model.kind=x",
        "model.objective=VGRPOO",
        "model.rewards",
    ]


def test_sound_parts_are_built_beside_wrong_ones():
    recipe = {"model": {"objective": "VGRPO", "rewards": ["ShapesReward", "Nothing"]}}
    parts = sound_parts(recipe, {"model": Root}, {})
    assert isinstance(parts["model.objective"], VGRPO)
    assert isinstance(parts["model.rewards[0]"], ShapesReward)


def test_hints_in_words():
    assert describe(float | list[int] | None) == "a number or a list of int or null"


def test_options_that_a_constructor_hands_on_are_known():
    def policy(**options):
        node = {"class_path": "UNetPolicy", "init_args": options}
        return recipe_errors({"policy": node}, {"policy": Policy | None}, {})

    assert policy(checkpoint="x", lora_rank=2, channels_last=True) == []
    (line,) = policy(checkpoint="x", lora_rnk=2)
    assert line == "policy.lora_rnk is not an option of UNetPolicy. Did you mean lora_rank?"
    assert policy(checkpoint="x", lora_rank="a")[0].startswith("policy.lora_rank=a is not a whole number. Use 1 to ")
    assert policy(lora_rank=2)[0].startswith("policy.checkpoint is missing: UNetPolicy needs it.")
