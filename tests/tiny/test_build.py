from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline
from make_tiny import main
from tiny_pipelines import build_sd3
from tiny_text import clip_tokenizer, t5_tokenizer, task_words, text_encoder_with_projection
from tiny_vae import new_vae, normalise_latents, random_pictures, train_vae
from torch import nn

PROMPTS = ["a red circle on the left", "a blue square at the top"]


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def parameters(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def load_sd3(folder: Path) -> StableDiffusion3Pipeline:
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_sd3_folder_loads_and_draws(tmp_path: Path) -> None:
    pipeline = load_sd3(build_sd3(tmp_path))
    assert megabytes(tmp_path) < 8
    assert not list(tmp_path.rglob("*.bin"))
    assert parameters(pipeline.transformer) == pytest.approx(0.6e6, rel=0.1)
    pictures = pipeline(
        PROMPTS, num_inference_steps=2, guidance_scale=1.0, max_sequence_length=1, output_type="pt"
    ).images
    assert pictures.shape == (2, 3, 32, 32)
    assert pictures.isfinite().all()


def test_the_seed_alone_decides_the_weights(tmp_path: Path) -> None:
    weights = []
    for i, seed in enumerate((0, 0, 1)):
        torch.rand(i + 1)
        folder = build_sd3(tmp_path / str(i), seed, small=True)
        weights.append((folder / "transformer" / "diffusion_pytorch_model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_each_word_of_the_task_is_one_token_and_special_ids_agree() -> None:
    for tokenizer, pad in ((clip_tokenizer(), "<|endoftext|>"), (clip_tokenizer(pad_token="!"), "!")):
        assert all(len(tokenizer.tokenize(word)) == 1 for word in task_words())
        assert tokenizer.pad_token == pad
        config = text_encoder_with_projection(tokenizer).config
        assert config.bos_token_id == tokenizer.bos_token_id
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
        other = tokenizer("Ünknown wörds, 42 of them!", truncation=True, max_length=12).input_ids
        assert len(other) == 12
        assert other[-1] == tokenizer.eos_token_id
    assert all(len(t5_tokenizer().tokenize(word)) == 1 for word in task_words())


def test_normalising_latents_keeps_the_reconstruction() -> None:
    vae = new_vae(3)
    pictures = random_pictures(64, torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = vae.decode(vae.encode(pictures * 2 - 1).latent_dist.mean).sample
        normalise_latents(vae, pictures)
        latents = vae.encode(pictures * 2 - 1).latent_dist.mean
        after = vae.decode(latents).sample
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
    scaled = latents * vae.config.scaling_factor
    torch.testing.assert_close(scaled.mean((0, 2, 3)), torch.zeros(8), rtol=0, atol=1e-3)
    torch.testing.assert_close(scaled.std((0, 2, 3)), torch.ones(8), rtol=0, atol=1e-2)


@pytest.mark.slow
def test_training_the_autoencoder_repeats_and_learns() -> None:
    first, again = (train_vae(seed=1, steps=5, batch_size=2) for _ in range(2))
    for weight, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(weight, other)
    pictures = random_pictures(8, torch.Generator().manual_seed(5)) * 2 - 1
    with torch.no_grad():
        errors = [(vae(pictures).sample - pictures).abs().mean() for vae in (new_vae(1), first)]
    assert errors[1] < errors[0]


@pytest.mark.slow
def test_start_takes_the_autoencoder_of_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = build_sd3(tmp_path / "source", seed=7, small=True)
    main([str(tmp_path / "start"), "--kind", "unet", "--vae", str(source)])
    written = StableDiffusionPipeline.from_pretrained(tmp_path / "start").vae
    assert torch.equal(written.quant_conv.weight, load_sd3(source).vae.quant_conv.weight)
    assert str(tmp_path / "start") in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("task", ["shapes", "words"])
def test_start_trains_an_autoencoder_of_its_own(tmp_path: Path, task: str) -> None:
    main([str(tmp_path), "--task", task, "--vae-steps", "5"])
    config = load_sd3(tmp_path).vae.config
    assert config.scaling_factor not in (0.8, 1.0)  # fitted to its latents, and not that of an untrained one
    assert config.shift_factor == 0
