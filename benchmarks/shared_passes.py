"""Bias and variance of one noisy latent per group against one pass per image, at SD 3.5's latent size.

    python benchmarks/shared_passes.py

The network is a small SD3 with random weights. The 24 images of the group are Gaussian latents of shape (16, 64, 64),
standard deviation 1 and correlation 0.5. For each time, the gradient of V-GRPO's surrogate is averaged over draws of
the noise and of the image that the latent starts from. The table lists the cosine with the gradient of one pass per
image, and the length relative to it. The first row of each time compares the two halves of that gradient's draws: noise
alone lowers the cosine to this value.
"""

from __future__ import annotations

import argparse
import math

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from lit_vgrpo.core.surrogate import denoising_error

GROUP, SHAPE, CORRELATION = 24, (16, 64, 64), 0.5
TIMES = (0.99, 0.96, 0.91, 0.86, 0.7)


def small_network(patch_size: int) -> SD3Transformer2DModel:
    """Return a small SD3 transformer for these latents, with random weights."""
    return SD3Transformer2DModel(
        sample_size=64,
        patch_size=patch_size,
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=64,
        pooled_projection_dim=32,
        out_channels=16,
        pos_embed_max_size=64,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=64, help="draws of the noise per time")
    draws = parser.parse_args().draws
    torch.manual_seed(0)
    network = small_network(patch_size=4)
    prompt, pooled = torch.randn(1, 4, 32), torch.randn(1, 32)
    common, own = torch.randn(1, *SHAPE), torch.randn(GROUP, *SHAPE)
    images = math.sqrt(CORRELATION) * common + math.sqrt(1 - CORRELATION) * own
    advantages = torch.randn(GROUP)
    advantages = (advantages - advantages.mean()) / advantages.std(correction=0)

    def predict(noisy: Tensor, t: float) -> Tensor:
        rows = len(noisy)
        return network(noisy, prompt.expand(rows, -1, -1), pooled.expand(rows, -1), torch.full((rows,), 1000 * t))[0]

    def gradient(noisy: Tensor, t: float) -> Tensor:
        """Return the gradient of ``mean_i A_i l_i``, with one pass or one per image."""
        estimate = noisy - t * predict(noisy, t)
        errors = denoising_error((estimate - images)[:, None], self_normalised=True)[:, 0]
        parts = torch.autograd.grad((advantages * errors).mean(), list(network.parameters()), allow_unused=True)
        return torch.cat([part.flatten() for part in parts if part is not None])

    print("time   gradient             cosine   length / a pass per image's")
    for t in TIMES:
        plain: list[Tensor] = []
        shared: list[Tensor] = []
        for _ in range(draws):
            noise = torch.randn(1, *SHAPE)
            plain.append(gradient((1 - t) * images + t * noise, t))
            shared.append(gradient((1 - t) * images[torch.randint(GROUP, (1,))] + t * noise, t))
        whole, mean = torch.stack(plain), torch.stack(shared).mean(dim=0)
        halves = cosine(whole[::2].mean(dim=0), whole[1::2].mean(dim=0))
        length = (mean.norm() / whole.mean(dim=0).norm()).item()
        print(f"{t:.2f}   a pass per image {halves:10.3f} {1:12.2f}")
        print(f"{t:.2f}   a shared pass    {cosine(mean, whole.mean(dim=0)):10.3f} {length:12.2f}", flush=True)


def cosine(one: Tensor, other: Tensor) -> float:
    return torch.dot(one, other).item() / (one.norm() * other.norm()).item()


if __name__ == "__main__":
    main()
