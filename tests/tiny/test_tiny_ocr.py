"""The words task: what it prints can be read, and the shipped pipeline starts where the recipe says it does."""

from collections import Counter

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from tiny_prompts import HELDOUT, TRAIN, word_rows

from lit_vgrpo import SD3Policy
from lit_vgrpo.rewards.ocr import OCRReward, wanted_text
from lit_vgrpo.system.paths import shipped_root
from lit_vgrpo.tiny import WordImages
from lit_vgrpo.tiny.words import LETTERS, WORD_LENGTH, prompt_of, random_letters, render

ASSET = shipped_root() / "assets" / "tiny_ocr"


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def pictures(words: list[str]) -> torch.Tensor:
    return torch.stack([render(word, generator) for word, generator in zip(words, generators(len(words)), strict=True)])


@pytest.fixture(scope="module")
def ocr() -> OCRReward:
    reward = OCRReward(detect=False)
    reward.load()
    return reward


@pytest.fixture(scope="module")
def policy() -> SD3Policy:
    return SD3Policy(str(ASSET), height=16, width=40, max_sequence_length=1, decode_batch_size=32).load()


def scores(ocr: OCRReward, images: torch.Tensor, words: list[str]) -> torch.Tensor:
    return ocr(images, [prompt_of(word) for word in words], [{} for _ in words])


def test_words_are_of_the_letters_and_none_is_in_both_parts() -> None:
    assert all(len(word) == WORD_LENGTH and set(word) <= set(LETTERS) for word in TRAIN + HELDOUT)
    assert not set(TRAIN) & set(HELDOUT)
    assert len(set(TRAIN)) == len(TRAIN)
    asked = [[wanted_text(row["prompt"], row) for row in rows] for rows in word_rows()]
    assert asked == [TRAIN, HELDOUT]
    for place in range(WORD_LENGTH):  # else a held-out word would ask for what was never rewarded
        assert {word[place] for word in HELDOUT} <= {word[place] for word in TRAIN}


@pytest.mark.slow
def test_printed_words_are_read_and_other_words_are_not(ocr: OCRReward) -> None:
    words = TRAIN + HELDOUT
    images = pictures(words)
    assert scores(ocr, images, words).mean() >= 0.98
    assert scores(ocr, images[:20], words[40:60]).mean() < 0.5
    images, captions = WordImages(caption_noise=0)([""] * 60, [{}] * 60, generators(60))
    assert ocr(images, captions, [{}] * 60).mean() >= 0.95


@pytest.mark.slow
def test_the_shipped_autoencoder_keeps_words_legible(ocr: OCRReward, policy: SD3Policy) -> None:
    words = TRAIN[::2] + HELDOUT
    latents = policy.encode_images(pictures(words))
    assert latents.shape == (len(words), 8, 4, 10)
    assert latents.mean().abs() < 0.1
    assert latents.std() == pytest.approx(1, abs=0.1)
    noisy = latents + 0.2 * torch.randn(latents.shape, generator=torch.Generator().manual_seed(0))
    assert scores(ocr, policy.decode(latents), words).mean() >= 0.95
    assert scores(ocr, policy.decode(noisy), words).mean() >= 0.9


def test_captions_are_misspelt_at_the_given_rate_and_pictures_stay_true() -> None:
    count = 600
    prompts, rows = [""] * count, [{}] * count
    clean, true = WordImages(caption_noise=0)(prompts, rows, generators(count))
    noisy, said = WordImages(caption_noise=0.4)(prompts, rows, generators(count))
    assert torch.equal(clean, noisy)
    shown = [random_letters(generator) for generator in generators(count)]
    assert true == [prompt_of(letters) for letters in shown]
    for place in range(WORD_LENGTH):
        swapped = [
            wanted_text(caption, {})[place] != letters[place] for caption, letters in zip(said, shown, strict=True)
        ]
        assert sum(swapped) / count == pytest.approx(0.4, abs=0.06)
        counts = Counter(letters[place] for letters in shown)
        assert set(counts) == set(LETTERS)
        assert max(counts.values()) < 2 * count / len(LETTERS)


@pytest.mark.slow
def test_the_shipped_pipeline_spells_badly_in_plain_diffusers(ocr: OCRReward) -> None:
    pipeline = StableDiffusion3Pipeline.from_pretrained(ASSET, text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    words = HELDOUT * 8
    images = pipeline(
        [prompt_of(word) for word in words],
        height=16,
        width=40,
        num_inference_steps=10,
        guidance_scale=1.0,
        max_sequence_length=1,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).images
    assert images.shape == (len(words), 3, 16, 40)
    assert 0.3 < scores(ocr, images, words).mean() < 0.6
