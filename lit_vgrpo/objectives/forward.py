"""Base of the methods that train on the forward process: on noisy copies of the final latents."""

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.noise import STREAM_TIMES, image_generators
from lit_vgrpo.core.probability_paths import Space
from lit_vgrpo.core.ranges import (
    ClosedUnitInterval,
    Count,
    GuidanceScale,
    HalfOpenUnitInterval,
    NonNegativeFloat,
    OnlyWith,
    PositiveFloat,
    Range,
)
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.core.surrogate import ContinuousTimes, SamplerTimes, surrogate
from lit_vgrpo.core.types import Experience, Rollout, RolloutSpec
from lit_vgrpo.objectives.base import Objective, PrepareContext
from lit_vgrpo.objectives.pairs import (
    TimeSource,
    distance_to_copy,
    pairs_at,
    predict_pairs,
    stored_predictions,
)
from lit_vgrpo.policies.base import Policy


@dataclass(eq=False)
class ForwardObjective(Objective):
    """Base of the methods that train on pairs (t, eps); holds their common options.

    Args:
        rollout: Sampling of images; any ODE solver. Null takes the method's default.
        anchor_weight: Weight of the pull to the anchor, :func:`~lit_vgrpo.objectives.pairs.distance_to_copy`; 0 saves
            its passes.
        anchor_decay: ``anchor <- d anchor + (1 - d) weights`` after each iteration; null for no anchor.
        time_range: Lowest and highest time to train at, in [0, 1], 1 = pure noise; null for all.
        noisiest: Train only at this number of the sampler's noisiest times; null for all. On the continuous schedule
            they are the same share of it.
        widen_over: Iterations over which the noisiest times widen linearly to all of them; null keeps them fixed.
        training_guidance: Guidance scale of the policy during training; null is 1, or the rollout's scale if the
            network embeds it, as in FLUX.1-dev.
        reference_guidance: Guidance scale of the starting weights; null takes the training's.
    """

    needs_ode: ClassVar[bool] = True
    """True if SDEs are refused because the method is defined on samples of the ODE."""

    rollout: RolloutSpec | None = None
    _: KW_ONLY
    anchor_weight: NonNegativeFloat = 0.0
    anchor_decay: HalfOpenUnitInterval | None = None
    time_range: tuple[ClosedUnitInterval, ClosedUnitInterval] | None = None
    noisiest: Annotated[int, Range(1, 1000)] | None = None
    widen_over: Annotated[Count, OnlyWith("noisiest")] | None = None
    training_guidance: GuidanceScale | None = None
    reference_guidance: GuidanceScale | None = None

    def __post_init__(self) -> None:
        if self.time_range is not None:
            low, high = self.time_range
            if low >= high:
                raise ValueError(f"model.objective.time_range={[low, high]} is empty. Use one such as [0.02, 0.98].")
        super().__post_init__()

    @property
    def times_per_image(self) -> int:
        """Number of different times of the sampler that each image needs."""
        return 1

    def check(self, sizes: Sizes) -> list[str]:
        errors, spec = super().check(sizes), self.spec
        most = min(self.noisiest or spec.steps, spec.steps)
        if not 0 < self.times_per_image <= most:
            errors.append(
                f"{type(self).__name__} trains each image at {self.times_per_image} of the sampler's {most} times. Set "
                "model.objective.num_times to less, or model.objective.noisiest to more with as many rollout.steps."
            )
        if self.needs_ode and spec.is_sde:
            errors.append(
                f"model.objective.rollout.solver={spec.solver} is an SDE, but {type(self).__name__} trains only on "
                f"final images and samples with an ODE. Use {spec.as_ode().solver}."
            )
        return errors

    def sampler_times(self, rollout: Rollout) -> SamplerTimes:
        """Return the sampler's times that the rollout's iteration is trained at."""
        schedule = rollout.schedule.cpu()
        pool = SamplerTimes(schedule).within(self.time_range)
        return pool if self.noisiest is None else pool.noisiest(self.noisiest, self._progress(rollout))

    def continuous_times(self, rollout: Rollout, shift: float) -> ContinuousTimes:
        """Return the part of the continuous schedule that the rollout's iteration is trained at."""
        pool = ContinuousTimes(shift).within(self.time_range)
        if self.noisiest is None:
            return pool
        return pool.noisiest(self.noisiest / len(rollout.schedule), self._progress(rollout))

    def _progress(self, rollout: Rollout) -> float:
        """Return the share of the widening done, 0 to 1: a pure function of the iteration, so that resume is exact."""
        return 0.0 if self.widen_over is None else min(rollout.iteration, self.widen_over) / self.widen_over

    def predict(
        self,
        policy: Policy,
        micro: Experience,
        space: Space,
        cap: float | None = None,
        use: Literal["training", "reference"] = "training",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return :func:`~lit_vgrpo.objectives.pairs.predict_pairs` at the guidance of a use."""
        return predict_pairs(policy, micro, space, cap, self.guidance_in(use, policy))

    def copy_predictions(self, context: PrepareContext, experience: Experience, name: str) -> Tensor:
        """Return the predictions ``(B, N, ...)`` of ``copies[name]`` on all pairs."""
        use: Literal["training", "reference"] = "reference" if name == "reference" else "training"
        with self.with_copy(context.policy, name, context.ledger):
            return stored_predictions(context, experience, self.guidance_in(use, context.policy))

    def store_anchor(self, context: PrepareContext, experience: Experience) -> None:
        """Keep the anchor's predictions on all pairs, if there is an anchor."""
        if self.anchor is not None:
            experience.extras["anchor_prediction"] = self.copy_predictions(context, experience, "anchor")

    def with_anchor(
        self,
        loss: Tensor,
        metrics: dict[str, Tensor],
        micro: Experience,
        predicted: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a loss and its metrics with the pull to the anchor, or unchanged without one.

        Args:
            predicted: Return value of :meth:`predict`.
        """
        if "anchor_prediction" not in micro.extras:
            return loss, metrics
        prediction, error, scale = predicted
        per_pair = distance_to_copy(prediction, micro.extras["anchor_prediction"], error, scale)
        distance = surrogate(per_pair)
        return loss + self.anchor_weight * distance.mean(), metrics | {"anchor_distance": distance.detach()}


@dataclass(eq=False)
class DrawnTimesObjective(ForwardObjective):
    """Base of the methods that draw their times from the sampler's or from the continuous schedule.

    Args:
        times: Draw from the sampler's times, or from the continuous schedule.
        time_shift: Resolution shift of the continuous schedule.
        antithetic: Draw half as many pairs, and use each with its noise and with the negative noise.
    """

    _: KW_ONLY
    times: TimeSource = "sampler"
    time_shift: Annotated[PositiveFloat, OnlyWith("times", "uniform")] = 1.0
    antithetic: bool = False

    pairs_option: ClassVar[str]
    """Name of the option for the number of pairs per image."""

    def __post_init__(self) -> None:
        if self.antithetic and self.num_pairs % 2:
            option = f"model.objective.{self.pairs_option}={self.num_pairs}"
            raise ValueError(f"{option} is odd, but antithetic=true uses each noise sample twice. Use an even number.")
        super().__post_init__()

    @property
    def num_pairs(self) -> int:
        """Pairs per image."""
        return int(getattr(self, self.pairs_option))

    @property
    def num_drawn(self) -> int:
        """Times to draw for them: half as many if each is used twice."""
        return self.num_pairs // 2 if self.antithetic else self.num_pairs

    def time_pool(self, rollout: Rollout) -> SamplerTimes | ContinuousTimes:
        """Return the times that the rollout's iteration is trained at."""
        if self.times == "uniform":
            return self.continuous_times(rollout, self.time_shift)
        return self.sampler_times(rollout)


def nft_decay(decay_type: Literal[0, 1, 2], num_updates: int) -> float:
    """Return ``d`` of ``old <- d old + (1 - d) theta`` after each iteration.

    Args:
        decay_type: 0 always copies the policy; 1 slows down from the start; 2 is on-policy for 75 steps and then
            almost stops.
        num_updates: Gradient steps done.

    >>> [nft_decay(1, n) for n in (0, 100, 900)]
    [0.0, 0.1, 0.5]
    """
    if decay_type == 0:
        return 0.0
    if decay_type == 1:
        return min(0.001 * num_updates, 0.5)
    return 0.0 if num_updates < 75 else min(0.0075 * (num_updates - 75), 0.999)


@dataclass(eq=False)
class LaggedObjective(ForwardObjective):
    """Base of the methods whose images come from a slowly moving copy; holds their common options.

    Args:
        decay_type: Schedule of the decay of the copy that rolls out, see :func:`nft_decay`. With 0 and one update per
            iteration the copy is the policy itself, and needs no passes.
        num_times: Times per image, drawn from the sampler's (or its ``noisiest``) without repetition; null takes
            all but one.
        kl_weight: Weight of the squared distance to the start's predictions; 0 saves the reference's passes.
        scale_cap: Bound on ``b / a``, by which an eps-network's error grows in x-space; null for none. Our addition.
    """

    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("dpm++", steps=10)

    _: KW_ONLY
    decay_type: Literal[0, 1, 2] = 1
    num_times: Annotated[int, Range(1, 1000)] | None = None
    kl_weight: NonNegativeFloat = 1e-4
    scale_cap: Annotated[float, Range(above=0)] | None = 5.0

    @property
    def times_per_image(self) -> int:
        return self.num_times or (self.noisiest or self.spec.network_calls) - 1

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        times = self.times_per_image
        passes: dict[str, float] = {"update": sizes.uses_per_image * times}
        if not self.is_on_policy(sizes.updates_per_iteration):
            passes["old"] = times
        if self.kl_weight > 0:
            passes["reference"] = times
        return passes | self.anchor_passes(times)

    def is_on_policy(self, updates: int) -> bool:
        """Return whether the old policy is the trained one in the only update of an iteration."""
        return self.decay_type == 0 and updates == 1

    def setup(self, policy: Policy) -> None:
        super().setup(policy)
        self.copies["old"] = Snapshot(policy)
        if self.kl_weight > 0:
            self.copies["reference"] = Snapshot(policy)

    def acting(self, policy: Policy) -> AbstractContextManager[Any]:
        return self.copies["old"].swapped_into(policy)

    def prepare(self, context: PrepareContext) -> Experience:
        rollout = context.rollout
        times, num_times = self.sampler_times(rollout), self.times_per_image
        generators = image_generators(STREAM_TIMES, rollout.seed, rollout.iteration, rollout.image_ids.tolist())
        picked = torch.stack([times.pick(num_times, generator) for generator in generators])
        experience = context.experience(pairs_at(context, picked, shared=False))
        if not self.is_on_policy(context.updates):
            with self.with_copy(context.policy, "old", context.ledger):
                self.store_old(context, experience)
        if "reference" in self.copies:
            experience.extras["reference_prediction"] = self.copy_predictions(context, experience, "reference")
        self.store_anchor(context, experience)
        return experience

    @abstractmethod
    def store_old(self, context: PrepareContext, experience: Experience) -> None:
        """Store in the experience's extras what the loss needs of the old policy, whose weights are in place."""

    def after_iteration(self, policy: Policy) -> None:
        super().after_iteration(policy)
        self.copies["old"].move_towards(policy, nft_decay(self.decay_type, self.num_updates))
