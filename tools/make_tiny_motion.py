"""Write the pipeline and the prompts of the tiny video task: a small Wan pipeline that follows prompts poorly.

python tools/make_tiny_motion.py        # 35 minutes of CPU time
lightning run tiny_motion
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from make_tiny_edit import RECIPES, train_to_denoise
from tiny_large_models import build_wan
from tiny_prompts import motion_prompt, motion_rows
from torch import Tensor

from lit_vgrpo.policies import Conditioning, WanPolicy
from lit_vgrpo.tiny.shapes import BACKGROUND, DIRECTIONS, IMAGE_SIZE, MOTION_CHOICES, PALETTE, area_of, coverage

CHANNELS, SIDE, CROP, TOKENS = 6, 32, 16, 8
FRAMES = 5
_TRAVEL = (8.0, 12.0)  # pixels from the first frame to the last
_JITTER = 3.0  # pixels around the image's centre, halfway through
_log = logging.getLogger(__name__)


def render(colour: str, shape: str, motion: str, generator: torch.Generator) -> Tensor:
    """Render one video ``(5, 3, 32, 32)``, float32 in [0, 1], with a random size, place and speed."""
    u = torch.rand(4, generator=generator)
    travel = (_TRAVEL[0] + (_TRAVEL[1] - _TRAVEL[0]) * u[0]) * (torch.arange(FRAMES) / (FRAMES - 1) - 0.5)
    x, y = (
        IMAGE_SIZE / 2 + step * travel + _JITTER * (2 * offset - 1)
        for step, offset in zip(DIRECTIONS[motion], u[1:3], strict=True)
    )
    mask = coverage(shape, x, y, area_of(shape, u[3]).expand(FRAMES))[:, None]
    background = torch.tensor(BACKGROUND)[:, None, None]
    return background + mask * (torch.tensor(PALETTE[colour])[:, None, None] - background)


def random_videos(count: int, generator: torch.Generator, prompt_noise: float) -> tuple[Tensor, list[str]]:
    """Render videos ``(count, 5, 3, 32, 32)`` in [0, 1] and their prompts, which may name wrong attributes."""
    videos, prompts = [], []
    for _ in range(count):
        true, said = [], []
        for values in MOTION_CHOICES.values():
            pick, other = (
                int(torch.randint(most, (1,), generator=generator)) for most in (len(values), len(values) - 1)
            )
            is_wrong = float(torch.rand(1, generator=generator)) < prompt_noise
            true.append(values[pick])
            said.append(values[(pick + 1 + other) % len(values)] if is_wrong else values[pick])
        videos.append(render(true[0], true[1], true[2], generator))
        prompts.append(motion_prompt(*said))
    return torch.stack(videos), prompts


def train_vae(seed: int, steps: int, batch_size: int) -> Any:
    """Train a video autoencoder, 5 x 32 x 32 to 3 x 8 x 8 latents, and store the statistics of its latents."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae: Any = AutoencoderKLWan(
            base_dim=8,
            z_dim=CHANNELS,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * CHANNELS,
            latents_std=[1.0] * CHANNELS,
            scale_factor_temporal=2,
            scale_factor_spatial=4,
        )
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        left, top = torch.randint(3, SIDE - CROP - 2, (2,), generator=generator).tolist()
        whole = random_videos(batch_size, generator, 0.0)[0].transpose(1, 2) * 2 - 1
        pixels = whole[..., top : top + CROP, left : left + CROP]  # a quarter of the work; the shape fills more of it
        mean = vae.encode(pixels).latent_dist.mean
        scale = mean.detach().std()
        decoded = vae.decode(mean + 0.1 * scale * torch.randn(mean.shape, generator=generator)).sample
        error = (decoded - pixels).abs() + (decoded - pixels).square()
        is_shape = (pixels - whole[..., :1, :1]).abs().amax(1, keepdim=True) > 0.1
        loss = (error * (1 + 3 * is_shape)).mean() + 1e-4 * mean.square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            _log.info("autoencoder, step %d: error %.4f, latent std %.3f", step, loss.item(), scale.item())
    with torch.no_grad():
        latents = vae.encode(random_videos(64, generator, 0.0)[0].transpose(1, 2) * 2 - 1).latent_dist.mean
    spread = {"latents_mean": latents.mean((0, 2, 3, 4)), "latents_std": latents.std((0, 2, 3, 4))}
    vae.register_to_config(**{name: [round(value, 4) for value in values.tolist()] for name, values in spread.items()})
    return vae.eval()


def pretrain(policy: WanPolicy, seed: int, steps: int, batch_size: int, prompt_noise: float) -> None:
    """Train a policy's network, with full weights, to denoise videos under prompts that are often wrong."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [row["prompt"] for rows in motion_rows() for row in rows]
    with torch.no_grad():
        texts = Conditioning(policy.encode_prompts(prompts))
        videos, asked = random_videos(2048, generator, prompt_noise)
        latents = policy.encode_images(videos)
    rows = torch.tensor([prompts.index(prompt) for prompt in asked])

    def batch() -> tuple[Tensor, Conditioning]:
        chosen = torch.randint(len(rows), (batch_size,), generator=generator)
        return latents[chosen], texts.select(rows[chosen])

    train_to_denoise(policy, steps, batch, generator)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pipeline and the prompts, and print the pipeline's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECIPES, help="folder with assets/ and prompts/ to write to")
    parser.add_argument("--vae", help="pipeline folder whose autoencoder is reused; by default, one is trained")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random numbers")
    parser.add_argument("--vae-steps", type=int, default=1600, help="optimizer steps of the autoencoder's training")
    parser.add_argument("--steps", type=int, default=6000, help="optimizer steps of the pre-training")
    parser.add_argument("--prompt-noise", type=float, default=0.45, help="probability that an attribute is wrong")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    (args.out / "prompts").mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "heldout"), motion_rows(), strict=True):
        lines = [json.dumps(row) for row in rows]
        (args.out / "prompts" / f"motion_{name}.jsonl").write_text("\n".join(lines) + "\n")
    if args.vae is None:
        vae = train_vae(args.seed, args.vae_steps, batch_size=8)
    else:
        vae = AutoencoderKLWan.from_pretrained(args.vae, subfolder="vae")
    words = sorted({word for rows in motion_rows() for row in rows for word in row["prompt"].split()})
    with tempfile.TemporaryDirectory() as start:
        build_wan(start, args.seed, vae=vae, words=words, heads=6, layers=3, shift=1.0)
        policy = WanPolicy(start, num_frames=FRAMES, height=SIDE, width=SIDE, max_sequence_length=TOKENS)
        policy.load()
        pretrain(policy, args.seed, args.steps, 64, args.prompt_noise)
        print(policy.save(args.out / "assets" / "tiny_motion"))


if __name__ == "__main__":
    main()
