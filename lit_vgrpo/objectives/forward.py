"""Base of the methods that train on the forward process: on noisy copies of the final latents."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from lit_vgrpo.core.probability_paths import Space
from lit_vgrpo.core.ranges import (
    ClosedUnitInterval,
    Count,
    GuidanceScale,
    HalfOpenUnitInterval,
    NonNegativeFloat,
    PositiveFloat,
    Range,
)
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.times import ContinuousTimes, SamplerTimes
from lit_vgrpo.core.types import Experience, Rollout, RolloutSpec
from lit_vgrpo.objectives.base import Objective, PrepareContext, require
from lit_vgrpo.objectives.pairs import TimeSource, distance_to_copy, mean_over_pairs, predict_pairs, stored_predictions
from lit_vgrpo.policies.base import Policy


@dataclass(eq=False)
class ForwardObjective(Objective):
    """Base of the methods that train on pairs (t, eps); holds the options that all of them have.

    Args:
        rollout: how images are sampled; any ODE solver. Null takes the method's published one.
        anchor_weight: weight of the pull to the anchor, :func:`~lit_vgrpo.objectives.pairs.distance_to_copy`; 0 saves
            its passes.
        anchor_decay: ``anchor <- d anchor + (1 - d) weights`` after each iteration; null for no anchor.
        time_range: the least and the largest time that is trained at, in [0, 1] with 1 as pure noise; null for all.
        noisiest: train only at the noisiest times, as many as this of the sampler's own; null for all. On the
            continuous schedule they are the same share of it.
        widen_over: iterations over which the noisiest times widen linearly to all of them; null stays at them.
        training_guidance: guidance scale of the policy during training; null is 1, or the rollout's scale where the
            network embeds it, as FLUX.1-dev's does.
        reference_guidance: guidance scale of the starting weights; null takes the training's.

    """

    needs_ode: ClassVar[bool] = True
    """True if an SDE is refused, since the method is defined on samples of the ODE."""

    rollout: RolloutSpec | None = None
    _: KW_ONLY
    anchor_weight: NonNegativeFloat = 0.0
    anchor_decay: HalfOpenUnitInterval | None = None
    time_range: tuple[ClosedUnitInterval, ClosedUnitInterval] | None = None
    noisiest: Annotated[int, Range(1, 1000, example=7)] | None = None
    widen_over: Count | None = None
    training_guidance: GuidanceScale | None = None
    reference_guidance: GuidanceScale | None = None

    def __post_init__(self) -> None:
        if self.time_range is not None:
            low, high = self.time_range
            require(low < high, "time_range", [low, high], "Use a smaller time and a larger one, such as [0.02, 0.98]")
        least = self.fewest_times
        require(self.noisiest is None or self.noisiest >= least, "noisiest", self.noisiest, f"Use {least} or more")
        super().__post_init__()

    @property
    def fewest_times(self) -> int:
        """Least number of times to draw from."""
        return 1

    def check(self, sizes: Sizes) -> list[str]:
        errors, spec = super().check(sizes), self.spec
        if self.noisiest is not None and self.noisiest > spec.steps:
            errors.append(
                f"model.objective.noisiest={self.noisiest} is more than the sampler's {spec.steps} times. "
                f"{self._fitting_noisiest()}"
            )
        if self.widen_over is not None and self.noisiest is None:
            errors.append(
                f"model.objective.widen_over={self.widen_over} has nothing to widen: noisiest=null takes all times "
                f"from the start. Set model.objective.noisiest={self.fewest_times} or more."
            )
        if self.needs_ode and spec.is_sde:
            errors.append(
                f"model.objective.rollout.solver={spec.solver} is an SDE, but {type(self).__name__} trains on final "
                f"images alone and samples with an ODE. Use {spec.as_ode().solver}."
            )
        return errors

    def _fitting_noisiest(self) -> str:
        least, most = self.fewest_times, self.spec.steps
        if least > most:
            return f"Use model.objective.rollout.steps={self.noisiest}, or fewer num_times than {least}."
        return f"Use {most}." if least == most else f"Use {least} to {most}."

    def sampler_times(self, rollout: Rollout) -> SamplerTimes:
        """Return the sampler's own times that the rollout's iteration is trained at."""
        schedule = rollout.schedule.cpu()
        pool = SamplerTimes(schedule, len(schedule)).within(self.time_range)
        return pool if self.noisiest is None else pool.noisiest(self.noisiest, self._progress(rollout))

    def continuous_times(self, rollout: Rollout, shift: float) -> ContinuousTimes:
        """Return the part of the continuous schedule that the rollout's iteration is trained at."""
        pool = ContinuousTimes(shift).within(self.time_range)
        if self.noisiest is None:
            return pool
        return pool.noisiest(self.noisiest / len(rollout.schedule), self._progress(rollout))

    def _progress(self, rollout: Rollout) -> float:
        """Share of the widening done, from 0 to 1: a pure function of the iteration, so that resume is exact."""
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
        """Keep the anchor's predictions on all pairs, where there is an anchor."""
        if self.anchor is not None:
            experience.extras["anchor_prediction"] = self.copy_predictions(context, experience, "anchor")

    def with_anchor(
        self,
        loss: Tensor,
        metrics: dict[str, Tensor],
        micro: Experience,
        predicted: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a loss and its metrics with the pull to the anchor, or as they are where there is none.

        Args:
            predicted: what :meth:`predict` returned.
        """
        if "anchor_prediction" not in micro.extras:
            return loss, metrics
        prediction, error, scale = predicted
        per_pair = distance_to_copy(prediction, micro.extras["anchor_prediction"], error, scale)
        distance = mean_over_pairs(per_pair, micro.extras.get("pair_weight"))
        return loss + self.anchor_weight * distance.mean(), metrics | {"anchor_distance": distance.detach()}


@dataclass(eq=False)
class DrawnTimesObjective(ForwardObjective):
    """Base of the methods that draw their times from the sampler's or from the continuous schedule.

    Args:
        times: draw from the sampler's own times, or from the continuous schedule.
        time_shift: resolution shift of the continuous schedule.
        importance_weights: weight each pair by how often the whole schedule has its time over how often it is drawn.
            The mean over the pairs, in the surrogate and in the pulls to other weights, is then unbiased for the whole
            schedule where all times can be drawn, with every sampler's time, or every t, counting alike. With
            ``time_range`` or ``noisiest`` it is so for their part of the schedule; the rest stays left out. A ratio is
            not linear in that mean, so what is unbiased is the gradient of an iteration's first update.
        antithetic: draw half as many pairs and use each with its noise and the negative of it, at one time.
    """

    _: KW_ONLY
    times: TimeSource = "sampler"
    time_shift: PositiveFloat = 1.0
    importance_weights: bool = False
    antithetic: bool = False

    pairs_option: ClassVar[str]
    """Name of the option that says how many pairs an image has."""

    def __post_init__(self) -> None:
        advice = "antithetic=true takes every noise as it is and negated: use an even number"
        require(not self.antithetic or self.num_pairs % 2 == 0, self.pairs_option, self.num_pairs, advice)
        super().__post_init__()

    @property
    def num_pairs(self) -> int:
        """Pairs per image."""
        return int(getattr(self, self.pairs_option))

    @property
    def num_drawn(self) -> int:
        """Times that are drawn for them: half as many, where each is used twice."""
        return self.num_pairs // 2 if self.antithetic else self.num_pairs

    @property
    def strata(self) -> int | None:
        """Number of parts that one time each is drawn from; ``None`` draws without parts."""
        return self.num_drawn

    def check(self, sizes: Sizes) -> list[str]:
        errors = super().check(sizes)
        if self.importance_weights and self._draws_alike():
            errors.append(
                "model.objective.importance_weights=true has no effect: all times are drawn equally often. "
                "Set importance_weights=false."
            )
        return errors

    def _draws_alike(self) -> bool:
        if self.time_range is not None or self.noisiest is not None:
            return False
        if self.times == "uniform":
            return self.time_shift == 1
        return self.strata is None or self.strata > self.spec.steps or self.spec.steps % self.strata == 0

    def time_pool(self, rollout: Rollout) -> SamplerTimes | ContinuousTimes:
        """Return the times that the rollout's iteration is trained at."""
        if self.times == "uniform":
            return self.continuous_times(rollout, self.time_shift)
        return self.sampler_times(rollout)

    def weight_pairs(self, experience: Experience, weights: Tensor) -> None:
        """Keep the importance weights ``(B, N)`` of the images' pairs, where they are asked for."""
        if self.importance_weights:
            experience.extras["pair_weight"] = weights
