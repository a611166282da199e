import clip_pixels
import pytest
import torch
from scorer_files import head_weights

from lit_vgrpo.rewards.aesthetic import AestheticScore

SIZES = [(48, 40), (32, 32), (20, 60), (200, 300)]


@pytest.fixture(scope="module")
def reward(aesthetic_file, clip_folder):
    return AestheticScore(str(aesthetic_file), clip=str(clip_folder))


@torch.no_grad()
def plain_score(head_file, clip_folder, image):
    """The published arithmetic on one picture: CLIP's embedding at length 1, then five linear layers."""
    from transformers import CLIPModel

    clip = CLIPModel.from_pretrained(clip_folder).double().eval()
    x = clip.visual_projection(clip.vision_model(clip_pixels.cropped(image, 32)).pooler_output)[0]
    x = x / x.norm()
    weights = torch.load(head_file)
    for place in (0, 2, 4, 6, 7):
        x = weights[f"layers.{place}.weight"].double() @ x + weights[f"layers.{place}.bias"].double()
    return float(x)


@pytest.mark.parametrize("size", SIZES)
def test_scores_are_the_published_arithmetic(aesthetic_file, clip_folder, reward, size):
    images = torch.stack([clip_pixels.photo(*size, seed) for seed in range(6)])
    scores = reward(images, ["a"] * 6, [{}] * 6)
    expected = torch.tensor([plain_score(aesthetic_file, clip_folder, image) for image in images])
    assert expected.std() > 0.05  # else nothing is compared
    atol = 1e-5 if size == (32, 32) else 2e-3  # what is resized differs by a step in a few pixels
    torch.testing.assert_close(scores, expected, atol=atol, rtol=0)


def test_the_text_tower_is_not_kept(reward):
    reward.load()
    assert not any("text" in name for name, _ in reward._model.named_parameters())


def test_a_head_of_another_width_is_one_line(tmp_path, clip_folder):
    path = tmp_path / "head.pth"
    torch.save(head_weights(8, torch.Generator()), path)
    with pytest.raises(
        RuntimeError,
        match=r"size mismatch for layers\.0\.weight.*AestheticScore\.clip to the right file\.$",
    ):
        AestheticScore(str(path), clip=str(clip_folder)).load()


def test_a_missing_clip_is_an_error(aesthetic_file, tmp_path):
    (error,) = AestheticScore(str(aesthetic_file), clip=str(tmp_path / "no")).check()
    assert "Set AestheticScore.clip to" in error
