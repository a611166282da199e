"""Signal and noise of the surrogate's gradient at each time of the schedule."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lit_vgrpo.core.noise import seeded_generator
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.core.surrogate import Pairs, denoising_error
from lit_vgrpo.core.types import Experience
from lit_vgrpo.objectives.pairs import PairObjective, PairPass
from lit_vgrpo.policies.base import Policy

STREAM_NOISE = 1000
"""Stream of the draws' noise, separate from those of training."""


class GradientNoise:
    """Running mean and spread of independent draws of a gradient, without keeping the draws."""

    def __init__(self) -> None:
        self.draws = 0
        self._sums: list[Tensor] = []
        self._squares = 0.0

    def add(self, gradient: Sequence[Tensor]) -> None:
        """Add a draw; every draw has the same shapes."""
        self.draws += 1
        self._squares += sum(float(part.double().square().sum()) for part in gradient)
        self._sums = [a + b for a, b in zip(self._sums, gradient, strict=True)] if self._sums else list(gradient)

    def snr(self, draws: float = 1.0) -> float:
        """Return ``|mean| / spread`` of the average of ``draws`` draws; 0 if the mean is lost in the noise.

        ``spread^2`` is the unbiased variance of a draw, summed over the weights, divided by ``draws``. ``|mean|^2`` is
        that of the measured mean, minus the contribution of noise.
        """
        mean_squared = sum(float(total.double().square().sum()) for total in self._sums) / self.draws**2
        variance = max(0.0, self._squares - self.draws * mean_squared) / (self.draws - 1)
        signal = max(0.0, mean_squared - variance / self.draws)
        return math.sqrt(signal * draws / variance) if variance > 0 else 0.0


def snr_by_time(
    objective: PairObjective,
    policy: Policy,
    micros: Sequence[Experience],
    group_ids: Tensor,
    times: Tensor,
    draws: int,
    seed: tuple[int, ...],
) -> list[float]:
    """Return the signal-to-noise ratio at each time of V-GRPO's gradient with one pair per image; none for one group.

    The gradient is that of ``mean(A_i l_i)`` with the self-normalised error in x, at the current weights, averaged over
    all images of the micro-batches. A draw is a group, or the part of it in one micro-batch, so that draws share
    neither images nor noise. Images of a group share their noise if the method shares pairs.

    Args:
        micros: This rank's micro-batches of one iteration.
        group_ids: Groups of all their images, ``(B,)``.
        times: ``(K,)``, in (0, 1].
        draws: Maximum groups per time; the first ones are used.
        seed: Seed of the draws' noise.
    """
    weights = list(trainable_parameters(policy).values())
    guidance, cap = objective.guidance_in("training", policy), getattr(objective, "scale_cap", None)
    is_shared = objective.sharing != "none"
    own = group_ids.to(micros[0].latents.device).split([len(micro) for micro in micros])
    pieces = [
        micro.select((ids == group).nonzero()[:, 0])
        for micro, ids in zip(micros, own, strict=True)
        for group in torch.unique(ids)
    ][:draws]
    if len(pieces) < 2:
        return []
    found = []
    for place, time in enumerate(times.tolist()):
        noise = GradientNoise()
        for draw, piece in enumerate(pieces):
            rows = torch.zeros(len(piece), dtype=torch.int64) if is_shared else torch.arange(len(piece))
            count = int(rows.max()) + 1
            generator = seeded_generator(*seed, STREAM_NOISE, place, draw)
            eps = torch.randn((count, 1, *piece.latents.shape[1:]), generator=generator)
            at = policy.path.snap(torch.full((count, 1), time))
            pairs = Pairs(at, eps, rows).to(piece.latents.device)
            asked = replace(piece, pairs=pairs, kept={}).to(policy.device)
            error = PairPass(policy, asked, "x", cap, guidance).error
            loss = (asked.advantages * denoising_error(error, self_normalised=True)[:, 0]).mean()
            parts = torch.autograd.grad(loss, weights, allow_unused=True)
            noise.add([p.new_zeros(()) if g is None else g for p, g in zip(weights, parts, strict=True)])
        found.append(noise.snr(len(group_ids) * len(pieces) / sum(map(len, pieces))))
    return found
