"""Values of whole groups, for losses that compare a group's images, also of other micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import Experience
from lit_vgrpo.objectives.pairs import PairObjective, PairPass
from lit_vgrpo.policies.base import Policy

GroupValues = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""Maps ``losses (B, N)``, the losses compared with ``(B, N)``, ``advantages (B,)``, ``group_ids (B,)`` and the group's
size to the values of each image's group, ``(B, ...)``, detached; whole groups, in any order."""
VALUES = "group_values"


def are_whole(ids: Tensor, size: int) -> Tensor:
    """Return True if every group is complete, ``()``, bool; does not wait for a GPU."""
    return ((ids[:, None] == ids).sum(dim=1) == size).all()


def values_of_groups(micro: Experience, losses: Tensor, compared: Tensor, group_values: GroupValues) -> Tensor:
    """Return the values of a micro-batch's groups: those of :func:`keep_group_values` if its groups are spread."""
    if VALUES in micro.kept:
        return micro.kept[VALUES]
    return group_values(losses, compared, micro.advantages, micro.group_ids, micro.group_size)


def keep_group_values(
    objective: PairObjective,
    policy: Policy,
    micros: Sequence[Experience],
    ledger: PassLedger | None,
    losses_of: Callable[[PairPass], Tensor],
    compared: str,
    group_values: GroupValues,
) -> None:
    """Keep the values of groups that are spread over an update's micro-batches or ranks.

    This costs one more pass without gradient of the update's images. Micro-batches of whole groups need none.

    Args:
        losses_of: Returns the losses of a pass, ``(M, N)``.
        compared: Name of the kept losses that those of a group are compared with.
    """
    if torch.stack([are_whole(micro.group_ids, micro.group_size) for micro in micros]).all():
        return
    guidance, size = objective.guidance_in("training", policy), micros[0].group_size
    with (ledger or PassLedger()).phase("group"), torch.no_grad():
        passes = (objective.see(policy, micro.to(policy.device), guidance) for micro in micros)
        losses = torch.cat([losses_of(one).to(micros[0].latents.device) for one in passes])
    own = ids = torch.cat([micro.group_ids for micro in micros])
    others = torch.cat([micro.kept[compared] for micro in micros])
    advantages = torch.cat([micro.advantages for micro in micros])
    if not are_whole(ids, size):
        # All ranks reach this line or none, since all hold equal parts.
        ids, losses, others, advantages = (
            objective.all_ranks(values).to(own.device) for values in (ids, losses, others, advantages)
        )
        if not are_whole(ids, size):
            raise ValueError(
                f"An update splits a group, but {type(objective).__name__} compares whole groups. Use "
                "data.split_updates=false."
            )
    values = group_values(losses, others, advantages, ids, size)
    first = (ids == own[:, None]).int().argmax(dim=1)  # an image of the same group, wherever it is
    for micro, part in zip(micros, values[first].split([len(micro) for micro in micros]), strict=True):
        micro.kept[VALUES] = part


def group_errors(objective: PairObjective, sizes: Sizes) -> list[str]:
    """Return why the updates split groups, in one line."""
    if not sizes.splits_groups:
        return []
    prompts, updates = sizes.prompts_per_iteration, sizes.updates_per_iteration
    return [
        f"{type(objective).__name__} compares whole groups, but updates_per_iteration={updates} splits the {prompts} "
        f"groups of {sizes.group_size}. Use a divisor of {prompts}, or data.split_updates=false."
    ]
