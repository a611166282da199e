"""The clipped ratio that the policy-gradient methods share."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float | None) -> Tensor:
    """PPO's surrogate, to be maximised.

    Args:
        log_ratio: log of new over old likelihood, shape ``(B, ...)``, float32; carries grad.
        advantages: broadcastable to ``log_ratio``, unitless, zero-mean in each group.
        clip: half-width of the trust region around ratio 1; ``None`` switches it off.

    Returns:
        Shape of ``log_ratio``.

    Source:
        arXiv 1707.06347.
    """
    ratio = log_ratio.exp()
    if clip is None:
        return ratio * advantages
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def ratio_metrics(log_ratio: Tensor, clip: float | None) -> dict[str, Tensor]:
    """``ratio_deviation`` and ``clip_fraction``, detached, one value an image: its mean over steps or times."""
    deviation = (log_ratio.detach().exp() - 1).abs()
    outside = torch.zeros_like(deviation) if clip is None else (deviation > clip).float()
    return {
        "ratio_deviation": deviation.flatten(1).mean(dim=1) if deviation.ndim > 1 else deviation,
        "clip_fraction": outside.flatten(1).mean(dim=1) if outside.ndim > 1 else outside,
    }
