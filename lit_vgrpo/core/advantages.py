"""Group-relative advantages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

AdvantageStd = Literal["global", "source", "group", "none"]
AdvantageAggregate = Literal["rewards", "advantages"]

STD_FLOOR = 1e-4
NO_SPREAD = 1e-6


def group_statistics(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean, population std and number of valid images of each image's group, float64, and the group's index.

    Args:
        rewards: Shape ``(B,)``, as are the results; NaN marks a failed image, which is left out.
        group_ids: Shape ``(B,)``, int64, any values.
    """
    _, index = torch.unique(group_ids, return_inverse=True)
    valid = ~rewards.isnan()
    values = torch.where(valid, rewards, 0).double()
    num_groups = int(index.max()) + 1 if len(index) else 0
    zeros = torch.zeros(num_groups, dtype=torch.float64, device=rewards.device)
    count = zeros.index_add(0, index, valid.double())
    mean = zeros.index_add(0, index, values) / count.clamp(min=1)
    centred = torch.where(valid, values - mean[index], 0)
    std = (zeros.index_add(0, index, centred.square()) / count.clamp(min=1)).sqrt()
    return mean[index], std[index], count[index], index


def group_advantages(rewards: Tensor, group_ids: Tensor, std: AdvantageStd = "global") -> Tensor:
    """Return ``A_i = (R_i - mean of its group) / (s + 1e-4)``, ``(B,)``, float32; sums to 0 in each group.

    A group without spread gets 0, not rounding noise divided by the floor. A failed image (NaN) is left out of all
    statistics and gets 0. Source: arXiv 2402.03300; the global std follows arXiv 2505.05470.

    Args:
        rewards: Total reward of every image of the iteration over all ranks, shape ``(B,)``.
        group_ids: Shape ``(B,)``, int64.
        std: ``s`` is the population std over the whole iteration (``"global"``) or over the image's group; ``"none"``
            does not divide.

    >>> group_advantages(torch.tensor([0.0, 1.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]), std="group")
    tensor([-0.9998,  0.9998,  0.0000,  0.0000])
    """
    mean, group_std, _, _ = group_statistics(rewards, group_ids)
    valid = ~rewards.isnan()
    if std not in ("global", "group", "none"):
        raise ValueError(f"advantage std={std!r} is unknown. Use global, source, group or none.")
    scale = group_std + STD_FLOOR if std == "group" else torch.ones_like(group_std)
    if std == "global" and valid.any():
        scale = rewards[valid].double().std(correction=0) + STD_FLOOR
    # Spread is relative to the reward's magnitude, because float32 sums of equal rewards differ in their last bits.
    spread = group_std > NO_SPREAD * mean.abs().clamp(min=1)
    advantages = (rewards.double() - mean) / scale
    return torch.where(valid & spread, advantages, 0).float()


def combined_advantages(
    rewards: Tensor,
    parts: Mapping[str, Tensor],
    weights: Mapping[str, float],
    group_ids: Tensor,
    std: AdvantageStd = "global",
    aggregate: AdvantageAggregate = "rewards",
    sources: Sequence[str] = (),
) -> Tensor:
    """Return advantages of several rewards, as :func:`group_advantages`: of their sum, or the sum of advantages.

    Args:
        rewards: The weighted sum of the parts, ``(B,)``; NaN if one of them failed.
        parts: Each reward's scores, ``(B,)``.
        weights: The weight of each part.
        group_ids: Shape ``(B,)``, int64.
        std: See :func:`group_advantages`; ``"source"`` divides by the std over the images of the same source.
        aggregate: ``"rewards"`` normalises the sum; ``"advantages"`` normalises each reward before summing, so that a
            reward with a wide range does not dominate (arXiv 2507.21802).
        sources: Source of each image's prompt, of length B; empty if there is only one.
    """
    if std == "source":
        total = torch.zeros(len(rewards))
        for source in set(sources) or {""}:
            own = torch.tensor([one == source for one in sources] or [True] * len(rewards), dtype=torch.bool)
            source_parts = {name: part[own] for name, part in parts.items()}
            total[own] = combined_advantages(rewards[own], source_parts, weights, group_ids[own], "global", aggregate)
        return total
    if aggregate == "rewards" or not parts:
        return group_advantages(rewards, group_ids, std)
    failed = rewards.isnan()
    total = torch.zeros(len(rewards))
    for name, part in parts.items():
        if weights[name]:
            total += weights[name] * group_advantages(part.masked_fill(failed, math.nan), group_ids, std)
    return total


def soft_clip(advantages: Tensor, limit: float | None) -> Tensor:
    """Bound advantages at eta by ``eta tanh(A / eta)``, with eta 3 to 5 in arXiv 2604.23380; ``None`` does not."""
    return advantages if limit is None else limit * torch.tanh(advantages / limit)


def clamped(advantages: Tensor, limit: float | None) -> Tensor:
    """Bound advantages at ``limit``; ``None`` leaves them unchanged."""
    return advantages if limit is None else advantages.clamp(-limit, limit)


def mean_score(scores: Tensor) -> float:
    """Return the mean of scores; 0 if it is below their rounding error, as for votes, whose scores cancel."""
    mean = float(scores.mean())
    return 0.0 if abs(mean) < NO_SPREAD * float(scores.abs().mean()) else mean


def small_spread_warning(what: str, rewards: Tensor) -> str | None:
    """Return a warning if rewards ``(B,)`` differ so little that :data:`STD_FLOOR` shrinks advantages, or ``None``."""
    spread = float(rewards.std(correction=0))
    if spread >= 10 * STD_FLOOR:
        return None
    advice = "so their advantages are small. Multiply the reward, for example by 1000."
    return f"{what} differ by {spread:.2g} (standard deviation), {advice}"


def no_spread_share(rewards: Tensor, group_ids: Tensor) -> float:
    """Return the share of groups, in [0, 1], whose valid rewards are all equal and give no gradient."""
    mean, std, _, index = group_statistics(rewards, group_ids)
    if not len(index):
        return 0.0
    flat = std <= NO_SPREAD * mean.abs().clamp(min=1)
    return float(torch.zeros(int(index.max()) + 1, device=rewards.device).index_fill(0, index[flat], 1.0).mean())
