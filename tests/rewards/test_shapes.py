import pytest
import torch
import torch.nn.functional as F
from tiny_prompts import shape_rows

from lit_vgrpo.rewards.shapes import ShapesReward
from lit_vgrpo.tiny.shapes import BACKGROUND, PALETTE, ShapesImages, coverage

PROMPT = "a red circle on the left"


@pytest.fixture(scope="module")
def rows():
    return [dict(row) for part in shape_rows() for row in part] * 8


@pytest.fixture(scope="module")
def pictures(rows):
    generators = [torch.Generator().manual_seed(i) for i in range(len(rows))]
    return ShapesImages(caption_noise=0)([row["prompt"] for row in rows], rows, generators)[0]


def prompts_of(rows):
    return [row["prompt"] for row in rows]


def draw(*shapes):
    """A picture of shapes given as (colour, shape, x, y, area)."""
    picture = torch.tensor(BACKGROUND)[:, None, None].expand(3, 32, 32)
    for colour, shape, x, y, area in shapes:
        mask = coverage(shape, torch.tensor([x]), torch.tensor([y]), torch.tensor([area]))
        picture = picture + mask * (torch.tensor(PALETTE[colour])[:, None, None] - picture)
    return picture[None]


def test_rendered_pictures_pass_clean_blurred_and_noisy(rows, pictures):
    reward = ShapesReward()
    assert (reward.name, ShapesReward("colour").name) == ("shapes", "colour")
    blurred = F.avg_pool2d(F.pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, 1)
    noise = 0.05 * torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0))
    for images in (pictures, (pictures * 255).round() / 255, (blurred + noise).clamp(0, 1)):
        scores = reward(images, prompts_of(rows), rows)
        assert scores.shape == (len(rows),)
        assert scores.dtype == torch.float32
        assert scores.mean() >= 0.99


def test_no_shape_scores_zero():
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(64, 3, 32, 32, generator=generator)
    plain = torch.full((1, 3, 32, 32), 0.5)
    speck = draw(("red", "circle", 9.0, 16.0, 8.0))
    two = draw(("red", "circle", 9.0, 9.0, 80.0), ("red", "circle", 9.0, 23.0, 80.0))
    filled = torch.tensor(PALETTE["red"])[None, :, None, None].expand(1, 3, 32, 32)
    for images in (noise, plain, speck, two, filled):
        count = len(images)
        assert ShapesReward()(images, [PROMPT] * count, [{}] * count).mean() <= 0.02


def test_one_wrong_attribute_costs_one_third():
    right = ("red", "circle", 9.0, 16.0, 90.0)
    for wrong in (("blue", *right[1:]), ("red", "square", *right[2:]), ("red", "circle", 23.0, 16.0, 90.0)):
        assert ShapesReward()(draw(wrong), [PROMPT], [{}]).item() == pytest.approx(2 / 3)
    assert ShapesReward()(draw(right), [PROMPT], [{}]).item() == 1


def test_middle_and_corner_are_no_place():
    for x, y in ((16.0, 16.0), (9.0, 9.0)):
        images = draw(("red", "circle", x, y, 90.0))
        assert ShapesReward("place")(images, [PROMPT], [{}]).item() == 0
        assert ShapesReward("colour")(images, [PROMPT], [{}]).item() == 1


def test_unknown_attributes_are_failures_not_zeros():
    images = draw(("red", "circle", 9.0, 16.0, 90.0)).repeat(3, 1, 1, 1)
    prompts = ["a house", "a house", PROMPT]
    fields = [{}, {"colour": "red"}, {"colour": "beige"}]
    assert ShapesReward()(images, prompts, fields).isnan().tolist() == [True, True, True]
    assert ShapesReward("colour")(images, prompts, fields).nan_to_num(nan=-1).tolist() == [-1, 1, -1]


def test_larger_pictures_are_judged_the_same(rows, pictures):
    large = F.interpolate(pictures[:72], scale_factor=4, mode="bilinear")
    assert ShapesReward()(large, prompts_of(rows[:72]), rows[:72]).mean() >= 0.99


def test_a_picture_is_judged_alone(rows, pictures):
    together = ShapesReward()(pictures[:8], prompts_of(rows[:8]), rows[1:9])
    alone = [ShapesReward()(pictures[i : i + 1], prompts_of(rows[i : i + 1]), rows[i + 1 : i + 2]) for i in range(8)]
    assert torch.equal(together, torch.cat(alone))
