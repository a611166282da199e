"""Base of the pair methods that compare the images of a group, also with those of other micro-batches and ranks."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import clamped
from lit_vgrpo.core.ranges import PositiveFloat, Range
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.pairs import PairObjective, PairPass, TimesPer
from lit_vgrpo.policies.base import Policy

VALUES = "group_values"


def are_whole(ids: Tensor, size: int) -> Tensor:
    """Return True if every group is complete, ``()``, bool; does not wait for a GPU."""
    return ((ids[:, None] == ids).sum(dim=1) == size).all()


@dataclass(eq=False)
class GroupObjective(PairObjective):
    """Base of the pair methods whose loss of an image depends on its whole group.

    A group must be whole in every update. If micro-batches do not hold whole groups, the update's images pass through
    the network once more without gradient. A ``micro_batch_size`` that is a multiple of ``group_size`` saves this pass.

    Args:
        num_times: Times per iteration, the same for all images and ranks.
        advantage_clip: Bound on the advantages. Clipped advantages no longer sum to 0 in a group.
        share_passes: ``pure_noise`` sets one of the times to ``t = 1``, where the images of a group share one pass; see
            :class:`~lit_vgrpo.objectives.vgrpo.VGRPO`. Ours, not the papers'.
    """

    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("dpm++", steps=10)
    times_per: ClassVar[TimesPer] = "iteration"
    repeats_times: ClassVar[bool] = False

    num_times: Annotated[int, Range(1, 1000)] = 4
    _: KW_ONLY
    advantage_clip: PositiveFloat | None = 5.0
    share_passes: Literal["none", "pure_noise"] = "none"

    @property
    def compared(self) -> str:
        """Name of the kept losses that those of a group are compared with."""
        return "old"

    @abstractmethod
    def pair_losses(self, now: PairPass) -> Tensor:
        """Return ``l_it``, ``(M, N)``."""

    @abstractmethod
    def group_values(
        self, losses: Tensor, compared: Tensor, advantages: Tensor, counts: Tensor, group_ids: Tensor, group_size: int
    ) -> Tensor:
        """Return the values of each image's group, ``(B, ...)``, detached.

        Args:
            losses: ``(B, N)``; whole groups, in any order.
            compared: The losses of :attr:`compared`, likewise.
            advantages: ``(B,)``.
            counts: ``(B,)``, bool: false for images that a reward failed to score, whose advantage is 0.
            group_ids: ``(B,)``, int64.
            group_size: Images per group.
        """

    def values_of_groups(self, micro: Experience, losses: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Return the values of a micro-batch's groups: those of :meth:`before_update` if its groups are spread."""
        if VALUES in micro.kept:
            return micro.kept[VALUES]
        images = micro.advantages, micro.counts, micro.group_ids, micro.group_size
        return self.group_values(losses, kept[self.compared], *images)

    def bounded(self, advantages: Tensor) -> Tensor:
        return clamped(advantages, self.advantage_clip)

    def check(self, sizes: Sizes) -> list[str]:
        errors, prompts = super().check(sizes), sizes.prompts_per_iteration
        if sizes.splits_groups:
            errors.append(
                f"{type(self).__name__} compares whole groups, but updates_per_iteration={sizes.updates_per_iteration} "
                f"splits the {prompts} groups of {sizes.group_size}. Use a divisor of {prompts}, or "
                "data.split_updates=false."
            )
        return errors

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        passes = super().prediction_passes(sizes)
        return passes if sizes.holds_whole_groups else passes | {"group": passes["update"]}

    def before_update(self, policy: Policy, micros: Sequence[Experience], ledger: PassLedger | None = None) -> None:
        super().before_update(policy, micros, ledger)
        size = micros[0].group_size
        if torch.stack([are_whole(micro.group_ids, size) for micro in micros]).all():
            return
        guidance = self.guidance_in("training", policy)
        with (ledger or PassLedger()).phase("group"), torch.no_grad():
            passes = (self.forward(policy, micro.to(policy.device), guidance) for micro in micros)
            own_losses = [self.pair_losses(one).to(micros[0].latents.device) for one in passes]
        losses = torch.cat(own_losses)
        own = ids = torch.cat([micro.group_ids for micro in micros])
        # A copy that always equals the policy keeps nothing: it has the losses of this pass.
        compared = torch.cat(
            [micro.kept.get(self.compared, now) for micro, now in zip(micros, own_losses, strict=True)]
        )
        advantages = torch.cat([micro.advantages for micro in micros])
        counts = torch.cat([micro.counts for micro in micros])
        if not are_whole(ids, size):
            # All ranks reach this line or none, since all hold equal parts.
            ids, losses, compared, advantages, counts = (
                self.all_ranks(values).to(own.device) for values in (ids, losses, compared, advantages, counts)
            )
            if not are_whole(ids, size):
                raise ValueError(
                    f"An update splits a group, but {type(self).__name__} compares whole groups. Use "
                    "data.split_updates=false."
                )
        values = self.group_values(losses, compared, advantages, counts, ids, size)
        same = ids == own[:, None]
        first = (same.int() + (same & counts)).argmax(dim=1)  # an image of the same group, one that counts if any does
        for micro, part in zip(micros, values[first].split([len(micro) for micro in micros]), strict=True):
            micro.kept[VALUES] = part
