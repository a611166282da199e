"""A small autoencoder for the tiny tasks' images."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

from lit_vgrpo.tiny.shapes import COLOURS, PLACES, SHAPES, render

LATENT_CHANNELS = 8
LATENT_SIZE = 8

_log = logging.getLogger(__name__)


def new_vae(seed: int = 0, scaling_factor: float = 1.0, shift_factor: float | None = None) -> AutoencoderKL:
    """Return an untrained autoencoder, 32 x 32 x 3 to 8 x 8 x 8; any other size is divided by 4 too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(8, 16, 32),
            layers_per_block=1,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=4,
            sample_size=LATENT_SIZE * 4,
            scaling_factor=scaling_factor,
            shift_factor=shift_factor,
            mid_block_add_attention=False,
        )
    return vae.eval()


def random_pictures(count: int, generator: torch.Generator) -> Tensor:
    """Return images of shapes with uniform attributes, shape ``(count, 3, 32, 32)`` in [0, 1]."""
    sizes = (len(COLOURS), len(SHAPES), len(PLACES))
    picks = [torch.randint(n, (count,), generator=generator).tolist() for n in sizes]
    places = list(PLACES)
    return torch.stack(
        [render(COLOURS[c], SHAPES[s], places[p], generator=generator) for c, s, p in zip(*picks, strict=True)]
    )


def train_vae(
    seed: int = 0,
    steps: int = 2500,
    batch_size: int = 32,
    learning_rate: float = 2e-3,
    kl_weight: float = 1e-4,
    pictures: Callable[[int, torch.Generator], Tensor] = random_pictures,
) -> AutoencoderKL:
    """Train the autoencoder on rendered images, and scale its latents to zero mean and unit standard deviation.

    The images and noise depend on the seed alone. The decoder is trained on slightly noisy latents, so that it also
    decodes the ones that a denoiser leaves a little off.

    Args:
        seed: of the weights, the images and the noise.
        steps: optimizer steps.
        batch_size: images a step.
        learning_rate: the peak of a one-cycle schedule, Adam.
        kl_weight: of the KL divergence to a unit Gaussian, summed over the latent and divided by the 48
            image values that each of its positions stands for.
        images: gives so many images ``(count, 3, H, W)`` in [0, 1]; those of shapes by default.

    Returns:
        The autoencoder in eval mode, with ``scaling_factor`` set and ``shift_factor`` 0.
    """
    vae = new_vae(seed).train()
    with torch.no_grad():  # start from little noise: from unit noise the decoder first learns to ignore the latent
        _affine(vae.quant_conv)[1][LATENT_CHANNELS:] -= 4.0
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(vae.parameters(), lr=learning_rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        images = pictures(batch_size, generator) * 2 - 1
        posterior = vae.encode(images).latent_dist
        z = posterior.mean + posterior.std * torch.randn(posterior.mean.shape, generator=generator)
        reconstruction = vae.decode(z).sample
        error = F.l1_loss(reconstruction, images) + F.mse_loss(reconstruction, images)
        loss = error + kl_weight * posterior.kl().mean() / (images[0].numel() / z[0, 0].numel())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            _log.info("step %d: error %.4f, latent std %.3f", step, error.item(), posterior.mean.std().item())
    vae.eval()
    normalise_latents(vae, pictures(2048, generator))
    return vae


@torch.no_grad()
def normalise_latents(vae: AutoencoderKL, images: Tensor) -> None:
    """Make the latents of some images zero-mean and unit-variance after scaling, in place.

    Every channel's mean and its standard deviation relative to the others' are folded into the 1 x 1 convolutions next
    to the latent, because `StableDiffusionPipeline` knows no shift; the common scale is left to ``scaling_factor``.

    Args:
        vae: an autoencoder with quantisation convolutions.
        images: shape ``(B, 3, H, W)`` in [0, 1].
    """
    z = torch.cat([vae.encode(chunk * 2 - 1).latent_dist.mean for chunk in images.split(256)])
    mean, std = z.mean((0, 2, 3)), z.std((0, 2, 3))
    common = std.square().mean().sqrt()
    relative = std / common
    (into, into_bias), (out, out_bias), n = _affine(vae.quant_conv), _affine(vae.post_quant_conv), len(mean)
    out_bias += out[:, :, 0, 0] @ mean
    out *= relative[None, :, None, None]
    into_bias[:n] -= mean
    into[:n] /= relative[:, None, None, None]
    into_bias[:n] /= relative
    into_bias[n:] -= 2 * relative.log()  # the log-variances
    vae.register_to_config(scaling_factor=round(1 / common.item(), 4), shift_factor=0.0)


def _affine(layer: nn.Conv2d | None) -> tuple[Tensor, Tensor]:
    if layer is None or layer.bias is None:
        raise ValueError("vae has no quantisation convolutions to fold the latents' scale into. Use one of new_vae().")
    return layer.weight, layer.bias
