"""DiffusionNFT (arXiv 2509.16117): contrasts good and bad images on the forward process, without a likelihood."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from lit_vgrpo.core.probability_paths import Space
from lit_vgrpo.core.ranges import HalfOpenUnitInterval, NonNegativeFloat, Range, checked
from lit_vgrpo.core.snapshots import Decay
from lit_vgrpo.core.surrogate import absolute_error, denoising_error, mean_over_pixels, surrogate
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.base import Copy, Metrics
from lit_vgrpo.objectives.pairs import PairObjective, PairPass, TimesPer
from lit_vgrpo.policies.base import Policy

ABSOLUTE_FLOOR = 1e-5


def optimality(advantages: Tensor, clip: float = 5.0) -> Tensor:
    """Return ``r = clip(1/2 + clip(A, -c, c) / (2 c), 0, 1)``, the weight of an image's positive side in its loss."""
    return (0.5 + advantages.clamp(-clip, clip) / (2 * clip)).clamp(0, 1)


def contrastive_error(error: Tensor, old_error: Tensor, share: Tensor, beta: float) -> Tensor:
    """Return ``(r l+ + (1 - r) l-) / beta`` for each pair, ``(B, N)``, to be minimised.

    Args:
        error: ``x_hat_theta - x`` (up to its sign), ``(B, N, ...)``; carries grad.
        old_error: The same of the old policy.
        share: ``r``, ``(B,)`` in [0, 1].
        beta: Position of the implicit positive policy between the old policy (0) and the new (1).
    """
    sides = beta * error + (1 - beta) * old_error, (1 + beta) * old_error - beta * error
    good, bad = (mean_over_pixels(e.square(), 2) / absolute_error(e, ABSOLUTE_FLOOR) for e in sides)
    r = share[:, None]
    return (r * good + (1 - r) * bad) / beta


@dataclass(eq=False)
class SlowSampler(PairObjective):
    """Base of the methods whose images come from a slowly moving copy, and train at different times of the sampler's.

    Args:
        old_decay: Decay of the copy that samples the images, moved after each iteration; by default type 1 of
            DiffusionNFT's public code. Its type 2 is ``{rate: 0.0075, max: 0.999, after: 75}``; with 0 the policy
            itself samples.
        num_times: Times per image, drawn from the sampler's (or its ``noisiest``) without repetition; null takes
            all but one.
        kl_weight: Weight of the squared distance to the start's predictions; 0 saves the reference's passes.
        scale_cap: Bound on ``b / a``, by which an eps-network's error grows in x-space; null for none. Our addition.
    """

    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("dpm++", steps=10)
    times_per: ClassVar[TimesPer] = "image"
    repeats_times: ClassVar[bool] = False

    _: KW_ONLY
    old_decay: HalfOpenUnitInterval | Decay = Decay(rate=0.001, max=0.5)
    num_times: Annotated[int, Range(1, 1000)] | None = None
    kl_weight: NonNegativeFloat = 1e-4
    scale_cap: Annotated[float, Range(above=0)] | None = 5.0

    def space_of(self, policy: Policy) -> tuple[Space, float | None]:
        return "x", self.scale_cap


@checked
@dataclass(eq=False)
class DiffusionNFT(SlowSampler):
    """DiffusionNFT: images come from a slowly moving copy, and each trains at nearly all of the sampler's times.

    On a rectified flow this is the paper's method. On a variance-preserving path, our extension, the
    network's predictions (noise or velocity) are combined where the paper combines velocities, and the error of the
    combination is measured in x as there. At a fixed ``z_t`` that is the prediction's error times a factor: ``t``
    on a flow, ``b`` for a v-network, ``b / a`` bounded by ``scale_cap`` for an eps-network.

    The old policy's errors and the reference's predictions are kept for a whole iteration; each is as large as the
    latents times the number of times.

    Args:
        beta: The paper uses 1.0 for GenEval, PickScore and HPS, and 0.1 for OCR and for several rewards.
        advantage_clip: Bound of the advantages, and weight of the loss; an image's weight is thus its advantage.

    The other options are those of :class:`SlowSampler` and :class:`~lit_vgrpo.objectives.pairs.PairObjective`. The
    paper samples 10 steps without guidance.
    """

    beta: Annotated[float, Range(above=0)] = 1.0
    advantage_clip: Annotated[float, Range(above=0)] = 5.0

    def copies_needed(self) -> dict[str, Copy]:
        old = Copy({"old": lambda now: now.error}, decay=self.old_decay, samples_from=0)
        return super().copies_needed() | {"old": old}

    def losses(self, now: PairPass, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        share = optimality(micro.advantages, self.advantage_clip)
        contrast = surrogate(contrastive_error(now.error, kept["old"], share, self.beta))
        metrics = {"surrogate": surrogate(denoising_error(now.error.detach(), self_normalised=True))}
        return self.advantage_clip * contrast, metrics
