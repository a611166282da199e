"""The times that pairs are drawn at: some of the sampler's own, or a part of the continuous schedule.

Both draw with importance weights ``p / q``: how often the whole schedule has a time, over how often it is drawn. The
mean over the draws of ``weight * f(t)`` has the expectation of the sum of ``f`` over the part that is drawn from,
divided by the length of the whole schedule: nothing makes up for times that are never drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class TimePool(Protocol):
    """Where times are drawn from."""

    def draw(self, number: int, stratified: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return N times and their importance weights, each ``(N,)``, float32.

        Args:
            number: how many to draw.
            stratified: draw one from each of N parts of the pool, instead of N independent ones.
            generator: a CPU generator.
        """


def draw_levels(number: int, stratified: bool, generator: torch.Generator) -> Tensor:
    """Return ``(N,)`` positions in [0, 1): one in each of N equal parts, or N independent ones."""
    uniform = torch.rand(number, generator=generator)
    if not stratified:
        return uniform
    return ((torch.arange(number) + uniform) / number).clamp(max=1 - 1e-6)


@dataclass(frozen=True)
class SamplerTimes:
    """A contiguous part of the sampler's own times, each of which is one of its steps.

    Attributes:
        times: ``(n,)``, float32, noisiest first.
        steps: S, the length of the whole schedule.
    """

    times: Tensor
    steps: int

    def within(self, time_range: Sequence[float] | None) -> SamplerTimes:
        """Keep the times in ``[lo, hi]``; ValueError if there are none."""
        if time_range is None:
            return self
        low, high = time_range
        kept = self.times[(self.times >= low) & (self.times <= high)]
        if not len(kept):
            raise ValueError(
                f"model.objective.time_range={[low, high]} holds none of the sampler's {self.steps} times, which lie "
                f"between {self.times.min():.3g} and {self.times.max():.3g}. Widen it, or take more rollout.steps."
            )
        return replace(self, times=kept)

    def noisiest(self, number: int, progress: float = 0.0) -> SamplerTimes:
        """Keep the noisiest ``number`` times, or more of them as ``progress`` goes from 0 to 1, where all are kept."""
        rest = max(0, len(self.times) - number)
        return replace(self, times=self.times[: number + int(rest * progress + 1e-9)])

    def draw(self, number: int, stratified: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw from N parts that differ by at most one time (``tensor_split``), where there are N times or more.

        Fewer times than draws are repeated as evenly as possible.
        """
        size = len(self.times)
        if not stratified or number > size:
            levels = draw_levels(number, stratified, generator)
            return self.times[(levels * size).long().clamp(max=size - 1)], torch.full((number,), size / self.steps)
        sizes = torch.tensor([len(part) for part in torch.arange(size).tensor_split(number)])
        offset = (torch.rand(number, generator=generator) * sizes).long().minimum(sizes - 1)
        return self.times[sizes.cumsum(0) - sizes + offset], number * sizes / self.steps

    def pick(self, number: int, generator: torch.Generator) -> Tensor:
        """Return different times ``(N,)`` in random order; ValueError if there are not enough of them."""
        if number > len(self.times):
            raise ValueError(
                f"An image needs {number} different times, but time_range and noisiest leave {len(self.times)} of the "
                f"sampler's {self.steps}. Set model.objective.num_times={len(self.times)} or less."
            )
        return self.times[torch.randperm(len(self.times), generator=generator)[:number]]


@dataclass(frozen=True)
class ContinuousTimes:
    """A part of the continuous schedule ``t = s u / (1 + (s - 1) u)`` with ``u = 1 - level`` uniform in (0, 1].

    The weights are those of a uniform ``t``, so that they undo the shift.

    Attributes:
        shift: resolution shift s (arXiv 2403.03206); 1 for none.
        first: level of the noisiest time that is drawn, in [0, 1).
        stop: level of the cleanest.
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

    def draw(self, number: int, stratified: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        width = self.stop - self.first
        u = 1 - (self.first + width * draw_levels(number, stratified, generator))
        slope = 1 + (self.shift - 1) * u
        return self.shift * u / slope, width * self.shift / slope.square()
