"""The ELBO surrogate of V-GRPO: a denoising loss in place of ``-log pi(o | c)``.

Source: arXiv 2604.23380. Pure functions in float32; shapes: ``B`` images, ``N`` Monte-Carlo pairs (N_MC), ``K`` rows
of pairs (one per group if shared, else one per image), ``...`` the latent's dimensions.

The times of pairs are drawn from the sampler's, or from a part of the continuous schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import group_statistics
from lit_vgrpo.core.ranges import Count, PositiveFloat, checked

ERROR_FLOOR = 1e-6


def draw_levels(number: int, generator: torch.Generator, stratified: bool = True) -> Tensor:
    """Return ``(N,)`` positions in [0, 1): one in each of N equal parts, or N independent ones."""
    uniform = torch.rand(number, generator=generator)
    return ((torch.arange(number) + uniform) / number).clamp(max=1 - 1e-6) if stratified else uniform


@dataclass(frozen=True)
class SamplerTimes:
    """A contiguous part of the sampler's times ``(n,)``, float32, noisiest first."""

    times: Tensor

    def within(self, time_range: Sequence[float] | None) -> SamplerTimes:
        """Keep the times in ``[lo, hi]``; ValueError if there are none."""
        if time_range is None:
            return self
        low, high = time_range
        kept = self.times[(self.times >= low) & (self.times <= high)]
        if not len(kept):
            raise ValueError(
                f"model.objective.time_range={[low, high]} contains none of the sampler's times, which lie between "
                f"{self.times.min():.3g} and {self.times.max():.3g}. Widen it, or use more rollout.steps."
            )
        return SamplerTimes(kept)

    def below_one(self) -> SamplerTimes:
        """Leave out pure noise, ``t = 1``."""
        return SamplerTimes(self.times[self.times < 1])

    def noisiest(self, number: int, progress: float = 0.0) -> SamplerTimes:
        """Keep the noisiest ``number`` times, or more as ``progress`` goes from 0 to 1, at which all are kept."""
        rest = max(0, len(self.times) - number)
        return SamplerTimes(self.times[: number + int(rest * progress + 1e-9)])

    def draw(self, number: int, generator: torch.Generator, stratified: bool = True) -> Tensor:
        """Return N times ``(N,)``, float32; fewer times than draws are repeated as evenly as possible.

        Args:
            number: N.
            generator: A CPU generator.
            stratified: Draw one from each of N parts, which differ by at most one time (``tensor_split``).
        """
        size = len(self.times)
        if number and not size:
            raise ValueError(
                "model.objective.share_passes leaves no time below 1 to train at. Use more rollout.steps, a lower "
                "start of time_range, or share_passes: none."
            )
        if not stratified or not 0 < number <= size:
            levels = draw_levels(number, generator, stratified)
            return self.times[(levels * size).long().clamp(max=size - 1)]
        sizes = torch.tensor([len(part) for part in torch.arange(size).tensor_split(number)])
        offset = (torch.rand(number, generator=generator) * sizes).long().minimum(sizes - 1)
        return self.times[sizes.cumsum(0) - sizes + offset]

    def pick(self, number: int, generator: torch.Generator) -> Tensor:
        """Return different times ``(N,)`` in random order; ValueError if there are not enough of them."""
        if number > len(self.times):
            raise ValueError(
                f"Each image needs {number} different times, but time_range and noisiest leave {len(self.times)} of "
                f"the sampler's. Set model.objective.num_times={len(self.times)} or less."
            )
        return self.times[torch.randperm(len(self.times), generator=generator)[:number]]


def shifted(u: Tensor, shift: float) -> Tensor:
    """Return the times ``s u / (1 + (s - 1) u)`` of a resolution shift ``s`` (arXiv 2403.03206)."""
    return shift * u / (1 + (shift - 1) * u)


@dataclass(frozen=True)
class ContinuousTimes:
    """A part of the continuous schedule ``t = s u / (1 + (s - 1) u)`` with ``u = 1 - level`` uniform in (0, 1].

    Attributes:
        shift: Resolution shift s (arXiv 2403.03206); 1 for none.
        first: Level of the noisiest time that is drawn, in [0, 1).
        stop: Level of the cleanest time.
    """

    shift: float = 1.0
    first: float = 0.0
    stop: float = 1.0

    def within(self, time_range: Sequence[float] | None) -> ContinuousTimes:
        """Keep the times in ``[lo, hi]``."""
        if time_range is None:
            return self
        first, stop = (1 - t / (self.shift - (self.shift - 1) * t) for t in reversed(time_range))
        return replace(self, first=first, stop=stop)

    def noisiest(self, share: float, progress: float = 0.0) -> ContinuousTimes:
        """Keep the noisiest share of the whole schedule, or more as ``progress`` goes from 0 to 1."""
        width = self.stop - self.first
        share = min(share, width)
        return replace(self, stop=self.first + share + (width - share) * progress)

    def draw(self, number: int, generator: torch.Generator, stratified: bool = True) -> Tensor:
        """Return N times as :meth:`SamplerTimes.draw`, from equal parts of the levels; stratified ones all differ."""
        u = 1 - (self.first + (self.stop - self.first) * draw_levels(number, generator, stratified))
        return shifted(u, self.shift)

    pick = draw


TimePool = SamplerTimes | ContinuousTimes
SharePasses = Literal["none", "pure_noise", "group"]
"""Pairs for which the images of a group share one network pass: none, the first (at ``t = 1``), or all."""


@checked
@dataclass(frozen=True)
class TimeGrid:
    """Fixed times ``t = s u / (1 + (s - 1) u)`` at ``u = 1, (n - 1) / n, ..., 1 / n``.

    Args:
        grid: Number of times n.
        shift: Resolution shift s; 1 for none.
    """

    grid: Count
    shift: PositiveFloat = 1.0

    def times(self) -> Tensor:
        """Return the times ``(n,)``, float32, noisiest first.

        >>> TimeGrid(4).times()
        tensor([1.0000, 0.7500, 0.5000, 0.2500])
        """
        return shifted(torch.arange(self.grid, 0, -1) / self.grid, self.shift)


@dataclass
class Pairs:
    """Monte-Carlo pairs ``(t_j, eps_j)`` and which of their rows each image uses.

    Attributes:
        times: Shape ``(K, N)``, float32 in (0, 1].
        noise: Shape ``(K, N, ...)``, float32: the noise, or for a shared pair the noisy latent ``z``, which equals the
            noise at ``t = 1``.
        rows: Shape ``(B,)``, int64 in ``0 .. K-1``.
        shared: Number of leading pairs for which all images of a row share one network pass.
        predictions: Named predictions of copies of the weights at the shared pairs, each ``(K, shared, ...)``.
    """

    times: Tensor
    noise: Tensor
    rows: Tensor
    shared: int = 0
    predictions: dict[str, Tensor] = field(default_factory=dict)

    def select(self, index: slice | Tensor) -> Pairs:
        """Return the pairs of some of the images; the rows themselves are shared, not copied."""
        return replace(self, rows=self.rows[index])

    def compact(self) -> Pairs:
        """Return pairs with only the rows that some image uses."""
        used, rows = torch.unique(self.rows, return_inverse=True)
        return self.with_table({name: values[used] for name, values in self.table().items()}, rows)

    def table(self) -> dict[str, Tensor]:
        """Return all tensors with one row per ``K``, by name."""
        return {"times": self.times, "noise": self.noise, **self.predictions}

    def with_table(self, table: Mapping[str, Tensor], rows: Tensor) -> Pairs:
        """Return pairs with other values of :meth:`table` and other rows."""
        values = dict(table)
        return Pairs(values.pop("times"), values.pop("noise"), rows, self.shared, values)

    def of_images(self) -> tuple[Tensor, Tensor]:
        """Return ``times (B, N)`` and ``noise (B, N, ...)``, one row per image."""
        return self.times[self.rows], self.noise[self.rows]

    def to(self, device: torch.device | str) -> Pairs:
        table = {name: values.to(device) for name, values in self.table().items()}
        return self.with_table(table, self.rows.to(device))


def mean_over_pixels(values: Tensor, keep: int) -> Tensor:
    """Return the mean ``m(.)`` over all but the first ``keep`` dimensions."""
    return values.flatten(keep).mean(dim=keep)


def denoising_error(error: Tensor, self_normalised: bool) -> Tensor:
    """Return ``l_ij (B, N)``, the squared error of each pair, optionally divided by its detached absolute error.

    Args:
        error: ``x_hat - o`` (or the equivalent in another space), shape ``(B, N, ...)``.
        self_normalised: The adaptive weighting ``m(e^2) / sg(m(|e|))``.
    """
    squared = mean_over_pixels(error.square(), 2)
    return squared / absolute_error(error) if self_normalised else squared


def absolute_error(error: Tensor, floor: float = ERROR_FLOOR) -> Tensor:
    """Return ``sg(m(|e|))``, floored, since an exact prediction would give 0/0; ``(B, N, ...) -> (B, N)``."""
    return mean_over_pixels(error.detach().abs(), 2).clamp(min=floor)


def surrogate(errors: Tensor) -> Tensor:
    """Return ``L_i``, the mean of ``l_ij`` over pairs; ``(B, N) -> (B,)``. ``-L_i`` replaces ``log pi(o_i | c)``."""
    return errors.mean(dim=1)


def coefficient_of_variation(values: Tensor, group_ids: Tensor | None = None) -> float:
    """Return population std over mean of ``values (B,)``, averaged over groups; the paper's diagnostic."""
    ids = torch.zeros(len(values), dtype=torch.int64, device=values.device) if group_ids is None else group_ids
    mean, std, count, _ = group_statistics(values, ids)
    return float((std / mean.abs().clamp(min=1e-12) / count).sum() / (1 / count).sum())


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float | None) -> Tensor:
    """Return PPO's surrogate (arXiv 1707.06347), to be maximised, of the shape of ``log_ratio``.

    Args:
        log_ratio: Log of new over old likelihood, shape ``(B, ...)``, float32; carries grad.
        advantages: Broadcastable to ``log_ratio``, unitless, zero-mean in each group.
        clip: Half-width of the trust region around ratio 1; ``None`` switches it off.
    """
    ratio = log_ratio.exp()
    if clip is None:
        return ratio * advantages
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def ratio_metrics(log_ratio: Tensor, clip: float | None) -> dict[str, Tensor]:
    """Return ``ratio_deviation`` and ``clip_fraction`` per image, detached, averaged over steps or times."""
    deviation = (log_ratio.detach().exp() - 1).abs()
    outside = torch.zeros_like(deviation) if clip is None else (deviation > clip).float()
    metrics = {"ratio_deviation": deviation, "clip_fraction": outside}
    return {name: each.mean(dim=1) if each.ndim > 1 else each for name, each in metrics.items()}
