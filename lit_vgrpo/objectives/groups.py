"""Base of the methods that compare the images of a group, which may be spread over micro-batches and ranks."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import clamped
from lit_vgrpo.core.noise import STREAM_TIMES, seeded_generator
from lit_vgrpo.core.ranges import NonNegativeFloat, OnlyWith, PositiveFloat, Range
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.forward import ForwardObjective
from lit_vgrpo.objectives.pairs import pairs_at
from lit_vgrpo.policies.base import Policy


def joined(micros: Sequence[Experience], name: str) -> Tensor:
    """Return one of the extras of all images, ``(B, ...)``."""
    return torch.cat([micro.extras[name] for micro in micros])


def groups_of(micros: Sequence[Experience]) -> tuple[Tensor, Tensor]:
    """Return the images' group ids and group sizes, each ``(B,)``, int64."""
    return joined(micros, "group_ids"), joined(micros, "group_size")


def are_whole(ids: Tensor, sizes: Tensor) -> Tensor:
    """Return True if every group is complete, ``()``, bool; does not wait for a GPU."""
    return ((ids[:, None] == ids).sum(dim=1) == sizes).all()


@dataclass(eq=False)
class GroupObjective(ForwardObjective):
    """Base of the methods whose loss needs values of a group's other images; holds their common options.

    The images of an iteration have the same times, and those of a group the same noise. A group must be whole in every
    update. If micro-batches do not hold whole groups, the update's images pass through the network once more without
    gradient, to compute the values of each group. A ``micro_batch_size`` that is a multiple of ``group_size`` saves
    this pass.

    Args:
        num_times: Times per iteration, the same for all images and ranks.
        share_passes: ``pure_noise`` sets one of the times to ``t = 1``, where the images of a group share one pass; see
            :class:`~lit_vgrpo.objectives.vgrpo.VGRPO`. Ours, not the papers'.
        kl_weight: Weight of the squared distance to the start's predictions; 0 saves the reference's passes.
        old_decay_rate: ``old <- d old + (1 - d) theta`` after each of n gradient steps, ``d = min(max, rate n)``; CRD
            adds 0.25 to ``rate n``.
        old_decay_max: Upper bound of ``d``.
        advantage_clip: Bound on the advantages. Clipped advantages no longer sum to 0 in a group.
    """

    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("dpm++", steps=10)
    old_decay_start: ClassVar[float] = 0.0

    num_times: Annotated[int, Range(1, 1000)] = 4
    _: KW_ONLY
    share_passes: Literal["none", "pure_noise"] = "none"
    kl_weight: NonNegativeFloat = 0.0
    old_decay_rate: Annotated[NonNegativeFloat, OnlyWith("old_decay_max")] = 0.001
    old_decay_max: Annotated[float, Range(least=0, below=1)] = 0.3
    advantage_clip: PositiveFloat | None = 5.0

    def check(self, sizes: Sizes) -> list[str]:
        errors = super().check(sizes)
        prompts, updates = sizes.prompts_per_iteration, sizes.updates_per_iteration
        if sizes.splits_groups:
            errors.append(
                f"{type(self).__name__} compares whole groups, but updates_per_iteration={updates} splits the "
                f"{prompts} groups of {sizes.group_size}. Use a divisor of {prompts}, or data.split_updates=false."
            )
        return errors

    @property
    def compared_losses(self) -> str:
        """Name of the extra with the losses that those of a group are compared with."""
        return "old_losses"

    @property
    def times_per_image(self) -> int:
        return self.num_times

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        predictions = self.predictions_per_image(self.num_times, sizes)
        trained = sizes.uses_per_image * predictions
        passes: dict[str, float] = {"update": trained, "old": trained}
        if not sizes.holds_whole_groups:
            passes["group"] = trained
        return passes | self.pull_passes(predictions)

    def setup(self, policy: Policy) -> None:
        super().setup(policy)
        self.copies["old"] = Snapshot(policy)

    def prepare(self, context: PrepareContext) -> Experience:
        rollout, device = context.rollout, context.rollout.latents.device
        generator = seeded_generator(rollout.seed, STREAM_TIMES, rollout.iteration)
        shares = self.share_passes != "none"
        times = self.sampler_times(rollout, below_one=shares).pick(self.num_times - shares, generator)
        pairs = pairs_at(context, torch.cat([torch.ones(int(shares)), times]), shared=True)
        pairs.shared = int(shares)
        group_size = torch.full((len(rollout),), rollout.group_size, device=device)
        experience = context.experience(
            advantages=clamped(context.advantages, self.advantage_clip),
            pairs=pairs,
            extras={"group_ids": rollout.group_ids.to(device), "group_size": group_size},
        )
        self.store_pulls(context, experience)
        return experience

    @abstractmethod
    def pair_losses(self, error: Tensor) -> Tensor:
        """Return ``l_it`` from the errors of the network's predictions; ``(M, N, ...) -> (M, N)``."""

    @abstractmethod
    def group_values(
        self, losses: Tensor, compared: Tensor, advantages: Tensor, group_ids: Tensor, group_size: Tensor
    ) -> Tensor:
        """Return the values of each image's group that the loss needs, ``(B, ...)``, detached.

        Args:
            losses: ``l_it`` of whole groups in any order, ``(B, N)``; so are the others.
            compared: The losses that ``compared_losses`` names, ``(B, N)``.
            advantages: ``(B,)``.
            group_ids: ``(B,)``, int64, and ``group_size`` alike.
        """

    def losses(
        self, policy: Policy, micro: Experience, use: Literal["training", "reference"] = "training"
    ) -> tuple[Tensor, Tensor]:
        """Return the network's predictions ``(M, N, ...)`` and ``l_it``, ``(M, N)``."""
        prediction, error, _ = self.predict(policy, micro, policy.path.prediction, use=use)
        return prediction, self.pair_losses(error)

    def before_update(self, policy: Policy, micros: Sequence[Experience], ledger: PassLedger | None = None) -> None:
        """Store the old policy's losses, which change with every update, and the values of spread groups."""
        with self.with_copy(policy, "old", ledger):
            for micro in micros:
                micro.extras["old_losses"] = self.losses(policy, micro)[1]
        if torch.stack([are_whole(*groups_of([micro])) for micro in micros]).all():
            return
        with (ledger or PassLedger()).phase("group"), torch.no_grad():
            losses = torch.cat([self.losses(policy, micro)[1] for micro in micros])
        values = self._values_of_spread_groups(micros, losses)
        for micro, value in zip(micros, values.split([len(m) for m in micros]), strict=True):
            micro.extras["group_values"] = value

    def _values_of_spread_groups(self, micros: Sequence[Experience], losses: Tensor) -> Tensor:
        """Return the values of each image's group, for groups spread over micro-batches or ranks."""
        own, _ = ids, sizes = groups_of(micros)
        compared = joined(micros, self.compared_losses)
        advantages = torch.cat([micro.advantages for micro in micros])
        if not are_whole(ids, sizes):
            # All ranks reach this line or none, since all hold equal parts.
            ids, sizes, losses, compared, advantages = (
                self.all_ranks(values).to(own.device) for values in (ids, sizes, losses, compared, advantages)
            )
            if not are_whole(ids, sizes):
                raise ValueError(
                    f"An update splits a group, but {type(self).__name__} compares whole groups. Use "
                    "data.split_updates=false."
                )
        values = self.group_values(losses, compared, advantages, ids, sizes)
        first = (ids == own[:, None]).int().argmax(dim=1)  # an image of the same group, wherever it is
        return values[first]

    def values_of(self, micro: Experience, losses: Tensor) -> Tensor:
        """Return :meth:`group_values` of a micro-batch: those stored for the update if groups are spread."""
        values = micro.extras.get("group_values")
        if values is None:
            compared = micro.extras[self.compared_losses]
            values = self.group_values(losses, compared, micro.advantages, *groups_of([micro]))
        return values

    def after_update(self, policy: Policy) -> None:
        super().after_update(policy)
        decay = min(self.old_decay_max, self.old_decay_start + self.old_decay_rate * self.num_updates)
        self.copies["old"].move_towards(policy, decay)
