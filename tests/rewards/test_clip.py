"""CLIPScore, PickScore and AestheticScore against the published arithmetic, in float64 and with PIL."""

import json
import shutil

import clip_pixels
import pytest
import torch
from scorer_files import head_weights

from lit_vgrpo.rewards import AestheticScore, CLIPScore, PickScore

PROMPTS = ["a red cat", "ein blauer Bär, 猫", "two dogs", "x " * 200]


@pytest.fixture(scope="module")
def rewards(tiny_reward):
    return [tiny_reward(PickScore, batch_size=3), tiny_reward(CLIPScore), tiny_reward(AestheticScore)]


@torch.no_grad()
def aesthetic(head_file, clip_folder, image):
    """CLIP's embedding at length 1, then five linear layers."""
    from transformers import CLIPModel

    clip = CLIPModel.from_pretrained(clip_folder).double().eval()
    x = clip.visual_projection(clip.vision_model(clip_pixels.cropped(image, 32)).pooler_output)[0]
    x = x / x.norm()
    weights = torch.load(head_file)
    for place in (0, 2, 4, 6, 7):
        x = weights[f"layers.{place}.weight"].double() @ x + weights[f"layers.{place}.bias"].double()
    return float(x)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(32, 32), (20, 60), (200, 300)])
def test_scores_are_the_published_arithmetic(rewards, clip_folder, aesthetic_file, size):
    images = torch.stack([clip_pixels.photo(*size, seed) for seed in range(4)])
    pairs = [clip_pixels.cosine(clip_folder, i, p) for i, p in zip(images, PROMPTS, strict=True)]
    expected = [
        [scale * cosine / 26 for cosine, scale in pairs],
        [100 * max(cosine, 0.0) for cosine, _ in pairs],
        [aesthetic(aesthetic_file, clip_folder, image) for image in images],
    ]
    # what is resized differs by a step in a few pixels
    exact, resized, spread = [1e-5, 1e-3, 1e-5], [1e-3, 0.1, 2e-3], [0.02, 5, 0.02]
    tolerances = exact if size == (32, 32) else resized
    for reward, values, atol, least in zip(rewards, map(torch.tensor, expected), tolerances, spread, strict=True):
        scores = reward(images, PROMPTS, [{}] * 4)
        assert scores.shape == (4,)
        assert scores.dtype == torch.float32
        assert values.std() > least  # else nothing is compared
        torch.testing.assert_close(scores, values, atol=atol, rtol=0)


def test_a_clip_score_is_never_negative(rewards):
    images = torch.stack([clip_pixels.photo(40, 40, seed) for seed in range(12)])
    scores = rewards[1](images, [f"{letter} cat" for letter in "abcdefghijkl"], [{}] * 12)
    assert scores.min() == 0
    assert 0 < scores.max() <= 100


def test_the_published_processor_belongs_to_the_published_weights():
    assert PickScore().processor == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    assert PickScore("some/where").processor == "some/where"
    assert PickScore("some/where", processor="else/where").processor == "else/where"
    assert (CLIPScore().checkpoint, CLIPScore().processor) == ("openai/clip-vit-large-patch14",) * 2


def test_the_aesthetic_score_keeps_no_text_tower(rewards):
    rewards[2].load()
    assert not any("text" in name for name, _ in rewards[2]._model.named_parameters())


def test_files_that_do_not_fit_are_one_line(tmp_path, clip_folder, aesthetic_file):
    clip, head = str(clip_folder), tmp_path / "head.pth"
    torch.save(head_weights(8, torch.Generator()), head)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip"}))
    without_weights = shutil.copytree(clip_folder, tmp_path / "broken")
    (without_weights / "model.safetensors").unlink()
    for reward, said in [
        (
            AestheticScore(str(head), clip=clip),
            r"Set AestheticScore\.checkpoint and AestheticScore\.clip to a matching pair",
        ),
        (PickScore(str(tmp_path), processor=clip), r"Set PickScore\.checkpoint to"),
        (PickScore(str(without_weights)), r"Set PickScore\.checkpoint to"),
    ]:
        with pytest.raises(RuntimeError, match=rf"^Cannot load .*: .* {said}") as caught:
            reward.load()
        assert "\n" not in str(caught.value)
    assert "PickScore.processor" in PickScore(str(tmp_path)).check()[0]
    assert "Set AestheticScore.clip to" in AestheticScore(str(aesthetic_file), clip=str(tmp_path / "no")).check()[0]
