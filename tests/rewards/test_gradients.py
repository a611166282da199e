"""The gradient of every differentiable reward: its score, against finite differences, and in a weighted sum."""

from functools import partial
from types import SimpleNamespace

import clip_pixels
import numpy as np
import pytest
import torch
from PIL import Image
from tiny_prompts import shape_rows
from transformers import CLIPProcessor

from lit_vgrpo import rewards
from lit_vgrpo.core.pixels import CLIP_STD, centre_cropped, letterboxed, resized_as_pil
from lit_vgrpo.rewards import JPEGCompressibility, PythonReward, RewardOutage, SmoothShapesReward, Weighted
from lit_vgrpo.rewards.clip import clip_pixels as prepared
from lit_vgrpo.rewards.model import ScoreHead
from lit_vgrpo.tiny.shapes import render

PROMPTS = ["a red circle on the left", "a blue square on the right", "a red circle on the left"]
ROWS = [{}] * 3
MODELS = ["PickScore", "CLIPScore", "AestheticScore", "HPSv2", "ImageReward"]


def redness(images, prompts):
    return (images[:, 0] - images[:, 1]).square().mean((1, 2))


def constant(images, prompts):
    return torch.ones(len(prompts))


@pytest.fixture(scope="module")
def build(tiny_reward):
    """Any differentiable reward by its name."""
    others = {
        "PythonReward": lambda: PythonReward(redness, differentiable=True),
        "SmoothShapesReward": SmoothShapesReward,
    }
    return lambda name: others[name]() if name in others else tiny_reward(getattr(rewards, name))


def photos(height, width):
    return torch.stack([0.1 + 0.8 * clip_pixels.photo(height, width, seed) for seed in range(3)])


def test_these_are_all_that_are_differentiable():
    found = {name for name in rewards.__all__ if getattr(getattr(rewards, name), "differentiable", False) is True}
    assert found == {*MODELS, "SmoothShapesReward"}


@pytest.mark.parametrize("name", [*MODELS, "PythonReward", "SmoothShapesReward"])
def test_the_score_is_that_of_the_ordinary_call(build, name):
    side = 64 if name == "ImageReward" else 32  # of the model's input
    reward, images = build(name), (photos(side, side) * 255).round() / 255
    scores, expected = reward.with_gradient(images, PROMPTS, ROWS), reward(images, PROMPTS, ROWS)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("size", [(48, 40), (64, 96), (20, 30)])
def test_resized_pixels_are_those_of_the_processor_before_rounding(clip_folder, size):
    model = SimpleNamespace(device="cpu", dtype=torch.float32)
    processor = CLIPProcessor.from_pretrained(clip_folder)
    whole, std = (photos(*size) * 255).round(), torch.tensor(CLIP_STD)[:, None, None]
    for resized in (lambda images: prepared(processor, images, model), partial(centre_cropped, size=32)):
        apart = (resized(whole / 255) - resized(whole.to(torch.uint8))).abs() * std * 255
        assert apart.max() < 1.05  # grey levels: the processor rounds, and PIL's weights have eight bits
        assert apart.mean() < 0.35  # 0.25 by rounding alone
    torch.testing.assert_close(letterboxed(whole / 255, 32), letterboxed(whole.to(torch.uint8), 32), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", [*MODELS, "PythonReward", "SmoothShapesReward"])
def test_the_gradient_is_that_of_finite_differences(build, name):
    reward, images, prompts = build(name), photos(64, 48).double(), PROMPTS
    if name == "CLIPScore":  # a negative cosine scores 0, without a gradient
        images, prompts = images[[0, 2, 0]], ["k cat"] * 3
    if name in MODELS:
        reward.load()
        reward._model.double()
        for head in (part for part in reward._model.modules() if isinstance(part, ScoreHead)):
            head.float()  # its input is
    leaf = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(reward.with_gradient(leaf, prompts, ROWS).sum(), leaf)
    steepness = gradient.flatten(1).norm(dim=1)
    assert steepness.min() > 0  # every image has one
    along = gradient / steepness[:, None, None, None]

    step = 1e-5 if name == "SmoothShapesReward" else 0.005  # the others' scores are float32

    @torch.no_grad()
    def change(step):
        ends = [reward.with_gradient(images + sign * step * along, prompts, ROWS).double() for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * step)

    extrapolated = (4 * change(step) - change(2 * step)) / 3  # without the error of second order
    torch.testing.assert_close(extrapolated, steepness.double(), rtol=5e-3, atol=0)


def test_a_sum_has_the_gradient_of_its_differentiable_parts():
    smooth, jpeg = SmoothShapesReward(), JPEGCompressibility()
    parts = [smooth, jpeg, PythonReward(redness, differentiable=True)]
    both = Weighted(parts, [2.0, 1.0, -1.0], [None, None, [0, 0.02]])
    assert both.differentiable
    assert not Weighted([smooth, jpeg], [0.0, 1.0]).differentiable
    leaf = photos(32, 32).requires_grad_()
    rows = [{}, {"rewards": "smooth_shapes"}, {"rewards": "redness"}]
    scores = both.with_gradient(leaf, PROMPTS, rows)
    expected = 2 * smooth(leaf, PROMPTS, rows) * torch.tensor([1, 1, 0])
    expected = expected - redness(leaf, PROMPTS).clamp(0, 0.02) * torch.tensor([1, 0, 1])
    torch.testing.assert_close(scores, expected)
    gradients = [torch.autograd.grad(values.sum(), leaf)[0] for values in (scores, expected)]
    torch.testing.assert_close(*gradients)


def test_a_function_declares_its_gradient_and_has_one():
    assert not PythonReward(redness).differentiable
    leaf = photos(32, 32).requires_grad_()
    assert not PythonReward(redness, differentiable=True)(leaf, PROMPTS, ROWS).requires_grad
    said = r'^Reward "constant" is differentiable, but its scores carry no gradient\.$'
    with pytest.raises(RewardOutage, match=said):
        Weighted([PythonReward(constant, differentiable=True)]).with_gradient(leaf, PROMPTS, ROWS)
    with pytest.raises(ValueError, match=r"differentiable=True needs images=tensor: images=pil carry no gradient"):
        PythonReward(redness, images="pil", differentiable=True)


def test_a_reward_that_changes_its_images_changes_no_other_and_keeps_its_gradient():
    def inverted(images, prompts):
        return images.neg_().mean((1, 2, 3))

    leaf, rewards = photos(8, 8).requires_grad_(), [PythonReward(f, differentiable=True) for f in (inverted, redness)]
    scores = Weighted(rewards, [1.0, 1.0]).with_gradient(leaf * 1, PROMPTS, ROWS)
    torch.testing.assert_close(scores, redness(leaf, PROMPTS) - leaf.mean((1, 2, 3)))
    gradients = [torch.autograd.grad(of.sum(), leaf)[0] for of in (scores, redness(leaf, PROMPTS))]
    torch.testing.assert_close(gradients[0], gradients[1] - 1 / leaf[0].numel())


def test_smooth_shapes_rate_every_right_picture_above_a_wrong_one():
    rows, _ = shape_rows()
    draw = torch.Generator().manual_seed(0)
    images = torch.stack([render(row["colour"], row["shape"], row["place"], draw) for row in rows])
    for check in ("colour", "shape", "place", "mean"):
        reward = SmoothShapesReward(check)
        right = reward(images, [row["prompt"] for row in rows], rows)
        for name in ("colour", "shape", "place") if check == "mean" else (check,):
            others = {"colour": "cyan", "shape": "triangle", "place": "at the top"}
            wrong = [row | {name: others[name]} for row in rows]
            differs = torch.tensor([row[name] != others[name] for row in rows])
            scores = reward(images, [row["prompt"] for row in rows], wrong)
            assert (right - scores)[differs].min() > 0.1


@pytest.mark.parametrize(("size", "target"), [((512, 512), (224, 224)), ((96, 160), (32, 53)), ((40, 30), (64, 48))])
def test_uint8_is_resized_as_in_pil(size, target):
    images = torch.stack([photos(*size)[0], torch.rand(3, *size, generator=torch.Generator().manual_seed(0))])
    images = (images * 255).round().to(torch.uint8)
    expected = [
        np.array(Image.fromarray(image.permute(1, 2, 0).numpy()).resize(target[::-1], Image.Resampling.BICUBIC))
        for image in images
    ]
    apart = (resized_as_pil(images, *target).int() - torch.from_numpy(np.stack(expected)).permute(0, 3, 1, 2)).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 0.01  # 0.14 if rounded once


def test_an_image_that_a_reward_refuses_gets_no_gradient_and_the_others_keep_theirs():
    def refuses(images, prompts):
        if images[:, 2].mean() > 0.6:
            raise ValueError("too bright")
        return redness(images, prompts)

    images = photos(8, 8).requires_grad_()
    with torch.no_grad():
        images[1, 2] = 0.95
    weighted = Weighted([PythonReward(refuses, differentiable=True, name="refuses")])
    with pytest.warns(UserWarning, match='Reward "refuses" failed for images that it differentiates: .*too bright'):
        scores = weighted.with_gradient(images, PROMPTS, ROWS)
    (gradient,) = torch.autograd.grad(scores.sum(), images)
    (expected,) = torch.autograd.grad(redness(images, PROMPTS).sum(), images)
    assert scores.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(gradient[::2], expected[::2])
