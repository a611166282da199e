"""The ELBO surrogate of V-GRPO: a denoising loss in place of ``-log pi(o | c)``.

Source: arXiv 2604.23380. Pure functions in float32; shapes: ``B`` images, ``N`` Monte-Carlo pairs (N_MC), ``K`` rows
of pairs (one per group if shared, else one per image), ``...`` the latent's dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import group_statistics
from lit_vgrpo.core.noise import unit_noise
from lit_vgrpo.core.times import TimePool

ERROR_FLOOR = 1e-6


@dataclass
class Pairs:
    """Monte-Carlo pairs ``(t_j, eps_j)`` and which of their rows each image uses.

    Attributes:
        times: shape ``(K, N)``, float32 in (0, 1].
        noise: shape ``(K, N, ...)``, float32.
        rows: shape ``(B,)``, int64 in ``0 .. K-1``.
    """

    times: Tensor
    noise: Tensor
    rows: Tensor

    def select(self, index: slice | Tensor) -> Pairs:
        """Return the pairs of some of the images; the rows themselves are shared, not copied."""
        return Pairs(self.times, self.noise, self.rows[index])

    def compact(self) -> Pairs:
        """Return pairs with only the rows that some image uses."""
        used, rows = torch.unique(self.rows, return_inverse=True)
        return Pairs(self.times[used], self.noise[used], rows)

    def of_images(self) -> tuple[Tensor, Tensor]:
        """Return ``times (B, N)`` and ``noise (B, N, ...)``, one row per image."""
        return self.times[self.rows], self.noise[self.rows]

    def to(self, device: torch.device | str) -> Pairs:
        return Pairs(self.times.to(device), self.noise.to(device), self.rows.to(device))


def draw_pairs(
    generators: Sequence[torch.Generator],
    rows: Tensor,
    num_pairs: int,
    latent_shape: Sequence[int],
    *,
    times: TimePool,
    stratified: bool = True,
) -> tuple[Pairs, Tensor]:
    """Draw one row of pairs for each generator.

    Args:
        generators: K generators; the row of pairs depends on its own generator alone.
        rows: shape ``(B,)``: the row of each image, e.g. its group's position.
        num_pairs: N_MC.
        latent_shape: ``(C, h, w)``.
        times: where times are drawn from.
        stratified: draw one time from each of N_MC parts of it.

    Returns:
        The pairs, and the importance weights of their times ``(K, N)``.
    """
    drawn, weights = zip(*(times.draw(num_pairs, stratified, generator) for generator in generators), strict=True)
    noise = unit_noise(generators, (num_pairs, *latent_shape))
    return Pairs(torch.stack(drawn).float(), noise, rows), torch.stack(weights)


def mean_over_pixels(values: Tensor, keep: int) -> Tensor:
    """Return the mean ``m(.)`` over all but the first ``keep`` dimensions."""
    return values.flatten(keep).mean(dim=keep)


def denoising_error(error: Tensor, self_normalised: bool) -> Tensor:
    """Return ``l_ij``, the squared error of each pair, optionally divided by its detached absolute error.

    Args:
        error: ``x_hat - o`` (or the equivalent in another space), shape ``(B, N, ...)``.
        self_normalised: the adaptive weighting ``m(e^2) / sg(m(|e|))``; the denominator is floored, since an exact
            prediction would give 0/0.

    Returns:
        Shape ``(B, N)``.
    """
    squared = mean_over_pixels(error.square(), 2)
    if not self_normalised:
        return squared
    return squared / absolute_error(error)


def absolute_error(error: Tensor) -> Tensor:
    """Return ``sg(m(|e|))``, floored; ``(B, N, ...) -> (B, N)``."""
    return mean_over_pixels(error.detach().abs(), 2).clamp(min=ERROR_FLOOR)


def surrogate(errors: Tensor) -> Tensor:
    """Return ``L_i``, the mean of ``l_ij`` over pairs; ``(B, N) -> (B,)``. ``-L_i`` replaces ``log pi(o_i | c)``."""
    return errors.mean(dim=1)


def coefficient_of_variation(values: Tensor, group_ids: Tensor | None = None) -> float:
    """Return population std over mean of ``values (B,)``, with ``group_ids (B,)`` averaged over groups.

    Source:
        The paper's diagnostic, overall and within groups.
    """
    one_group = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    mean, std, count, _ = group_statistics(values, one_group if group_ids is None else group_ids)
    return float((std / mean.abs().clamp(min=1e-12) / count).sum() / (1 / count).sum())


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float | None) -> Tensor:
    """Return PPO's surrogate, to be maximised.

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
    """Return ``ratio_deviation`` and ``clip_fraction`` per image, detached, averaged over steps or times."""
    deviation = (log_ratio.detach().exp() - 1).abs()
    outside = torch.zeros_like(deviation) if clip is None else (deviation > clip).float()
    return {
        "ratio_deviation": deviation.flatten(1).mean(dim=1) if deviation.ndim > 1 else deviation,
        "clip_fraction": outside.flatten(1).mean(dim=1) if outside.ndim > 1 else outside,
    }
