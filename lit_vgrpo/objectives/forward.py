"""Base of the methods that train on the forward process: on noisy copies of the final latents."""

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

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
from lit_vgrpo.core.surrogate import ContinuousTimes, SamplerTimes, TimeGrid, surrogate
from lit_vgrpo.core.types import Experience, Rollout, RolloutSpec
from lit_vgrpo.objectives.base import Objective, PrepareContext
from lit_vgrpo.objectives.pairs import (
    distance_to_copy,
    norm_excess,
    pairs_at,
    predict_pairs,
    predictions,
    store_predictions,
    stored,
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
        norm_weight: Weight of NormGuard (arXiv 2606.27771): the squared :func:`~lit_vgrpo.objectives.pairs.norm_excess`
            over the start's predictions; 0 saves the reference's passes, if the method has no other use for them.
        times: Train at the sampler's times or on a fixed grid, ``{grid: 10}``. A grid may have more times than the
            rollout has steps.
        time_range: Lowest and highest time to train at, in [0, 1], 1 = pure noise; null for all.
        noisiest: Train only at this number of the noisiest times; null for all. On the continuous schedule
            they are the same share of it.
        replay: Also train on the previous iteration's images, with their advantages and new pairs. Their old policy is
            the policy at the start of this iteration. Updates and micro-batches then have twice as many images.
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
    norm_weight: NonNegativeFloat = 0.0
    times: Literal["sampler"] | TimeGrid = "sampler"
    time_range: tuple[ClosedUnitInterval, ClosedUnitInterval] | None = None
    noisiest: Annotated[int, Range(1, 1000)] | None = None
    widen_over: Annotated[Count, OnlyWith("noisiest")] | None = None
    replay: bool = False
    training_guidance: GuidanceScale | None = None
    reference_guidance: GuidanceScale | None = None

    def __post_init__(self) -> None:
        if self.time_range is not None:
            low, high = self.time_range
            if low >= high:
                raise ValueError(f"model.objective.time_range={[low, high]} is empty. Use one such as [0.02, 0.98].")
        super().__post_init__()

    @property
    def needs_reference(self) -> bool:
        return super().needs_reference or self.norm_weight > 0

    @property
    def times_per_image(self) -> int:
        """Number of different times of the sampler that each image needs."""
        return 1

    def predictions_per_image(self, pairs: int, sizes: Sizes) -> float:
        """Return the predictions per image; one that a group shares counts as a fraction for each image."""
        shared = {"none": 0, "pure_noise": 1 + self.antithetic, "group": pairs}[self.share_passes]
        return shared * sizes.shared_passes + pairs - shared

    def check(self, sizes: Sizes) -> list[str]:
        errors, spec = super().check(sizes), self.spec
        if self.share_passes != "none":
            where = f"model.objective.share_passes={self.share_passes}"
            if self.time_range is not None and self.time_range[1] < 1:
                errors.append(f"{where} needs t = 1, but time_range={[*self.time_range]} excludes it.")
            if self.share_passes == "group" and sizes.splits_groups:
                errors.append(
                    f"{where} needs whole groups, but updates_per_iteration={sizes.updates_per_iteration} splits the "
                    f"{sizes.prompts_per_iteration} groups. Use a divisor, or data.split_updates=false."
                )
        most = min(self.noisiest or self.num_times_in_all, self.num_times_in_all)
        if not 0 < self.times_per_image <= most:
            errors.append(
                f"{type(self).__name__} trains each image at {self.times_per_image} of {most} times. Lower "
                "model.objective.num_times, or raise model.objective.noisiest and rollout.steps."
            )
        if self.needs_ode and spec.is_sde:
            errors.append(
                f"model.objective.rollout.solver={spec.solver} is an SDE, but {type(self).__name__} trains only on "
                f"final images and samples with an ODE. Use {spec.as_ode().solver}."
            )
        return errors

    @property
    def num_times_in_all(self) -> int:
        """Number of the sampler's times, or of the grid's."""
        return self.times.grid if isinstance(self.times, TimeGrid) else self.spec.steps

    def policy_errors(self, policy: type[Policy]) -> list[str]:
        if self.share_passes != "none" and policy.path_kind != "flow":
            return [
                f"model.objective.share_passes={self.share_passes} needs a path that ends in pure noise, but that of "
                f"{policy.__name__} keeps some of the image. Set it to none."
            ]
        return super().policy_errors(policy)

    def sampler_times(self, rollout: Rollout, below_one: bool = False) -> SamplerTimes:
        """Return the times of the sampler or the grid that the rollout's iteration is trained at.

        Args:
            below_one: Leave out ``t = 1``.
        """
        schedule = self.times.times() if isinstance(self.times, TimeGrid) else rollout.schedule.cpu()
        pool = SamplerTimes(schedule).within(self.time_range)
        pool = pool.below_one() if below_one else pool
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

    @torch.no_grad()
    def store_copy(self, context: PrepareContext, experience: Experience, copy: str) -> None:
        """Store the predictions of ``copies[copy]`` on all pairs as ``{copy}_prediction``."""
        policy, micros = context.policy, experience.micro_batches(context.micro_batch_size)
        use: Literal["training", "reference"] = "reference" if copy == "reference" else "training"
        with self.with_copy(policy, copy, context.ledger):
            predicted = (predictions(policy, micro, self.guidance_in(use, policy)) for micro in micros)
            store_predictions(experience, f"{copy}_prediction", micros, predicted)

    def store_pulls(self, context: PrepareContext, experience: Experience) -> None:
        """Keep the predictions of the start and of the anchor on all pairs, if the loss needs them."""
        for name in ("reference", "anchor"):
            if name in self.copies:
                self.store_copy(context, experience, name)

    def with_pulls(
        self,
        loss: Tensor,
        metrics: dict[str, Tensor],
        micro: Experience,
        predicted: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a loss and its metrics with the pull to the anchor and NormGuard, or unchanged without them.

        Args:
            predicted: Return value of :meth:`predict`.
        """
        prediction, error, scale = predicted
        if (of_anchor := stored(micro, "anchor_prediction")) is not None:
            distance = surrogate(distance_to_copy(prediction, of_anchor, error, scale))
            loss = loss + self.anchor_weight * distance.mean()
            metrics = metrics | {"anchor_distance": distance.detach()}
        if self.norm_weight > 0 and (of_start := stored(micro, "reference_prediction")) is not None:
            excess = norm_excess(prediction, of_start)
            loss = loss + self.norm_weight * surrogate(excess.square()).mean()
            metrics = metrics | {"norm_excess": surrogate(excess.detach())}
        return loss, metrics


@dataclass(eq=False)
class DrawnTimesObjective(ForwardObjective):
    """Base of the methods that draw their times from the sampler's, a grid, or the continuous schedule.

    Args:
        times: Draw from the sampler's times, from a fixed grid, ``{grid: 10}``, or from the continuous schedule.
        time_shift: Resolution shift of the continuous schedule.
        antithetic: Draw half as many pairs, and use each with its noise and with the negative noise.
    """

    _: KW_ONLY
    times: Literal["sampler", "uniform"] | TimeGrid = "sampler"  # type: ignore[assignment]
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

    def time_pool(self, rollout: Rollout, below_one: bool = False) -> SamplerTimes | ContinuousTimes:
        """Return the times that the rollout's iteration is trained at."""
        if self.times == "uniform":
            return self.continuous_times(rollout, self.time_shift)  # contains 1 with probability 0
        return self.sampler_times(rollout, below_one)


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
    acting_copy: ClassVar[str] = "old"

    _: KW_ONLY
    decay_type: Literal[0, 1, 2] = 1
    num_times: Annotated[int, Range(1, 1000)] | None = None
    kl_weight: NonNegativeFloat = 1e-4
    scale_cap: Annotated[float, Range(above=0)] | None = 5.0

    @property
    def times_per_image(self) -> int:
        in_all = self.num_times_in_all if isinstance(self.times, TimeGrid) else self.spec.network_calls
        return self.num_times or (self.noisiest or in_all) - 1

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        times = self.times_per_image
        passes: dict[str, float] = {"update": sizes.uses_per_image * times}
        if not self.is_on_policy(sizes.updates_per_iteration):
            passes["old"] = times
        return passes | self.pull_passes(times)

    def is_on_policy(self, updates: int) -> bool:
        """Return whether the old policy is the trained one in the only update of an iteration."""
        return self.decay_type == 0 and updates == 1

    def setup(self, policy: Policy) -> None:
        super().setup(policy)
        self.copies["old"] = Snapshot(policy)

    def prepare(self, context: PrepareContext) -> Experience:
        rollout = context.rollout
        times, num_times = self.sampler_times(rollout), self.times_per_image
        generators = image_generators(STREAM_TIMES, rollout.seed, rollout.iteration, rollout.image_ids.tolist())
        picked = torch.stack([times.pick(num_times, generator) for generator in generators])
        experience = context.experience(pairs_at(context, picked, shared=False))
        if not self.is_on_policy(context.updates):
            with self.with_copy(context.policy, "old", context.ledger):
                self.store_old(context, experience)
        self.store_pulls(context, experience)
        return experience

    @abstractmethod
    def store_old(self, context: PrepareContext, experience: Experience) -> None:
        """Store in the experience's extras what the loss needs of the old policy, whose weights are in place."""

    def after_iteration(self, policy: Policy) -> None:
        super().after_iteration(policy)
        self.copies["old"].move_towards(policy, nft_decay(self.decay_type, self.num_updates))
