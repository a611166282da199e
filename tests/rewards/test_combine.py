import math

import pytest
import torch

from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.rewards import Frames, Reward, RewardError, RewardOutage, Scores, Weighted

IMAGES = torch.linspace(0, 1, 4).view(4, 1, 1, 1).expand(4, 3, 8, 8).contiguous()
PROMPTS = ["a", "b", "c", "d"]
ROWS = [{"number": i} for i in range(4)]


class Field(Reward):
    """Scores the row's number, after whatever ``trouble`` does."""

    def __init__(self, name="field", trouble=None):
        self.name = name
        self.trouble = trouble
        self.calls = 0
        self.loads = 0

    def load(self):
        self.loads += 1

    def check(self):
        return [f"{self.name} has an error"]

    def __call__(self, images, prompts, rows):
        self.calls += 1
        scores = torch.tensor([float(row["number"]) for row in rows])
        return self.trouble(scores, images, rows) if self.trouble else scores


def raises_on_two(scores, images, rows):
    if 2.0 in scores:
        raise OSError("picture 2\n  is cursed")
    return scores


def score(*rewards, weights=None, images=IMAGES, rows=ROWS):
    return Weighted(list(rewards), weights).score(images, PROMPTS, rows)


def test_the_total_is_the_weighted_sum_and_the_mean_by_default():
    one, two = Field("one"), Field("two", lambda scores, *_: scores * 10)
    assert score(one, two, weights=[2, -0.5]).total.tolist() == [0, -3, -6, -9]
    batch = score(one, two)
    assert batch.total.tolist() == [0, 5.5, 11, 16.5]
    assert batch.parts["two"].tolist() == [0, 10, 20, 30]
    assert batch.total.dtype == torch.float32
    assert batch.ok.tolist() == [True] * 4
    assert batch.errors == {}


def test_only_the_image_that_raises_is_lost_and_none_at_weight_zero():
    good, bad = Field("good"), Field("bad", raises_on_two)
    batch = score(good, bad)
    assert batch.ok.tolist() == [True, True, False, True]
    assert math.isnan(batch.total[2])
    assert batch.total[[0, 1, 3]].tolist() == [0, 1, 3]
    assert batch.parts["good"].tolist() == [0, 1, 2, 3]
    assert math.isnan(batch.parts["bad"][2])
    assert batch.errors["bad"].endswith("test_combine.py:37: OSError: picture 2 is cursed.")
    assert bad.calls == 5
    unweighted = score(good, bad, weights=[1, 0])
    assert unweighted.total.tolist() == [0, 1, 2, 3]
    assert unweighted.ok.all()
    assert unweighted.errors == batch.errors


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_nan_and_infinite_scores_count_as_failed_and_never_as_zero(value):
    batch = score(Field("bad", lambda scores, *_: torch.where(scores == 1, value, scores)))
    assert batch.ok.tolist() == [True, False, True, True]
    assert math.isnan(batch.total[1])
    assert math.isnan(batch.parts["bad"][1])
    assert batch.errors["bad"].endswith(': returned NaN or infinity for prompt "b"')


def test_an_image_that_is_not_finite_fails_and_reaches_no_reward():
    images = IMAGES.clone()
    images[1, 0, 3, 3] = math.nan
    seen = []
    batch = score(Field("field", lambda scores, images, _: seen.append(images) or scores), images=images)
    assert batch.ok.tolist() == [True, False, True, True]
    assert batch.parts["field"][[0, 2, 3]].tolist() == [0, 2, 3]
    assert [len(images) for images in seen] == [3]
    assert batch.errors == {"field": "1 of 4 images have NaN or infinite pixels"}
    assert not score(Field(), images=torch.full_like(IMAGES, math.inf)).ok.any()


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda scores, *_: scores[:3], r"a float32 tensor of shape \(3,\)"),
        (lambda scores, *_: scores.double(), r"a float64 tensor of shape \(4,\)"),
        (lambda scores, *_: scores.tolist(), r"list \[0.0, .*"),
        (lambda scores, *_: (scores, {}), r"tuple \(tensor.*"),
    ],
)
def test_a_broken_contract_stops_the_run_and_names_the_reward(returned, said):
    wanted = r"Return a float32 tensor of shape \(4,\)"
    with pytest.raises(RewardError, match=rf'test_combine.py:\d+: Reward "odd" returned {said}. {wanted}'):
        score(Field("good"), Field("odd", returned))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.cuda.OutOfMemoryError])
def test_errors_outside_the_image_are_not_swallowed(error):
    def stop(*_):
        raise error

    said = rf'^Reward "bad" ran out of memory: .*test_combine.py:\d+: {error.__name__}. Give it fewer images per call'
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else pytest.raises(RewardOutage, match=said):
        score(Field("bad", stop))


def test_images_are_rounded_once_before_all_rewards():
    seen = []
    keep = Field("keep", lambda scores, images, _: seen.append(images) or scores)
    score(keep, Field("more", keep.trouble), images=IMAGES * 0.9 + 0.001)
    assert torch.equal(seen[0], seen[1])
    assert seen[0].data_ptr() != seen[1].data_ptr()  # each reward has its own copy
    assert seen[0].dtype == torch.float32
    steps = seen[0] * 255
    torch.testing.assert_close(steps, steps.round(), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen[0], IMAGES * 0.9 + 0.001, atol=0.51 / 255, rtol=0)


def test_part_names_are_unique_and_leave_the_metrics_keys_alone():
    names = ["a", "a", "a_2", "mean", "reward", "a"]
    assert Weighted([Field(name) for name in names]).part_names == ["a", "a_2", "a_2_2", "mean_2", "reward_2", "a_3"]


def test_calling_gives_the_total_and_check_and_load_reach_every_part():
    one, two = Field("one"), Field("two")
    weighted = Weighted([one, two])
    assert weighted(IMAGES, PROMPTS, ROWS).tolist() == [0, 1, 2, 3]
    assert weighted.check() == ["one has an error", "two has an error"]
    weighted.load()
    assert one.loads == two.loads == 2


def test_scores_are_clipped_and_the_parts_stay_as_they_are():
    weighted = Weighted([Field("a"), Field("b"), Field("c")], [1, 2, 1], [(1.0, 2.0), None, (None, 0.5)])
    batch = weighted.score(IMAGES, PROMPTS, ROWS)
    assert weighted.shaped("a", batch.parts).tolist() == [1, 1, 2, 2]
    assert weighted.shaped("c", batch.parts).tolist() == [0, 0.5, 0.5, 0.5]
    assert batch.total.tolist() == [1, 3.5, 6.5, 8.5]
    assert batch.parts["a"].tolist() == [0, 1, 2, 3]
    failed = Weighted([Field("bad", raises_on_two)], None, [(0.0, 1.0)])
    assert failed.score(IMAGES, PROMPTS, ROWS).total.isnan().tolist() == [False, False, True, False]


MIXED = [{"number": 0}, {"number": 1, "rewards": "a"}, {"number": 2, "rewards": ["b"]}, {"number": 3, "rewards": []}]


def test_a_row_names_the_rewards_that_apply_to_it():
    a, b = Field("a"), Field("b", raises_on_two)
    weighted = Weighted([a, b], [1, 10])
    batch = weighted.score(IMAGES, PROMPTS, MIXED)
    assert batch.applies["a"].tolist() == [True, True, False, True]
    assert batch.applies["b"].tolist() == [True, False, True, True]
    assert batch.total[[0, 1, 3]].tolist() == [0, 1, 33]
    assert batch.ok.tolist() == [True, True, False, True]  # the third failed, it was not left out
    assert batch.parts["a"].isnan().tolist() == [False, False, True, False]
    joined = Scores.joined([batch, batch])
    assert joined.applies["b"].tolist() == [True, False, True, True] * 2
    assert joined.ok.tolist() == batch.ok.tolist() * 2
    assert joined.errors == batch.errors


def test_a_reward_that_applies_to_no_image_is_not_called():
    a, b = Field("a"), Field("b")
    batch = Weighted([a, b]).score(IMAGES, PROMPTS, [{"number": 1, "rewards": "a"}] * 4)
    assert b.calls == 0
    assert batch.ok.all()
    assert batch.parts["b"].isnan().all()


def test_rewards_that_are_only_looked_at_apply_wherever_none_of_them_is_named():
    weighted = Weighted([Field("a"), Field("b"), Field("seen"), Field("shown")], [1, 1, 0, 0])
    batch = weighted.score(IMAGES, PROMPTS, [{"number": i, "rewards": n} for i, n in enumerate(["a", "seen", "b", []])])
    assert batch.applies["seen"].all()
    assert batch.applies["shown"].tolist() == [True, False, True, True]
    assert batch.applies["a"].tolist() == [True, True, False, True]


def test_a_sum_is_extended_by_others():
    trained, other = Weighted([Field("a")], [2.0]), Weighted([Field("c")], None, [(0.0, 1.0)])
    both = trained.observing(other)
    batch = both.score(IMAGES, PROMPTS, ROWS)
    assert batch.total.tolist() == [0, 2, 4, 6]
    assert other.total(batch.parts, batch.applies).tolist() == [0, 1, 1, 1]
    logged = Weighted([Field("a"), Field("b")], [1.0, 0.0]).observing(other)  # a row may name the logged one
    batch = logged.score(IMAGES, PROMPTS, [{"number": i, "rewards": ["a", "b"]} for i in range(4)])
    assert other.total(batch.parts, batch.applies).tolist() == [0, 1, 1, 1]
    assert trained.observing(None) is trained
    with pytest.raises(ValueError, match='untrained_reward and model.reward both have a "a"'):
        trained.observing(Weighted([Field("a")]))


def test_rounding_to_uint8():
    values = torch.tensor([-0.5, 0.0, 0.49 / 255, 0.51 / 255, 254.4 / 255, 1.0, 7.0])
    assert to_uint8(values).tolist() == [0, 0, 0, 1, 254, 255, 255]
    assert to_uint8(values.half()).dtype == torch.uint8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": [1.0, 2.0]}, r"weights=\[1.0, 2.0\] or clips=\[None\] does not match 1 rewards"),
        ({"clips": [(1.0, 1.0)]}, r"clips=\[1.0, 1.0\] is an empty range"),
        ({"rewards": []}, r"rewards=\[\] is empty. Name at least one"),
    ],
)
def test_a_wrong_combination_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Weighted(**{"rewards": [Field()], **options})


def test_counts_and_shapes_must_agree():
    said = r"images \(B, 3, H, W\) or videos \(B, F, 3, H, W\) with B prompts and rows"
    for images, prompts in ((IMAGES, PROMPTS[:3]), (IMAGES[:, :1], PROMPTS)):
        with pytest.raises(ValueError, match=said):
            Weighted([Field()]).score(images, prompts, ROWS)


def test_a_reward_explains_its_failures_without_control_characters():
    def trouble(scores, images, rows):
        raise SystemExit("\x1b[2Jgone\nwrong")

    batch = score(Field("bad", trouble))
    assert batch.errors["bad"].endswith(".py:231: SystemExit: ?[2Jgone wrong.")

    def tells(scores, images, rows):
        own.failure = "\x1b[2J told\r"
        return scores * math.nan

    own = Field("own", tells)
    assert score(own).errors == {"own": "?[2J told"}


def spoil(scores, images, rows):
    """Change everything that a reward receives, and fail for more than one image."""
    images.mul_(0.5)
    for row in rows:
        row["words"].append(row.pop("number"))
    if len(rows) > 1:
        raise OSError("one image at a time, please")
    return scores + images.mean((1, 2, 3))


def test_what_a_reward_changes_changes_nothing_else():
    """Not another reward's images or rows, its own retry, the caller's, or the next row if a group shares one."""
    row, prompts = {"number": 1, "words": []}, [*PROMPTS]
    look = Field("look", lambda scores, images, rows: scores + images.mean((1, 2, 3)) + len(rows[0]["words"]))
    spoils = [Field("spoils", spoil), Weighted([Field("inner", spoil), look], [0.0, 1.0])]
    expected = 1 + to_uint8(IMAGES).float().mean((1, 2, 3)) / 255
    for reward in (*spoils, Frames(spoils[0], every=1)):
        images = IMAGES[:, None] if isinstance(reward, Frames) else IMAGES
        given = images.clone()
        for _ in range(2):
            batch = Weighted([reward, look], [1.0, 1.0]).score(given, prompts, [row] * 4)
            torch.testing.assert_close(batch.parts["look"], expected)
        own = expected if reward.name == "weighted" else 1 + (expected - 1) / 2
        torch.testing.assert_close(batch.parts[reward.name], own)
        assert torch.equal(given, images)
    assert (row, prompts) == ({"number": 1, "words": []}, PROMPTS)
    pops = Field("pops", lambda scores, images, rows: scores + sum(row.pop("number") for row in rows))
    assert score(pops, rows=[row] * 4).total.tolist() == [5] * 4  # at once, not one by one
    assert pops.calls == 1


class Asks(Field):
    def prompt_error(self, prompt, row):
        row["words"].append(row.pop("number"))

    def take_counts(self):
        self.counts["calls"] += 1
        return self.counts


def test_questions_about_a_prompt_get_a_copy_too_and_returned_values_may_be_kept():
    buffer = torch.zeros(1)

    def reused(scores, images, rows):
        if len(scores) > 1:
            raise OSError("one image at a time, please")
        return buffer.copy_(scores)

    asks, row = Asks("asks", reused), {"number": 1, "words": []}
    asks.counts = {"calls": 0}
    weighted = Weighted([asks])
    assert weighted.errors_of_prompt("a", row) == {}
    assert row == {"number": 1, "words": []}
    first, second = (weighted.score(IMAGES, PROMPTS, ROWS) for _ in range(2))
    assert first.total.tolist() == [0, 1, 2, 3]
    assert [batch.counts for batch in (first, second)] == [{"asks": {"calls": 1}}, {"asks": {"calls": 2}}]


def test_a_reward_that_raises_on_several_images_only_is_reported_as_slow():
    def alone(scores, *_):
        if len(scores) > 1:
            raise OSError("too many")
        return scores

    with pytest.warns(UserWarning, match=r'^Reward "one" raised on 4 images at once, .*: .*OSError: too many'):
        assert score(Field("one", alone)).total.tolist() == [0, 1, 2, 3]


def test_a_sum_in_a_sum_keeps_reasons_counts_and_videos():
    class Server(Field):
        takes_videos = True

        def take_counts(self):
            return {"retried": 3.0}

    def down(scores, images, rows):
        inner.failure = "server down"
        return scores * math.nan

    inner = Server("inner", down)
    alone, nested = (Weighted([reward]) for reward in (inner, Weighted([inner, Field()], [1, 0])))
    videos = IMAGES[:, None].expand(-1, 2, -1, -1, -1)
    for weighted, name in ((alone, "inner"), (nested, "weighted")):
        scores = weighted.score(videos, PROMPTS, ROWS)
        assert (scores.errors, scores.counts) == ({name: "server down"}, {name: {"retried": 3.0}})


def test_an_autocast_does_not_change_scores():
    """``lightning eval`` scores in a validation step, which the trainer runs in its precision."""
    bright = Field("bright", lambda scores, images, _: torch.nn.functional.linear(images.flatten(1), weights)[:, 0])
    weights = torch.linspace(0.5, 1.5, 3 * 8 * 8)[None]
    plain = score(bright).total
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(score(bright).total, plain)
