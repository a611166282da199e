"""Held-out images of another size than the rollout's: what is sampled, planned and refused."""

import pytest
import torch
from helpers import Brightness, make_data, make_module, make_trainer

from lit_vgrpo import EvaluationSpec, RolloutSpec, SD3Policy
from lit_vgrpo.apps.memory.estimate import EVALUATION, estimate
from lit_vgrpo.data import read_prompts
from lit_vgrpo.errors import UserError
from lit_vgrpo.launch.build import build
from lit_vgrpo.training.evaluation import Evaluator

OTHER = "model.evaluation={height: 16, width: 24, steps: 2}"


class Kept:
    """Keeps the images of every evaluation."""

    def __init__(self):
        self.images = []

    def update(self, images, batch):
        self.images.append(images)

    def compute(self, module):
        return {}


def test_only_held_out_images_have_another_size(tiny_sd3, tmp_path):
    module, kept = make_module(tiny_sd3, evaluation=EvaluationSpec(steps=2, height=16, width=24)), Kept()
    module.evaluator.observers.append(kept)
    make_trainer(tmp_path, 1).fit(module, datamodule=make_data())
    assert [images.shape for images in kept.images] == [(2, 3, 16, 24)] * 2
    assert module.policy.image_size == (32, 32)
    assert module.policy.latent_shape == (8, 8, 8)
    alone = SD3Policy(str(tiny_sd3), max_sequence_length=1, height=16, width=24).load()
    prompts = [row["prompt"] for row in read_prompts(make_data().choice.heldout[0])[:2]]
    drawn = Evaluator(alone, Brightness(), spec=RolloutSpec(steps=2)).generate(prompts, [0, 1])
    assert torch.equal(kept.images[0], drawn)


@pytest.mark.slow
def test_the_plan_and_the_memory_estimate_know_the_size(tiny_recipe):
    small, usual = (
        build([str(tiny_recipe), word], make_folder=False) for word in (OTHER, "model.evaluation={steps: 2}")
    )
    assert small.errors() == []
    assert "Held-out images: 16 x 24 pixels, 2 steps, guidance 1." in small.plan().splitlines()
    assert "Held-out images" not in usual.plan()
    assert estimate(small).phases[EVALUATION] < estimate(usual).phases[EVALUATION]


def test_a_size_that_the_family_cannot_make_is_one_line(tiny_recipe):
    for size, said in (("height: 20", ".height=20 is not a multiple of 8"), ("width: 48", ".height and width of")):
        (line,) = build([str(tiny_recipe), f"model.evaluation={{{size}}}"], make_folder=False).errors()
        assert f"model.evaluation{said}" in line
    with pytest.raises(UserError, match="height=0: Use"):
        build([str(tiny_recipe), "model.evaluation={height: 0}"], make_folder=False)
