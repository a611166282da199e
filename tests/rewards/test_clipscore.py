import clip_pixels
import pytest
import torch

from lit_vgrpo.rewards.clip import CLIPScore

PROMPTS = ["a red cat", "ein blauer Bär, 猫", "two dogs", "x " * 200]
SIZES = [(48, 40), (32, 32), (20, 60), (200, 300)]


@pytest.fixture(scope="module")
def reward(clip_folder):
    return CLIPScore(str(clip_folder))


class TensorCLIP(torch.nn.Module):
    """A CLIPModel that gives tensors, as torchmetrics 1.9 expects and transformers 5 no longer does."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def get_image_features(self, pixels):
        return self.model.get_image_features(pixels).pooler_output

    def get_text_features(self, ids, mask):
        return self.model.get_text_features(ids, mask).pooler_output


@torch.no_grad()
def torchmetrics_score(folder, image, prompt):
    from torchmetrics.functional.multimodal import clip_score
    from transformers import CLIPModel, CLIPProcessor

    model, processor = TensorCLIP(CLIPModel.from_pretrained(folder)), CLIPProcessor.from_pretrained(folder)
    return clip_score((image * 255).round().to(torch.uint8), prompt, lambda: (model, processor))


@pytest.mark.parametrize("size", SIZES)
def test_scores_are_the_published_arithmetic(clip_folder, reward, size):
    images = torch.stack([clip_pixels.photo(*size, seed) for seed in range(4)])
    scores = reward(images, PROMPTS, [{}] * 4)
    cosines = [clip_pixels.cosine(clip_folder, i, p)[0] for i, p in zip(images, PROMPTS, strict=True)]
    expected = torch.tensor([100 * max(cosine, 0) for cosine in cosines])
    assert expected.std() > 5  # else nothing is compared
    atol = 1e-3 if size == (32, 32) else 0.1  # what is resized differs by a step in a few pixels
    torch.testing.assert_close(scores, expected, atol=atol, rtol=0)


def test_scores_are_those_of_torchmetrics(clip_folder, reward):
    images = torch.stack([clip_pixels.photo(48, 40, seed) for seed in range(6)])
    prompts = ["a red cat", "a dog"] * 3
    expected = torch.stack([torchmetrics_score(clip_folder, i, p) for i, p in zip(images, prompts, strict=True)])
    assert expected.unique().numel() > 2
    torch.testing.assert_close(reward(images, prompts, [{}] * 6), expected, atol=1e-3, rtol=0)


def test_an_opposite_picture_scores_0(clip_folder, reward):
    images = torch.stack([clip_pixels.photo(40, 40, seed) for seed in range(12)])
    scores = reward(images, [f"{letter} cat" for letter in "abcdefghijkl"], [{}] * 12)
    assert scores.min() == 0
    assert 0 < scores.max() <= 100


def test_the_default_is_torchmetrics_own():
    assert (CLIPScore().checkpoint, CLIPScore().processor) == ("openai/clip-vit-large-patch14",) * 2
