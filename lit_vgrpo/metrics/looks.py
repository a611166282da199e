"""Diversity, sharpness and saturation of held-out images, and their distance from those at the start of training."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

WITHIN, ACROSS, SHARPNESS, SATURATION, DISTANCE = LOOKS = (
    "diversity_within_prompts",
    "diversity_across_prompts",
    "sharpness",
    "saturation",
    "distance_to_start",
)
SIDE = 16
"""Side of the reduced images, in pixels."""


def reduced(images: Tensor) -> Tensor:
    """Return images ``(B, 3, H, W)`` in [0, 1] as ``(B, 768)``: 16 x 16 pixels in whole grey levels from 0 to 255."""
    return (F.adaptive_avg_pool2d(images.float(), SIDE).flatten(1) * 255).round()


def sharpness(images: Tensor) -> Tensor:
    """Return the mean difference of neighbouring pixels' brightness, ``(B,)``, of images ``(B, 3, H, W)``."""
    grey = images.float().mean(1)
    return grey.diff(dim=1).abs().mean((1, 2)) + grey.diff(dim=2).abs().mean((1, 2))


def saturation(images: Tensor) -> Tensor:
    """Return the mean difference of each pixel's largest and smallest channel, ``(B,)``, of ``(B, 3, H, W)``."""
    return (images.amax(1) - images.amin(1)).float().mean((1, 2))


def distances(small: Tensor, others: Tensor) -> Tensor:
    """Return the root mean square difference in [0, 1] of each pair of :func:`reduced` images, ``(B,)``."""
    return (small - others).double().square().mean(1).sqrt() / 255


def diversities(small: Tensor, prompts: Tensor) -> tuple[float, float]:
    """Return the diversity within and across prompts, as root mean square differences in [0, 1].

    The first is that of two images of one prompt. The second is that of two prompts' mean images, from which the part
    due to the images' noise is subtracted: 0 if the images do not depend on the prompt. If each prompt has one image,
    the first is NaN, and the second includes the noise. It is NaN for fewer than two prompts. The images are
    :func:`reduced`, ``(B, 768)``, and the prompts any numbers, ``(B,)``.

    >>> black, white = torch.zeros(2, 768), torch.full((2, 768), 255.0)
    >>> diversities(torch.cat([black, white]), torch.tensor([0, 0, 1, 1]))
    (0.0, 1.0)
    """
    values, (_, members, counts) = small.double() / 255, prompts.unique(return_inverse=True, return_counts=True)
    means = values.new_zeros(len(counts), values.shape[1]).index_add(0, members, values) / counts[:, None]
    is_repeated = len(values) > len(counts)
    noise = (values - means[members]).square().sum() / (len(values) - len(counts)) if is_repeated else math.nan
    across = means.var(0).sum() if len(counts) > 1 else torch.tensor(math.nan)
    if is_repeated:
        across = (across - noise * (1 / counts).mean()).clamp(min=0)
    return tuple(math.sqrt(2 * float(value) / values.shape[1]) for value in (noise, across))  # type: ignore[return-value]
