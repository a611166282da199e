"""AWM (arXiv 2509.25050): advantage weighted matching, a policy gradient on the flow-matching loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from lit_vgrpo.core.advantages import clamped
from lit_vgrpo.core.ranges import HalfOpenUnitInterval, NonNegativeFloat, OnlyWith, Range, checked
from lit_vgrpo.core.snapshots import Decay
from lit_vgrpo.core.surrogate import clipped_surrogate, mean_over_pixels, ratio_metrics, surrogate
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.base import Copy, Metrics
from lit_vgrpo.objectives.pairs import PairObjective, PairPass, TimesPer, distance_to, prediction

Weighting = Literal["power", "huber", "uniform"]
ERROR_OFFSET = 1e-10


def log_likelihood(errors: Tensor, times: Tensor, weighting: Weighting = "power", power: float = 0.25) -> Tensor:
    """Return ``log q (B, N)``, at most 0: the surrogate of the log-likelihood of each image at each time.

    Args:
        errors: ``e = m((v_theta - (eps - x))^2)``, shape ``(B, N)``.
        times: ``t``, shape ``(B, N)``, in (0, 1].
        weighting: ``-t ((e + 1e-10)^p - (1e-10)^p) / p``; ``-t (sqrt(e + 1e-10) - 1e-5)``, which is half of it with
            ``p = 1/2``; or ``-e``.
        power: ``p`` of the first.
    """
    if weighting == "huber":
        return log_likelihood(errors, times, "power", 0.5) / 2
    if weighting == "power":
        return -times * ((errors + ERROR_OFFSET) ** power - ERROR_OFFSET**power) / power
    return -errors


@checked
@dataclass(eq=False)
class AWM(PairObjective):
    """AWM: the clipped ratio of every (image, time), and a pull to the start and to a slowly moving copy.

    Defined on a rectified flow only. The predictions of the start and of the copy are kept for a whole iteration; each
    is as large as the latents times ``num_times``.

    Args:
        num_times: Times per image, one in each equal part of the schedule, shared by 32 consecutive images; in the
            public code by the images of a micro-batch.
        weighting: See :func:`log_likelihood`.
        clip: Half-width of the ratio's trust region; null for none. The public code sets 1.0, nearly no bound.
        advantage_clip: Bound on the advantages, before they are divided; null for none.
        advantage_scale: Divisor of the advantages.
        kl_weight: Weight of the squared distance to the start's velocity: 3e-3 in the public code's OCR run, 1e-3 for
            GenEval (3e-3 in its first version), 1e-4 for PickScore; 0 saves the reference's passes.
        ema_weight: Weight of the squared distance to the moving copy's velocity; 0 saves its passes.
        ema_decay: Decay of that copy, moved after each iteration.

    The other options are those of :class:`~lit_vgrpo.objectives.pairs.PairObjective`. The defaults are those of the
    public code's OCR run, except that it samples with SA-Solver without noise, and trains at the noisiest 0.9 of the
    sampler's times: ``noisiest: 12`` of 14 (time type ``discrete``, PickScore), without the first, ``noisiest: 11`` and
    ``time_range: [0, 0.99]`` (``discrete_wo_init``, OCR and GenEval).
    """

    path_kinds: ClassVar[tuple[str, ...]] = ("flow",)
    times_per: ClassVar[TimesPer] = "block"
    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("unipc", steps=14)

    num_times: Annotated[int, Range(1, 1000)] = 6
    weighting: Weighting = "power"
    clip: Annotated[float, Range(above=0, most=1)] | None = 1.0
    advantage_scale: Annotated[float, Range(above=0)] = 5.0
    kl_weight: NonNegativeFloat = 3e-3
    ema_weight: NonNegativeFloat = 1.0
    ema_decay: Annotated[HalfOpenUnitInterval | Decay, OnlyWith("ema_weight")] = Decay(rate=0.001, max=0.3)
    advantage_clip: Annotated[float, Range(above=0)] | None = 5.0

    def bounded(self, advantages: Tensor) -> Tensor:
        return clamped(advantages, self.advantage_clip) / self.advantage_scale

    def log_q(self, now: PairPass) -> Tensor:
        """Return :func:`log_likelihood` of each image at each time, ``(M, N)``."""
        return log_likelihood(mean_over_pixels(now.error.square(), 2), now.times, self.weighting)

    def copies_needed(self) -> dict[str, Copy]:
        copies = super().copies_needed() | {"old": Copy({"old": self.log_q}, decay=0.0)}
        if self.ema_weight > 0:
            copies["ema"] = Copy({"ema": prediction}, decay=self.ema_decay)
        return copies

    def losses(self, now: PairPass, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        log_q = self.log_q(now)
        log_ratio = log_q - kept["old"]
        losses = -surrogate(clipped_surrogate(log_ratio, micro.advantages[:, None], self.clip))
        if self.ema_weight > 0:
            losses = losses + self.ema_weight * distance_to(now, kept["ema"])
        return losses, {"surrogate": -log_q.detach().mean(dim=1), **ratio_metrics(log_ratio, self.clip)}
