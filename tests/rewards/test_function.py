import math
import re
from decimal import Decimal
from functools import partial

import numpy as np
import pytest
import torch

from lit_vgrpo.rewards import (
    JPEGCompressibility,
    PythonReward,
    Reward,
    RewardError,
    RewardOutage,
    Weighted,
    as_weighted,
)
from lit_vgrpo.rewards.base import described

IMAGES = torch.tensor([0.0, 1.0, 0.2]).view(3, 1, 1, 1).expand(3, 3, 4, 4).contiguous()
PROMPTS = ["a", "b", "c"]
ROWS = [{"bonus": 0}, {"bonus": 1}, {"bonus": None}]

MODULE = """
import numpy as np

def brightness(images, prompts):
    return images.mean((1, 2, 3))

def with_rows(images, prompts, rows):
    return [row["bonus"] for row in rows]

def of_pictures(images, prompts, rows, channel=0, factor=1.0):
    return np.array([factor * image.getpixel((0, 0))[channel] for image in images])

def of_arrays(images, prompts, rows):
    assert images.dtype == np.uint8
    return images.max(axis=(1, 2, 3)).tolist()

async def waits(images, prompts):
    return [1.0] * len(prompts)

def needs_more(images, prompts, rows, model):
    return 0

class Scorer:
    @staticmethod
    def score(images, prompts):
        return [1.0] * len(prompts)
"""


@pytest.fixture(autouse=True)
def module(here):
    (here / "own_rewards.py").write_text(MODULE)


def score(function, **options):
    return PythonReward(f"own_rewards:{function}", **options)(IMAGES, PROMPTS, ROWS)


def test_functions_of_two_and_of_three_arguments():
    torch.testing.assert_close(score("brightness"), torch.tensor([0.0, 1.0, 0.2]))
    assert score("with_rows")[:2].tolist() == [0, 1]
    assert math.isnan(score("with_rows")[2])  # None is a failure, not a 0
    assert score("Scorer.score").tolist() == [1, 1, 1]


def test_pictures_and_arrays():
    assert score("of_pictures", images="pil").tolist() == [0, 255, 51]
    assert score("of_pictures", images="pil", options={"channel": 2, "factor": 0.5}).tolist() == [0, 127.5, 25.5]
    assert score("of_arrays", images="numpy").tolist() == [0, 255, 51]
    assert score("of_arrays", images="numpy").dtype == torch.float32


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("no_such_module:f", "imported: No module named 'no_such_module' in .*, next to the recipe"),
        ("own_rewards", r"is not a callable object\). Use one of: brightness, needs_more, of_arrays, of_pictures, wai"),
        (
            "own_rewards:brightnes",
            r"module 'own_rewards' has no attribute 'brightnes'\). Did you mean brightness\?",
        ),
        ("own_rewards:needs_more", r"missing a required argument: .* Name a function of \(images, prompts\) or"),
        ("own_rewards:waits", "own_rewards:waits is an async function. .* asyncio.run, and .* set concurrent=True."),
        ("decimal:Decimal", r"is a class. Name a function of .* is named by class_path: decimal.Decimal."),
    ],
)
def test_what_cannot_be_called_is_found_by_check(function, said):
    reward = PythonReward(function)
    (error,) = reward.check()
    with pytest.raises(RewardError, match=said):
        reward.load()
    assert "\n" not in error


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda scores: (scores[:1].tolist(), {}), r"tuple \(\[0.0\], {}\)"),
        (lambda scores: (scores, scores, {}), r"tuple \(tensor.*"),
        (lambda scores: dict(enumerate(scores[:1].tolist())), "dict {0: 0.0}"),
        (lambda scores: "012", "str '012'"),
        (lambda scores: {1, 2, 3}, "set {1, 2, 3}"),
        (lambda scores: None, "NoneType None"),
        (lambda scores: [0.0, 1.0], r"list \[0.0, 1.0\]"),
        (lambda scores: scores.numpy()[:2], r"a float32 array of shape \(2,\)"),
        (lambda scores: scores.numpy().max(), r"a float32 array of shape \(\)"),
        (lambda scores: scores[:, None], r"a float32 tensor of shape \(3, 1\)"),
        (lambda scores: scores * 1j, r"a complex64 tensor of shape \(3,\)"),
        (lambda scores: scores.mean(), r"a float32 tensor of shape \(\)"),
    ],
)
def test_what_is_no_number_per_image_ends_the_run_with_file_and_line(returned, said):
    def bad(images, prompts):
        return returned(images.mean((1, 2, 3)))

    with pytest.raises(RewardOutage, match=rf'^.*test_function.py:\d+: Reward "bad" returned {said}. Return .* of .*3'):
        Weighted([bad]).score(IMAGES, PROMPTS, ROWS)


@pytest.mark.parametrize("value", [[1.0, 2.0], "good", {}, 10**400, torch.ones(2)])
def test_a_value_that_is_no_number_fails_its_image_and_is_named(value):
    def bad(images, prompts):
        return [value if prompt == "b" else 1 for prompt in prompts]

    batch = Weighted([bad]).score(IMAGES, PROMPTS, ROWS)
    assert batch.total.isnan().tolist() == [False, True, False]
    said = rf"test_function.py:\d+: returned {re.escape(described(value))} for an image. Return a number, or None"
    assert re.search(said, batch.errors["bad"])


def test_a_missing_score_is_told_from_nan():
    def some(images, prompts):
        return [None if prompt == "b" else math.nan if prompt == "c" else 1 for prompt in prompts]

    weighted = Weighted([some])
    errors = [weighted.score(IMAGES[one], PROMPTS[one], ROWS[one]).errors["some"] for one in (slice(2), slice(2, 3))]
    assert errors[0].endswith(': returned None for prompt "b"')
    assert errors[1].endswith(': returned NaN or infinity for prompt "c"')


@pytest.mark.parametrize(
    "returned",
    [
        lambda scores: (score for score in scores.tolist()),
        lambda scores: tuple(scores.split(1)),
        lambda scores: scores.double().numpy().astype(object),
        lambda scores: [np.float64(score) for score in scores],
        lambda scores: [Decimal(score) for score in scores.tolist()],
        lambda scores: scores.double().requires_grad_(),
    ],
)
def test_numbers_of_every_kind_are_accepted(returned):
    batch = Weighted([lambda images, prompts: returned(images.mean((1, 2, 3)))]).score(IMAGES, PROMPTS, ROWS)
    torch.testing.assert_close(batch.total, torch.tensor([0.0, 1.0, 0.2]))
    assert not batch.total.requires_grad


def redness(images, prompts):
    return images[:, 0].mean((1, 2))


def test_a_function_is_a_reward():
    weighted = Weighted([redness, JPEGCompressibility()], weights=[1.0, 0.0])
    assert weighted.part_names == ["redness", JPEGCompressibility.name]
    torch.testing.assert_close(weighted(IMAGES, PROMPTS, ROWS), torch.tensor([0.0, 1.0, 0.2]))
    assert as_weighted(weighted) is weighted
    assert as_weighted(redness, "model.reward").rewards[0].key == "model.reward"
    assert as_weighted([redness, JPEGCompressibility()]).weight_of == {"redness": 0.5, "jpeg": 0.5}


def test_a_function_may_change_its_list_of_prompts():
    def reads(images, prompts):
        prompts.append("an image of something else")
        return [float(prompt == "a") for prompt in prompts[:-1]]

    assert as_weighted(reads).score(IMAGES, ["a", "b", "a"], ROWS).total.tolist() == [1, 0, 1]


def test_a_third_argument_with_a_value_of_its_own_is_an_option():
    def inverts(images, prompts, invert=False):
        return -redness(images, prompts) if invert else redness(images, prompts)

    def reads(images, prompts, metadata=()):
        return [len(metadata)] * len(prompts)

    def may_read(images, prompts, extra=None):
        return [len(extra)] * len(prompts)

    scores = [Weighted([one])(IMAGES, PROMPTS, ROWS) for one in (inverts, reads, may_read)]
    torch.testing.assert_close(scores[0], torch.tensor([0.0, 1.0, 0.2]))
    assert scores[1].tolist() == scores[2].tolist() == [3, 3, 3]


class Channel(torch.nn.Module):
    def forward(self, images, prompts):
        return redness(images, prompts)


class Change(torch.nn.Module):
    def forward(self, images, prompts, references=None):
        return redness(images, prompts)


def test_a_network_is_called_as_its_forward():
    torch.testing.assert_close(Weighted([Channel()])(IMAGES, PROMPTS, ROWS), torch.tensor([0.0, 1.0, 0.2]))
    assert PythonReward(Change()).takes_references
    dropping = torch.nn.Sequential(torch.nn.Dropout(0.9))
    dropping.forward = lambda images, prompts: dropping[0](images).mean((1, 2, 3))
    torch.testing.assert_close(Weighted([dropping])(IMAGES, PROMPTS, ROWS), IMAGES.mean((1, 2, 3)))
    named = [Channel(), partial(redness), lambda images, prompts: redness(images, prompts)]
    assert Weighted(named).part_names == ["Channel", "redness", "lambda"]


def test_a_class_or_a_text_is_no_reward():
    with pytest.raises(TypeError, match="the class JPEGCompressibility is not a reward. Pass an instance"):
        as_weighted(JPEGCompressibility)
    with pytest.raises(TypeError, match="'PickScore' is not a reward"):
        Weighted(["PickScore"])
    with pytest.raises(TypeError, match=r"^Linear takes \(input\) and cannot be called with \(images, prompts\): too"):
        as_weighted(torch.nn.Linear(3, 1))
    with pytest.raises(TypeError, match="Nameless has no name. Set its attribute name"):
        as_weighted(type("Nameless", (Reward,), {"__call__": redness})())


def test_rewards_that_load_nothing_are_tried():
    def refuses(images, prompts):
        raise KeyError("seed")

    def one_number(images, prompts):
        return images.mean()

    reward = Weighted([redness, refuses, one_number])
    first, second = reward.errors_on(IMAGES[:2], [{"prompt": "a"}, {"prompt": "b"}])
    assert '"refuses" failed on random images: ' in first
    assert ".py:" in first
    assert first.endswith(": KeyError: 'seed'.")
    assert second.count("one_number") == 1
    assert second.endswith("returned a float32 tensor of shape (). Return a float32 tensor of shape (2,).")
    assert reward.errors_on(IMAGES[:2], [{"prompt": "a", "rewards": "redness"}]) == []


@pytest.mark.parametrize("score", [None, float("nan")])
def test_a_reward_that_scores_no_random_image_gives_a_warning(score):
    def silent(images, prompts):
        return [score for _ in prompts]

    with pytest.warns(UserWarning, match='Reward "silent" returned no score for any of 2 random images'):
        assert Weighted([silent]).errors_on(IMAGES[:2], [{"prompt": "a"}, {"prompt": "b"}]) == []
