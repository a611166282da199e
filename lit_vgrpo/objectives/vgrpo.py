"""V-GRPO (arXiv 2604.23380): GRPO whose likelihood is the ELBO surrogate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from lit_vgrpo.core.advantages import soft_clip
from lit_vgrpo.core.probability_paths import Space
from lit_vgrpo.core.ranges import NonNegativeFloat, OnlyWith, Range, checked
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.surrogate import (
    SharePasses,
    clipped_surrogate,
    denoising_error,
    mean_over_pixels,
    ratio_metrics,
    surrogate,
)
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.base import Copy, Metrics
from lit_vgrpo.objectives.pairs import PairObjective, PairPass, Sharing, normalised_distance, prediction
from lit_vgrpo.policies.base import Policy

KLTarget = Literal["reference", "behaviour"]


@checked
@dataclass(eq=False)
class VGRPO(PairObjective):
    """V-GRPO with its three variance reductions and three controls of the gradient step, each switchable.

    Args:
        num_mc_samples: Pairs (t, eps) per image (N_MC).
        share_pairs: One set of pairs for all images of a group (variance reduction 1), or of an iteration over all
            ranks. True and false stand for group and none.
        share_passes: One network pass for all images of a group. ``pure_noise`` shares the first pair's, at ``t = 1``,
            where all noisy latents are equal: exact, and on a rectified flow only. ``group`` shares all pairs' passes,
            at noisy latents made from one image of the group, which is biased below ``t = 1``, and on a
            variance-preserving path also there. Requires pairs shared in a group. Ours, not the paper's.
        stratify: One time from each of N_MC equal parts of the times (variance reduction 2). As in the authors' code,
            parts of the sampler's times differ in size by at most one, larger first.
        space: Space of the denoising error; x with ``self_normalise`` is the adaptive weighting.
        self_normalise: Divide each squared error by its own detached absolute error (variance reduction 3).
        scale_cap: Bound on ``b/a``, by which an eps-network's error grows in x-space; null for none.
        clip: Half-width of the ratio's trust region; null for none. Has an effect from the second update on.
        soft_clip: Bound eta of the advantages; null for none.
        kl_weight: Weight beta of the KL, a distance between predictions.
        kl_to: The other side of the KL: the behaviour policy as in the paper (null), or the reference (the starting
            weights), where the distance is divided by the surrogate's absolute error.

    The other options are those of :class:`~lit_vgrpo.objectives.pairs.PairObjective`.
    """

    needs_ode: ClassVar[bool] = False  # any sampler works: only the final latents are trained on
    pairs_option: ClassVar[str] = "num_mc_samples"
    default_rollout: ClassVar[RolloutSpec] = RolloutSpec()

    num_mc_samples: Annotated[int, Range(1, 1000)] = 4
    share_pairs: Sharing | bool = "group"
    share_passes: SharePasses = "none"
    stratify: bool = True
    space: Space = "x"
    self_normalise: bool = True
    scale_cap: Annotated[float, Range(above=0), OnlyWith("space", "x", "v")] | None = 5.0
    clip: Annotated[float, Range(above=0, below=1)] | None = None
    soft_clip: Annotated[float, Range(above=0)] | None = None
    kl_weight: NonNegativeFloat = 0.0
    kl_to: Annotated[KLTarget, OnlyWith("kl_weight")] | None = None

    def check(self, sizes: Sizes) -> list[str]:
        errors, unmoved = super().check(sizes), sizes.updates_per_iteration == 1
        if self.share_passes != "none" and (self.sharing != "group" or self.space == "eps"):
            errors.append(
                f"model.objective.share_passes={self.share_passes} needs share_pairs=group, and space x or v: in "
                "space eps, the error at t = 1 is always 0."
            )
        if unmoved and self.clip is not None:
            errors.append(
                f"model.objective.clip={self.clip} has no effect with updates_per_iteration=1: the policy has not "
                "moved. Set it to null."
            )
        if unmoved and self._kl_to("behaviour"):
            errors.append(
                f"model.objective.kl_weight={self.kl_weight} has no effect with updates_per_iteration=1: the policy "
                "is its own behaviour policy. Set data.updates_per_iteration=2 or more, or kl_to=reference."
            )
        return errors

    def _kl_to(self, target: KLTarget) -> bool:
        return self.kl_weight > 0 and (self.kl_to or "behaviour") == target

    @property
    def sharing(self) -> Sharing:
        return self.share_pairs if isinstance(self.share_pairs, str) else "group" if self.share_pairs else "none"

    def bounded(self, advantages: Tensor) -> Tensor:
        return soft_clip(advantages, self.soft_clip)

    def space_of(self, policy: Policy) -> tuple[Space, float | None]:
        return self.space, self.scale_cap

    def elbo(self, now: PairPass) -> Tensor:
        """Return the surrogate of ``-log pi(o | c)``, ``(M,)``."""
        return surrogate(denoising_error(now.error, self.self_normalise))

    def copies_needed(self) -> dict[str, Copy]:
        keeps = {"elbo": self.elbo}
        if self._kl_to("behaviour"):  # else they would waste as much memory as all pairs
            keeps["behaviour"] = prediction
        return {"old": Copy(keeps, decay=0.0)} | super().copies_needed()

    @property
    def needs_reference(self) -> bool:
        return self._kl_to("reference") or self.norm_weight > 0

    def losses(self, now: PairPass, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        elbo = self.elbo(now)
        log_ratio = kept["elbo"] - elbo
        metrics = {"surrogate": elbo.detach(), **ratio_metrics(log_ratio, self.clip)}
        return -clipped_surrogate(log_ratio, micro.advantages, self.clip), metrics

    def kl(self, now: PairPass, kept: Mapping[str, Tensor]) -> Tensor:
        if self._kl_to("reference"):
            return normalised_distance(now, kept["reference"])
        return surrogate(mean_over_pixels((now.scale * (now.prediction - kept["behaviour"])).square(), 2))
