"""RAM (arXiv 2605.10759) and RVM (arXiv 2608.23664): regression of the velocity on a target that the reward moves."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import clamped
from lit_vgrpo.core.probability_paths import expand
from lit_vgrpo.core.ranges import HalfOpenUnitInterval, NonNegativeFloat, OnlyWith, PositiveFloat, Range, checked
from lit_vgrpo.core.snapshots import Decay
from lit_vgrpo.core.surrogate import TimeGrid, mean_over_pixels, surrogate
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.base import Copy, Metrics
from lit_vgrpo.objectives.pairs import PairObjective, PairPass, Sharing, distance_to, prediction


def velocity_matching(prediction: Tensor, step: Tensor) -> Tensor:
    """Return ``m((v - sg(v - g))^2) / 2``, whose gradient in ``v`` is the step ``g``; ``(B, N, ...) -> (B, N)``.

    RAM's paper has no factor 1/2.
    """
    return mean_over_pixels((prediction - prediction.detach() + step.detach()).square(), 2) / 2


@checked
@dataclass(eq=False)
class RAM(PairObjective):
    """RAM and, with other options, RVM: ``g = w A (v_old - u) + lambda (v - v_start)``, with ``u = eps - x``.

    In RAM the target ``v - g`` is ``v_start + w A (u - v_old)``, hence ``lambda = 1``, and a slow copy ``old`` samples
    the images. With ``old_decay: 0``, ``old`` is the policy itself, as in RVM: it samples and needs no passes. RVM
    then has half the gradient of AWM with ``weighting: uniform``, in an iteration's first update.
    A pair's loss is weighted by ``(k + 1) t^k``, which in expectation equals drawing times with this density.

    Defined on a rectified flow only. The predictions of the start and of ``old`` are kept for a whole iteration; each
    is as large as the latents times ``num_times``.

    Args:
        num_times: Pairs (t, eps) per image, one time in each equal part of the schedule (the parts are ours).
        share_pairs: Images that share their pairs: none, those of a group, or all of an iteration. Ours.
        share_passes: ``pure_noise`` sets the first time to ``t = 1``, where the images of a group share one pass; see
            :class:`~lit_vgrpo.objectives.vgrpo.VGRPO`. Ours.
        reward_weight: ``w``: 100 for GenEval and OCR, 1000 for PickScore; 0.1 in RVM.
        advantage_clip: Bound on the advantages; null for none, as in RAM; 5 in RVM.
        kl_weight: ``lambda``; 0 saves the reference's passes.
        time_power: ``k``: 1 in RAM; 0, uniform, in RVM.
        old_decay: Decay of ``old``, moved after every gradient step; 0 for no copy.

    The other options are those of :class:`~lit_vgrpo.objectives.pairs.PairObjective`.

    Source:
        RAM's abstract and README, and third-party readings of its equation 17 and code; the code was not available.
        RVM's abstract, and notes of a third-party reimplementation. All constants are these third parties', unverified.
    """

    path_kinds: ClassVar[tuple[str, ...]] = ("flow",)
    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("euler", steps=20)

    num_times: Annotated[int, Range(1, 1000)] = 8
    _: KW_ONLY
    times: Literal["sampler", "uniform"] | TimeGrid = "uniform"
    share_pairs: Sharing = "none"
    share_passes: Annotated[Literal["none", "pure_noise"], OnlyWith("share_pairs", "group")] = "none"
    reward_weight: PositiveFloat = 100.0
    advantage_clip: PositiveFloat | None = None
    kl_weight: NonNegativeFloat = 1.0
    time_power: NonNegativeFloat = 1.0
    old_decay: HalfOpenUnitInterval | Decay = Decay(rate=0.01, max=0.9)

    @property
    def sharing(self) -> Sharing:
        return self.share_pairs

    def bounded(self, advantages: Tensor) -> Tensor:
        return clamped(advantages, self.advantage_clip)

    def copies_needed(self) -> dict[str, Copy]:
        old = Copy({"old": prediction}, decay=self.old_decay, moves="update", samples_from=0)
        return super().copies_needed() | {"old": old}

    def losses(self, now: PairPass, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        metrics = {"surrogate": surrogate(mean_over_pixels(now.error.detach().square(), 2))}
        with torch.no_grad():
            old_error = now.error + (kept["old"] - now.prediction)
            step = self.reward_weight * expand(micro.advantages, old_error) * old_error
            if self.kl_weight > 0:
                step += self.kl_weight * (now.prediction - kept["reference"])
                metrics["kl"] = distance_to(now, kept["reference"])
        density = (self.time_power + 1) * now.times**self.time_power
        return surrogate(density * velocity_matching(now.prediction, step)), metrics

    def kl(self, now: PairPass, kept: Mapping[str, Tensor]) -> None:
        return None  # it is in the step
