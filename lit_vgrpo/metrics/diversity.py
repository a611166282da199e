"""Diversity of the images of one prompt."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

Distance = Literal["cosine", "euclidean"]
Key = TypeVar("Key", bound=Hashable)


def mean_pairwise_distance(features: Tensor, distance: Distance = "cosine") -> float:
    """Return the mean distance between two images of one prompt, in float64.

    Args:
        features: shape ``(n, D)``.
        distance: ``cosine`` (0 for equal directions, 2 for opposite ones) or ``euclidean``.

    Returns:
        The mean over all pairs; NaN for fewer than two images.

    Raises:
        ValueError: the distance is unknown.

    >>> mean_pairwise_distance(torch.eye(3))
    1.0
    """
    if distance not in get_args(Distance):
        raise ValueError(f"distance={distance!r} is unknown. Use one of: {', '.join(get_args(Distance))}.")
    count = len(features)
    if count < 2:
        return math.nan
    values = features.double()
    if distance == "euclidean":
        return torch.pdist(values).mean().item()
    unit = torch.nn.functional.normalize(values, dim=-1)
    distances = (1 - unit @ unit.T).clamp(min=0).fill_diagonal_(0)
    return (distances.sum() / (count * (count - 1))).item()


def diversity(features: Tensor, prompts: Sequence[Key], distance: Distance = "cosine") -> dict[Key, float]:
    """Return the mean pairwise distance of each prompt's images.

    Args:
        features: shape ``(N, D)``.
        prompts: each image's prompt, or its number; length N.
        distance: as in :func:`mean_pairwise_distance`.

    Returns:
        One value per prompt, in order of first appearance; NaN for a prompt with one image.
    """
    members: dict[Key, list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(index)
    return {prompt: mean_pairwise_distance(features[rows], distance) for prompt, rows in members.items()}
