"""RAM (arXiv 2605.10759) and RVM (arXiv 2608.23664): regression of the velocity on a target that the reward moves."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import clamped
from lit_vgrpo.core.probability_paths import expand
from lit_vgrpo.core.ranges import NonNegativeFloat, OnlyWith, PositiveFloat, Range, checked
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.core.surrogate import TimeGrid, mean_over_pixels, surrogate
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.forward import DrawnTimesObjective
from lit_vgrpo.objectives.pairs import Sharing, distance_to, rollout_pairs, stored
from lit_vgrpo.policies.base import Policy


def velocity_matching(prediction: Tensor, step: Tensor) -> Tensor:
    """Return ``m((v - sg(v - g))^2) / 2``, whose gradient in ``v`` is ``g``; ``(B, N, ...) -> (B, N)``.

    RAM's paper has no factor 1/2.

    Args:
        prediction: ``v``; carries grad.
        step: ``g``, the step away from the target.
    """
    return mean_over_pixels((prediction - prediction.detach() + step.detach()).square(), 2) / 2


@checked
@dataclass(eq=False)
class RAM(DrawnTimesObjective):
    """RAM and, with other options, RVM: ``g = w A (v_old - u) + lambda (v - v_start)``, with ``u = eps - x``.

    In RAM the target ``v - g`` is ``v_start + w A (u - v_old)``, hence ``lambda = 1``, and a slow copy ``old`` samples
    the images. With ``old_decay_max: 0``, ``old`` is the policy itself, as in RVM: it samples and needs no passes. RVM
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
        old_decay_rate: ``old <- d old + (1 - d) theta`` after each of n gradient steps, ``d = min(max, rate n)``.
        old_decay_max: Upper bound of ``d``; 0 for no copy.

    The other options are those of :class:`~lit_vgrpo.objectives.forward.ForwardObjective` and
    :class:`~lit_vgrpo.objectives.forward.DrawnTimesObjective`.

    Source:
        RAM's abstract and README, and third-party readings of its equation 17 and code; the code was not available.
        RVM's abstract, and notes of a third-party reimplementation. All constants are these third parties', unverified.
    """

    path_kinds: ClassVar[tuple[str, ...]] = ("flow",)
    pairs_option: ClassVar[str] = "num_times"
    acting_copy: ClassVar[str] = "old"
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
    old_decay_rate: Annotated[NonNegativeFloat, OnlyWith("old_decay_max")] = 0.01
    old_decay_max: Annotated[float, Range(least=0, below=1)] = 0.9

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        predictions = self.predictions_per_image(self.num_times, sizes)
        passes: dict[str, float] = {"update": sizes.uses_per_image * predictions}
        if self.old_decay_max > 0:
            passes["old"] = predictions
        return passes | self.pull_passes(predictions)

    def setup(self, policy: Policy) -> None:
        super().setup(policy)
        if self.old_decay_max > 0:
            self.copies["old"] = Snapshot(policy)

    def prepare(self, context: PrepareContext) -> Experience:
        shares = self.share_passes != "none"
        pairs = rollout_pairs(
            context,
            self.num_times,
            shared=self.share_pairs,
            stratified=True,
            times=self.time_pool(context.rollout, below_one=shares),
            antithetic=self.antithetic,
            pure_noise=shares,
        )
        experience = context.experience(pairs, advantages=clamped(context.advantages, self.advantage_clip))
        if "old" in self.copies:
            self.store_copy(context, experience, "old")
        self.store_pulls(context, experience)
        return experience

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        prediction, error, _ = predicted = self.predict(policy, micro, "v")
        assert micro.pairs is not None
        times, _ = micro.pairs.of_images()
        with torch.no_grad():
            old, start = (stored(micro, f"{name}_prediction") for name in ("old", "reference"))
            old_error = error if old is None else error + (old - prediction)
            step = self.reward_weight * expand(micro.advantages, error) * old_error
            if start is not None:
                step += self.kl_weight * (prediction - start)
        density = (self.time_power + 1) * times**self.time_power
        loss = surrogate(density * velocity_matching(prediction, step)).mean()
        metrics = {
            "surrogate": surrogate(mean_over_pixels(error.detach().square(), 2)),
            "kl": distance_to(micro, "reference", prediction).detach(),
        }
        return self.with_pulls(loss, metrics, micro, predicted)

    def after_update(self, policy: Policy) -> None:
        super().after_update(policy)
        if "old" in self.copies:
            self.copies["old"].move_towards(policy, min(self.old_decay_max, self.old_decay_rate * self.num_updates))
