from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from tiny_pipelines import build_sd3
from tiny_vae import new_vae, normalise_latents, random_pictures
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
