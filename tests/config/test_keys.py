"""The key that a message names is the key to type."""

import re
import shlex

import pytest
from helpers import repeating

from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.build import build

KEY = re.compile(r"\b(?:model|data|trainer)(?:\.\w+|\[\d+\])+(?==| to\b)")
SEVERAL = 'model.reward="{class_path: Weighted, init_args: {rewards: [JPEGCompressibility, PickScore]}}"'
FID = 'trainer.callbacks="[EMA, {class_path: FID, init_args: {reference: nowhere, features: no.pt}}]"'
BROKEN = {
    "model.reward=PickScore": "model.reward.checkpoint",
    SEVERAL: "model.reward.rewards[1].checkpoint",
    f"{SEVERAL} model.reward.rewards[1].checkpoint=/none": "model.reward.rewards[1].checkpoint",
    f"{SEVERAL} model.reward.weights=[0,0]": "model.reward.weights",
    "model.heldout_reward=ImageReward": "model.heldout_reward.tokenizer",
    "model.reward=AestheticScore": "model.reward.clip",
    "model.reward=python:math:squirt": "model.reward.function",
    "model.reward=HTTPReward model.reward.url=http://x/score model.reward.connection.retries=-1": (
        "model.reward.connection.retries"
    ),
    FID: "trainer.callbacks[1].features",
    "trainer.callbacks=[EMA] trainer.callbacks[0].decay=1": "trainer.callbacks[0].decay",
    "model.policy.lora_alpha=4": "model.policy.lora_rank",
    "model.policy.lora_rank=4 model.policy.lora_targets=[]": "model.policy.lora_targets",
    "model.policy.start_weights=ema": "model.policy.start_from",
    "model.policy.checkpoint=/none": "model.policy.checkpoint",
    "model.objective.rollout.steps=0": "model.objective.rollout.steps",
    "model.objective=DGPO": "model.objective.noisiest",
    "model.optimizer.betas=[2,2]": "model.optimizer.betas",
    "data.micro_batch_size=3": "data.micro_batch_size",
    "data.heldout=null data.train=null": "data.train",
    "trainer.max_epochs=": "trainer.max_epochs",
    "trainer.accelerator=gup": "trainer.accelerator",
    "trainer.strategy=ddpp": "trainer.strategy",
}


def errors(words):
    """Return the errors of a recipe and its overrides, as the command reports them."""
    try:
        return build(words, make_folder=False).errors()
    except UserError as error:
        return error.errors


REPEATS = (
    *(f"{SEVERAL} model.reward.rewards[1].checkpoint=/none", "model.reward=AestheticScore"),
    *("model.policy.lora_rank=4 model.policy.lora_targets=[]",),
    *("model.policy.start_weights=ema", "model.optimizer.betas=[2,2]", "trainer.strategy=ddpp"),
)
"""Named as another option of the same part is."""


@pytest.mark.parametrize(
    ("typed", "named"), repeating(BROKEN.items(), slow=[(typed, BROKEN[typed]) for typed in REPEATS])
)
def test_the_key_that_a_message_names_can_be_typed(tiny_recipe, typed, named):
    words = [str(tiny_recipe), *shlex.split(typed)]
    found = errors(words)
    keys = {key for line in found for key in KEY.findall(line)}
    assert named in keys, found
    for key in keys:
        again = errors([*words, f"{key}=1"])
        unknown = [line for line in again if re.search(r"is not an option|does not exist: |cannot be set", line)]
        assert unknown == [], f"{key} was named by {found}"


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("trainer.max_epochs=", "trainer.max_epochs= has no value. Use 1 or more, or -1, or null."),
        ("data.train=null", "data.train=null has the wrong type. Give a text or a mapping or a list of"),
        ("name=None", "name=None is Python syntax. Write name=null."),
        ("trainer.accelerator=gup", "trainer.accelerator=gup is not a choice. Did you mean gpu?"),
        (
            "model.reward=[PickScore,HPSv2]",
            "model.reward is a list, but accepts one Reward. Put them into class_path: W",
        ),
        ("model.reward=python:math:squirt", "model.reward.function=math:squirt cannot be imported (AttributeError"),
        ("trainer.callbacks=[EMA,EMA]", "trainer.callbacks contains EMA twice, as [0] and [1]. Leave one"),
        ("trainer.callbacks[3].decay=1", "trainer.callbacks[3] does not exist: trainer.callbacks is not a list"),
        ("model.objective=null", "model.objective=null has the wrong type. Give an Objective."),
        ("trainer.barebones=true", "trainer.barebones=true switches off checkpoints, metrics and"),
    ],
)
def test_a_message_says_what_to_type(tiny_recipe, typed, line):
    (found,) = errors([str(tiny_recipe), typed])
    assert found.startswith(line)


def test_an_entry_of_a_list_can_be_set(tiny_recipe):
    several = "{class_path: Weighted, init_args: {rewards: [JPEGCompressibility, ShapesReward]}}"
    words = [f"model.reward={several}", "model.reward.rewards[0].quality=20", "model.reward.weights=[1,2]"]
    reward = build([str(tiny_recipe), *words], make_folder=False).model.reward
    assert reward.rewards[0].quality == 20
    assert list(reward.weight_of.values()) == [1, 2]
    appended = build([str(tiny_recipe), "trainer.callbacks+=EMA", "trainer.callbacks[0].decay=0.5"], make_folder=False)
    assert [c.decay for c in appended.trainer.callbacks if type(c).__name__ == "EMA"] == [0.5]
