"""The guard against copying the picture to edit."""

import torch
from make_tiny_edit import random_edits
from PIL import Image

from lit_vgrpo.core.pictures import stacked_references
from lit_vgrpo.rollout.scores import COPY, CopyGuard, copying_warning, largest_change, similarity


def test_similarities_to_the_picture_and_within_the_group(tmp_path):
    Image.new("RGB", (128, 96), (255, 255, 255)).save(tmp_path / "white.png")
    rows = [{"prompt": "grey", "image": str(tmp_path / "white.png")}] * 4
    levels = torch.tensor([1.0, 1.0, 0.5, 0.25])
    guard = CopyGuard()
    images = levels.view(4, 1, 1, 1).expand(4, 3, 96, 128)
    guard.add(images[:3], rows[:3])
    guard.add(images[3:], rows[3:])
    found = guard.scores(2)
    torch.testing.assert_close(found["similarity_to_reference"], levels)
    torch.testing.assert_close(found["similarity_in_group"], torch.tensor([1.0, 1.0, 0.75, 0.75]))
    assert found["copies"].tolist() == [1, 1, 0, 0]
    assert guard.scores(1)["similarity_in_group"].isnan().all()
    assert CopyGuard().scores(2) == {}


def test_the_nearest_of_several_pictures_counts(tmp_path):
    for name in ("white", "black"):
        Image.new("RGB", (32, 32), name).save(tmp_path / f"{name}.png")
    row = {"prompt": "grey", "image": [str(tmp_path / f"{name}.png") for name in ("white", "black")]}
    guard = CopyGuard()
    guard.add(torch.tensor([0.0, 0.25, 1.0]).view(3, 1, 1, 1).expand(3, 3, 32, 32), [row] * 3)
    found = guard.scores(3)
    torch.testing.assert_close(found["similarity_to_reference"], torch.tensor([1.0, 0.75, 1.0]))
    assert found["copies"].tolist() == [1, 0, 1]


def test_a_small_edit_is_no_copy():
    before, after, _ = random_edits(8, torch.Generator().manual_seed(0))
    assert similarity(before, after).max() > 0.98
    assert largest_change(before, after).min() > COPY
    assert largest_change(before, (before + 0.02).clamp(max=1)).max() < COPY


def test_a_warning_if_most_images_are_copies():
    assert copying_warning(torch.tensor([1.0, 0.0]), 3) is None
    assert copying_warning(torch.tensor([1.0, 1.0, 0.0]), 3).startswith("67% of the images of iteration 3 are copies")


def test_a_video_that_stands_still_is_a_copy(tmp_path):
    Image.effect_noise((56, 40), 64).convert("RGB").save(tmp_path / "noise.png")
    row = {"prompt": "it moves", "image": str(tmp_path / "noise.png")}
    still = stacked_references([row])[0].repeat(5, 1, 1, 1)
    moving = torch.cat([still[:4], 1 - still[4:]])
    guard = CopyGuard()
    guard.add(torch.stack([still, moving]), [row] * 2)
    found = guard.scores(2)
    assert found["copies"].tolist() == [1, 0]
    assert found["similarity_to_reference"][0] == 1 > found["similarity_to_reference"][1]
    assert found["similarity_in_group"].shape == (2,)
