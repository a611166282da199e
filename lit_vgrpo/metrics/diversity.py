"""How much the images of one prompt differ."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

Distance = Literal["cosine", "euclidean"]
Key = TypeVar("Key", bound=Hashable)


def mean_pairwise_distance(features: Tensor, distance: Distance = "cosine") -> float:
    """Mean distance between two different images of one prompt, in float64.

    Args:
        features: shape ``(n, D)``.
        distance: ``cosine`` (0 for equal directions, 2 for opposite ones) or ``euclidean``.

    Returns:
        NaN for fewer than two images.

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
    """The mean pairwise distance within each prompt's images.

    Args:
        features: shape ``(N, D)``.
        prompts: what each image was made for, N of them: the prompt or its number.
        distance: as in :func:`mean_pairwise_distance`.

    Returns:
        One number a prompt, in order of first appearance; NaN for a prompt with one image.
    """
    members: dict[Key, list[int]] = {}
    for index, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(index)
    return {prompt: mean_pairwise_distance(features[rows], distance) for prompt, rows in members.items()}
