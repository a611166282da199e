"""V-GRPO (arXiv 2604.23380): GRPO whose likelihood is the ELBO surrogate."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import soft_clip
from lit_vgrpo.core.probability_paths import Space
from lit_vgrpo.core.ranges import NonNegativeFloat, Range, checked
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.core.surrogate import clipped_surrogate, denoising_error, mean_over_pixels, ratio_metrics, surrogate
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.forward import DrawnTimesObjective
from lit_vgrpo.objectives.pairs import Sharing, distance_to_copy, old_values, rollout_pairs
from lit_vgrpo.policies.base import Policy

KLTarget = Literal["reference", "behaviour"]


@checked
@dataclass(eq=False)
class VGRPO(DrawnTimesObjective):
    """V-GRPO with its three variance reductions and three controls of the gradient step, each switchable.

    Args:
        num_mc_samples: Pairs (t, eps) per image (N_MC).
        share_pairs: One set of pairs for all images of a group (variance reduction 1), or of an iteration over all
            ranks. True and false stand for group and none.
        stratify: One time from each of N_MC equal parts of the times (variance reduction 2). As in the authors' code,
            parts of the sampler's times differ in size by at most one, larger first.
        space: Space of the denoising error; x with ``self_normalise`` is the adaptive weighting.
        self_normalise: Divide each squared error by its own detached absolute error (variance reduction 3).
        scale_cap: Bound on ``b/a``, by which an eps-network's error grows in x-space; null for none.
        clip: Half-width of the ratio's trust region; null for none. Has an effect from the second update on.
        soft_clip: Bound eta of the advantages; null for none.
        kl_weight: Weight beta of the KL, a distance between predictions.
        kl_to: The other side of the KL: the behaviour policy as in the paper (null), or the reference (the starting
            weights), to which the distance is divided by the surrogate's own absolute error.

    The other options are those of :class:`~lit_vgrpo.objectives.forward.ForwardObjective` and
    :class:`~lit_vgrpo.objectives.forward.DrawnTimesObjective`; the non-default choices of ``times`` are ours.
    """

    pairs_option: ClassVar[str] = "num_mc_samples"
    needs_ode: ClassVar[bool] = False  # any sampler works: only the final latents are trained on
    default_rollout: ClassVar[RolloutSpec] = RolloutSpec()

    num_mc_samples: Annotated[int, Range(1, 1000)] = 4
    share_pairs: Sharing | bool = "group"
    stratify: bool = True
    space: Space = "x"
    self_normalise: bool = True
    scale_cap: Annotated[float, Range(above=0)] | None = 5.0
    clip: Annotated[float, Range(above=0, below=1)] | None = None
    soft_clip: Annotated[float, Range(above=0)] | None = None
    kl_weight: NonNegativeFloat = 0.0
    kl_to: KLTarget | None = None

    def __post_init__(self) -> None:
        if isinstance(self.share_pairs, bool):
            self.share_pairs = "group" if self.share_pairs else "none"
        super().__post_init__()

    def check(self, sizes: Sizes) -> list[str]:
        errors = super().check(sizes)
        if self._has_kl_to("behaviour") and sizes.updates_per_iteration == 1:
            errors.append(
                f"model.objective.kl_weight={self.kl_weight} has no effect with updates_per_iteration=1: the policy "
                "is its own behaviour policy. Set data.updates_per_iteration=2 or more, or kl_to=reference."
            )
        return errors

    def _has_kl_to(self, target: KLTarget) -> bool:
        return self.kl_weight > 0 and (self.kl_to or "behaviour") == target

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        passes: dict[str, float] = {"update": sizes.uses_per_image * self.num_mc_samples}
        if sizes.updates_per_iteration > 1:
            passes["old"] = self.num_mc_samples * sizes.later_share
        if self._has_kl_to("reference"):
            passes["reference"] = self.num_mc_samples
        return passes | self.anchor_passes(self.num_mc_samples)

    def setup(self, policy: Policy) -> None:
        super().setup(policy)
        if self._has_kl_to("reference"):
            self.copies["reference"] = Snapshot(policy)

    def prepare(self, context: PrepareContext) -> Experience:
        pairs = rollout_pairs(
            context,
            self.num_mc_samples,
            shared=self.share_pairs,
            stratified=self.stratify,
            times=self.time_pool(context.rollout),
            antithetic=self.antithetic,
        )
        experience = context.experience(pairs, advantages=soft_clip(context.advantages, self.soft_clip))
        # With one update the policy is the behaviour policy: the ratio is 1 and needs no passes.
        if context.updates > 1:
            with context.ledger.phase("old"):
                experience.extras |= self._stored(context, experience)
        if self._has_kl_to("reference"):
            experience.extras["kl_prediction"] = self.copy_predictions(context, experience, "reference")
        self.store_anchor(context, experience)
        return experience

    @torch.no_grad()
    def _stored(self, context: PrepareContext, experience: Experience) -> dict[str, Tensor]:
        """Return the surrogates of the current weights, and their predictions if the KL needs them."""
        stored: dict[str, list[Tensor]] = defaultdict(list)
        for micro in context.later_of(experience).micro_batches(context.micro_batch_size):
            prediction, error, _ = self.predict(context.policy, micro, self.space, self.scale_cap)
            stored["old_surrogate"].append(self._surrogate(error))
            if self._has_kl_to("behaviour"):  # else they would waste as much memory as all pairs
                stored["kl_prediction"].append(prediction)
        return {name: context.placed(torch.cat(parts)) for name, parts in stored.items()}

    def _surrogate(self, error: Tensor) -> Tensor:
        return surrogate(denoising_error(error, self.self_normalise))

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        prediction, error, scale = predicted = self.predict(policy, micro, self.space, self.scale_cap)
        elbo = self._surrogate(error)
        log_ratio = old_values(micro, "old_surrogate", elbo) - elbo
        objective = clipped_surrogate(log_ratio, micro.advantages, self.clip)
        distance = torch.zeros_like(elbo)
        if "kl_prediction" in micro.extras:
            stored = old_values(micro, "kl_prediction", prediction)
            if self._has_kl_to("behaviour"):
                per_pair = mean_over_pixels((scale * (prediction - stored)).square(), 2)
            else:
                per_pair = distance_to_copy(prediction, stored, error, scale)
            distance = surrogate(per_pair)
        loss = (self.kl_weight * distance - objective).mean()
        metrics = {"surrogate": elbo.detach(), "kl": distance.detach(), **ratio_metrics(log_ratio, self.clip)}
        return self.with_anchor(loss, metrics, micro, predicted)
