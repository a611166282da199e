"""Base of DiffusionNFT and EPG: a slowly moving copy rolls out, and most of the sampler's times are trained at."""

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch

from lit_vgrpo.core.noise import STREAM_TIMES, image_generators
from lit_vgrpo.core.ranges import NonNegativeFloat, Range
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.forward import ForwardObjective
from lit_vgrpo.objectives.pairs import pairs_at
from lit_vgrpo.policies.base import Policy


def nft_decay(decay_type: Literal[0, 1, 2], num_updates: int) -> float:
    """``d`` of ``old <- d old + (1 - d) theta`` after an iteration.

    Args:
        decay_type: 0 always takes the policy over; 1 slows down from the start; 2 is on-policy for 75 steps and then
            slows down to nearly a standstill.
        num_updates: gradient steps done.

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
    """Base of the methods whose images come from a slowly moving copy; holds the options that all of them have.

    Args:
        decay_type: how fast the copy that rolls out follows, see :func:`nft_decay`. With 0 and one update per iteration
            the copy is the policy itself, and needs no passes.
        num_times: times per image, drawn from the sampler's own (or its ``noisiest``) without repetition; null takes
            all but one.
        kl_weight: weight of the squared distance to the start's predictions; 0 saves the reference's passes.
        scale_cap: bound on ``b / a``, by which an eps-network's error grows in x-space; null for none. Ours.
    """

    default_rollout: ClassVar[RolloutSpec] = RolloutSpec(steps=10)

    _: KW_ONLY
    decay_type: Literal[0, 1, 2] = 1
    num_times: Annotated[int, Range(1, 1000)] | None = None
    kl_weight: NonNegativeFloat = 1e-4
    scale_cap: Annotated[float, Range(above=0, example=5)] | None = 5.0

    def check(self, sizes: Sizes) -> list[str]:
        errors = super().check(sizes)
        steps = self.spec.steps
        if self.num_times is None and steps < 2:
            errors.append(
                f"model.objective.rollout.steps={steps} leaves no time to train at, since all but one are used. "
                "Use 2 or more steps, or num_times=1."
            )
        if self.num_times is None and self.time_range is not None:
            errors.append(
                f"model.objective.time_range={list(self.time_range)} leaves a number of times that only the loaded "
                "sampler tells. Say how many of them each image trains at: model.objective.num_times=1 or more."
            )
        if self.num_times is not None and self.num_times > steps:
            errors.append(
                f"model.objective.num_times={self.num_times} is more than the sampler's {steps} times. "
                f"Use {steps} or fewer."
            )
        return errors

    @property
    def fewest_times(self) -> int:
        return self.num_times or 2

    def times_an_image(self) -> int:
        """Return how many of the sampler's times each image trains at."""
        return self.num_times or (self.noisiest or self.spec.network_calls) - 1

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        times = self.times_an_image()
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
        times, num_times = self.sampler_times(rollout), self.times_an_image()
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
        """Keep in the experience's extras what the loss needs of the old policy, whose weights are in place."""

    def after_iteration(self, policy: Policy) -> None:
        super().after_iteration(policy)
        self.copies["old"].move_towards(policy, nft_decay(self.decay_type, self.num_updates))
