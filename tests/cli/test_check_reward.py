"""``lightning check-reward`` on the tiny pipeline."""

import math
from pathlib import Path

import pytest
import torch
from commands import check_reward
from PIL import Image, ImageFont

from lit_vgrpo.cli.check_reward import PartTrial, findings, save_scored, trials
from lit_vgrpo.cli.main import main
from lit_vgrpo.rewards import Reward, Weighted

OWN = """
import os

def constant(images, prompts):
    return [0.25] * len(images)

def elsewhere(images, prompts):
    os.chdir("/")
    return [float(image.std()) for image in images]

def never(images, prompts):
    return [None] * len(images)

def half(images, prompts):
    return [None if number % 2 else float(image.mean()) for number, image in enumerate(images)]
"""


@pytest.fixture
def recipe(tiny_recipe, monkeypatch):
    Path("trial_rewards.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    return str(tiny_recipe)


def cells(out):
    """The table's rows by their first cell."""
    return {line.split()[0]: line.split() for line in out.splitlines() if line}


def test_images_of_the_recipes_own_policy_are_scored(recipe, capsys):
    heldout = "model.untrained_reward={python: trial_rewards:constant}"
    status = main(["check-reward", recipe, heldout, "--num-prompts", "2", "--images-per-prompt", "3"])
    said = capsys.readouterr()
    assert said.out.startswith("6 images made by the recipe's policy in ")
    table = cells(said.out)
    assert table["reward"][:2] == ["reward", "weight"]
    jpeg = table["jpeg"]
    assert jpeg[1] == "1"
    mean, std, low, high = map(float, jpeg[2:6])
    assert low < mean < high < 0 < std
    assert jpeg[6:8] == ["0", "0%"]
    assert table["constant"][1] == "0"
    assert table["total"][1:6] == [f"{value:.4f}" for value in (mean, std, low, high)] + ["0"]
    assert "Rewards of an iteration, 4 images per rank: about " in said.out
    assert status == 1
    line = "constant is constant (0.25) on 6 images, so nothing is learned from it. "
    assert said.err == f"{line}Check the prompts, or try more with --num-prompts.\n"
    assert not Path("runs").exists()


def test_a_folder_of_images_needs_no_policy(recipe, capsys, monkeypatch):
    folder = Path.cwd()
    for number in range(4):
        Image.effect_noise((16 + 8 * (number // 2), 16), 20 + 40 * number).save(f"{number}.png")
    words = [recipe, "model.policy.checkpoint=/nowhere", "--images", "."]
    assert check_reward(words) == 0
    said = capsys.readouterr()
    assert said.out.startswith("4 images of ., 2 for each of the first training prompts\n")
    assert cells(said.out)["jpeg"][6:8] == ["0", "0%"]
    assert said.err == ""
    assert "The images with their scores: check_reward.png\n" in said.out
    with Image.open("check_reward.png") as sheet:
        zoom, label, gap = 4, 18, 4  # 24 x 16 pixels, the larger of both sides, enlarged to at least 96
        assert sheet.size == (2 * (24 * zoom + gap) + 3 * gap, 2 * (16 * zoom + gap + 2 * label) + label)
        with Image.open("0.png") as first:
            shown = sheet.convert("L").crop((gap, 2 * label, gap + 24 * zoom, 2 * label + 16 * zoom))
            assert shown.getpixel((4 * zoom, 0)) == pytest.approx(first.getpixel((0, 0)), abs=1)
        text = sheet.convert("L").crop((gap, 2 * label + 16 * zoom, gap + 24 * zoom, 3 * label + 16 * zoom))
        assert text.getextrema() == (0, 255)
    assert check_reward([*words, "model.reward={python: trial_rewards:elsewhere}"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("4 images of ., ")  # the picture of scores is left out
    assert "The images with their scores: check_reward.png\n" in said.out
    monkeypatch.chdir(folder)
    assert check_reward([*words, "model.reward={python: trial_rewards:never}"]) == 1
    out, err = capsys.readouterr()  # no table of dashes
    assert (out.count("\n"), err.count("\n")) == (1, 1)
    assert 'returned None for prompt "' in err
    (Path("check_reward.png")).rename("mine.png")
    assert check_reward([*words[:-1], "0.png", "--out=looks/a.png"]) == 0
    assert "The images with their scores: looks/a.png\n" in capsys.readouterr().out
    assert Path("looks/a.png").is_file()
    assert not Path("check_reward.png").exists()
    assert check_reward([*words, "--out=a.jpg"]) == 2
    assert capsys.readouterr().err == "--out a.jpg is not a .png file. Use --out a.png.\n"
    assert check_reward(words[:2]) == 2
    assert "/nowhere" in capsys.readouterr().err


def test_mistakes_are_said_before_anything_is_made(recipe, capsys):
    missing = ["model.reward=PickScore", "model.reward.checkpoint=/nowhere", "model.reward.processor=/nowhere"]
    for words, said in ((missing, "/nowhere"), (["--images", "nowhere"], "nowhere does not exist.")):
        assert check_reward([recipe, *words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert said in err


def test_prompts_that_a_reward_cannot_score_are_said_and_none_is_made_where_all_are(recipe, capsys):
    Path("cats.txt").write_text("a cat\na dog\n")
    words = [recipe, "model.reward=ShapesReward", "data.heldout=null"]
    assert check_reward([*words, "data.train=cats.txt"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert 'cannot score 2 of 2 prompts. The first: Prompt "a cat" must name one' in err
    Path("cats.txt").write_text("a cat\na red circle on the left\n")
    assert check_reward([*words, "data.train=cats.txt"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert 'cannot score 1 of 2 prompts. The first: Prompt "a cat" must name one' in lines[0]
    assert "shapes failed for 4 of 8 images: " in lines[1]


def test_scores_below_neighbours_do_not_overlap_and_failures_are_named(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("PIL.ImageDraw.ImageDraw.text", lambda pen, place, text, **how: drawn.append((place, text)))
    name = "a_reward_with_a_long_name"
    parts = [PartTrial(name, 1.0, torch.tensor([0.5, math.nan]), torch.zeros(2), torch.arange(2), 0.0)]
    save_scored([torch.zeros(1, 3, 8, 8)] * 2, [{"prompt": "a"}] * 2, [*parts, parts[0]], 2, tmp_path / "a.png")
    _, ((left, _), first), ((right, _), second) = drawn
    assert (first, second) == (f"{name} 0.5", f"{name} failed")
    assert left + ImageFont.load_default(size=12).getlength(first) < right


class Given(Reward):
    """Scores that the rows hold."""

    name = "given"

    def __call__(self, images, prompts, rows):
        self.failure = "the row has none"
        return torch.tensor([row["score"] for row in rows])


def tried(scores, each=2, reward=None):
    rows = [{"prompt": "a", "score": score} for score in scores]
    images = [torch.zeros(1, 3, 8, 8 + 4 * (number % 3)) for number in range(len(rows))]
    return trials(reward or Weighted([Given()]), images, rows, torch.arange(len(rows)) // each, 4)


def test_the_numbers_of_a_part():
    part, total = tried([0.0, 1.0, 1.0, 1.0, math.nan, 2.0, math.nan, math.nan])
    assert (part.failed, total.failed) == (3, 3)
    assert part.flat_share == 0.5  # of the two prompts with two scores
    assert part.row()[:7] == ["1", "1.0000", "0.6325", "0.0000", "2.0000", "3", "50%"]
    assert findings([part, total]) == ["given failed for 3 of 8 images: the row has none"]
    failing, _ = parts = tried([math.nan, math.nan])
    assert failing.failed == 2
    assert findings(parts)[0] == "given failed for 2 of 2 images: the row has none"
    parts = tried([0.0, 0.0, 1.0, 1.0])
    assert [part.flat_share for part in parts] == [1.0, 1.0]
    said = "No prompt has images that differ in reward, so there is no gradient. Try --images-per-prompt 8."
    assert findings(parts) == [said]
    said = "The rewards of these images differ by 0.0005 (standard deviation), so their advantages are small. Multiply"
    (small,) = findings(tried([0.0, 0.001, 0.0, 0.001]))
    assert small.startswith(said)
    assert findings(tried([0.0, 0.001, 0.0, 0.001]), uses_advantages=False) == findings(parts, False) == []


def test_a_reward_that_gives_other_scores_for_the_same_images_is_found():
    class Noisy(Given):
        name, size = "noisy", 0.5

        def __call__(self, images, prompts, rows):
            self.size = -self.size
            return super().__call__(images, prompts, rows) + self.size

    (said,) = findings(tried([0.0, 2.0, math.nan, 3.0], reward=Weighted([Noisy()])))[1:]
    assert said.startswith("noisy gave other scores for the same images, by up to 1. Switch its model to eval()")
    quiet = Noisy()
    quiet.size = 0.01  # as rounding of half precision
    assert findings(tried([0.0, 1.0, 2.0, 3.0], reward=Weighted([quiet]))) == []


def test_a_reward_that_sees_black_images_is_found():
    from transformers import CLIPImageProcessor

    processor = CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})

    def wrong(images, prompts):
        return processor(images=images, return_tensors="pt")["pixel_values"].mean((1, 2, 3))

    def right(images, prompts):
        return processor(images=images, do_rescale=False, return_tensors="pt")["pixel_values"].mean((1, 2, 3))

    def failing(images, prompts):
        return [float(image.mean()) or None for image in images]  # none for a black image

    def one(images, prompts):
        return [1.0] * len(images)

    images = torch.rand(4, 1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    said = findings(trials(Weighted([wrong, right, failing]), images, [{"prompt": "a"}] * 4, torch.zeros(4).long(), 2))
    assert len(said) == 1
    assert said[0].startswith("wrong scores a black image like these: the difference is at most 0.00")
    assert said[0].endswith("pass it do_rescale=False.")
    (constant,) = findings(trials(Weighted([one]), images, [{"prompt": "a"}] * 4, torch.zeros(4).long(), 2))
    assert constant.startswith("one is constant")


def test_a_part_is_judged_on_the_images_that_it_applies_to():
    class Named(Given):
        name = "named"

    rows = [{"prompt": "a", "score": float(n), "rewards": "named" if n < 2 else "given"} for n in range(5)]
    images = [torch.zeros(1, 3, 8, 8)] * 5
    reward = Weighted([Given(), Named()])
    given, named, total = trials(reward, images, rows, torch.arange(5) // 2, 4)
    assert given.scores.tolist() == [2, 3, 4]
    assert given.groups.tolist() == [1, 1, 2]
    assert named.scores.tolist() == [0, 1]
    assert total.failed == 0
