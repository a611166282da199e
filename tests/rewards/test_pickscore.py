import json
import shutil

import clip_pixels
import pytest
import torch

from lit_vgrpo.rewards import PickScore

PROMPTS = ["a red cat", "ein blauer Bär, 猫", "a red cat", "x " * 200]
SIZES = [(48, 40), (32, 32), (20, 60), (200, 300)]


@pytest.fixture
def reward(clip_folder):
    return PickScore(str(clip_folder), batch_size=3)


@pytest.mark.parametrize("size", SIZES)
def test_scores_are_the_published_arithmetic(clip_folder, reward, size):
    images = torch.stack([clip_pixels.photo(*size, seed) for seed in range(4)])
    scores = reward(images, PROMPTS, [{}] * 4)
    assert scores.shape == (4,)
    assert scores.dtype == torch.float32
    pairs = [clip_pixels.cosine(clip_folder, i, p) for i, p in zip(images, PROMPTS, strict=True)]
    expected = torch.tensor([scale * cosine / 26 for cosine, scale in pairs])
    assert expected.std() > 0.02  # else nothing is compared
    atol = 1e-5 if size == (32, 32) else 1e-3  # what is resized differs by a step in a few pixels
    torch.testing.assert_close(scores, expected, atol=atol, rtol=0)


def test_prompt_and_picture_both_matter(reward):
    images = torch.stack([clip_pixels.photo(40, 40, seed) for seed in range(2)])
    scores = reward(images[[0, 0, 1]], ["a cat", "a dog", "a cat"], [{}] * 3)
    assert len(set(scores.tolist())) == 3


def test_the_published_processor_belongs_to_the_published_weights():
    assert PickScore().processor == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    assert PickScore("some/where").processor == "some/where"
    assert PickScore("some/where", processor="else/where").processor == "else/where"


def test_a_folder_without_config_is_an_error(tmp_path, clip_folder):
    (error,) = PickScore(str(tmp_path), processor=str(clip_folder)).check()
    assert "has no config.json" in error


@pytest.mark.parametrize("config", ['{"model_type": "siglip"}', "{"])
def test_a_model_of_another_family_cannot_be_loaded(tmp_path, clip_folder, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(RuntimeError, match="^Cannot load .* Set PickScore.checkpoint to"):
        PickScore(str(tmp_path), processor=str(clip_folder)).load()


def test_a_folder_without_weights_is_one_line(tmp_path, clip_folder):
    broken = tmp_path / "broken"
    shutil.copytree(clip_folder, broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(RuntimeError, match=r"^Cannot load .*broken: .* Set PickScore\.checkpoint to") as caught:
        PickScore(str(broken)).load()
    assert "\n" not in str(caught.value)


def test_a_folder_without_tokenizer_is_an_error_of_the_processor(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    (error,) = PickScore(str(tmp_path)).check()
    assert "PickScore.processor" in error
