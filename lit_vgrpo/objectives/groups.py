"""Groups of images in the micro-batches of an update: which are whole, and how much each one weighs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_vgrpo.core.probability_paths import expand
from lit_vgrpo.core.types import Experience


def group_weights(
    losses: Tensor, reference_losses: Tensor, advantages: Tensor, group_ids: Tensor, group_size: Tensor, beta: float
) -> Tensor:
    """Return ``sigmoid(z_g)`` of each image's group, detached.

    ``z_g = (beta / G) sum_{i in g} A_i (l_i - l_ref_i)``, at each time by itself where there are several.

    Args:
        losses: ``l_i``, ``(B,)`` or ``(B, N)``; whole groups, in any order. So are the others.
        reference_losses: ``l_ref_i``, shaped like them.
        advantages: ``A_i``, ``(B,)``.
        group_ids: ``(B,)``, int64.
        group_size: ``G`` of each image's group, ``(B,)``, int64.

    Returns:
        Shape of ``losses``, in (0, 1).
    """
    gains = expand(advantages, losses) * (losses.detach() - reference_losses) / expand(group_size, losses)
    same = _same_group(group_ids)
    # Not by unique and index_add, which wait for a GPU and are not deterministic there, nor by a matrix product, which
    # autocast would round.
    sums = (same.reshape(*same.shape, *[1] * (gains.ndim - 1)) * gains).sum(dim=1)
    return torch.sigmoid(beta * sums)


def _same_group(ids: Tensor) -> Tensor:
    """Return which images are of one group, ``(B, B)``, bool."""
    return ids[:, None] == ids


def joined(micros: Sequence[Experience], name: str) -> Tensor:
    """Return one of the extras of all images, ``(B, ...)``."""
    return torch.cat([micro.extras[name] for micro in micros])


def groups_of(micros: Sequence[Experience]) -> tuple[Tensor, Tensor]:
    """Return the images' group ids and group sizes, each ``(B,)``, int64."""
    return joined(micros, "group_ids"), joined(micros, "group_size")


def are_whole(ids: Tensor, sizes: Tensor) -> Tensor:
    """Return whether no group is cut, ``()``, bool; unlike :func:`cut_group`, without waiting for a GPU."""
    return (_same_group(ids).sum(dim=1) == sizes).all()


def cut_group(ids: Tensor, sizes: Tensor) -> tuple[int, int, int] | None:
    """Return the first group that is not whole as (images present, group size, id), or ``None``."""
    groups, index, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    whole = torch.empty_like(counts).scatter_(0, index, sizes)
    short = (counts != whole).nonzero()
    if not len(short):
        return None
    k = int(short[0])
    return int(counts[k]), int(whole[k]), int(groups[k])
