"""Scores from choices: the model of Bradley and Terry, and Luce's extension of it to more than two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PRIOR_STD = 1.5
"""Of a score in logits: an image that wins its only comparison of two gets +0.63 and the other -0.63."""
MOST_STEPS = 100
TOLERANCE = 1e-10


def choice_scores(choices: Sequence[tuple[int, Sequence[int]]], size: int, prior_std: float = PRIOR_STD) -> Tensor:
    r"""Return the scores under which the choices are most likely.

    The probability of choosing item w from a set S is ``exp(s_w) / sum_{j in S} exp(s_j)``, which for two items is the
    model of Bradley and Terry. A normal prior keeps the scores finite where an item always wins or is never shown, and
    makes their mean 0.

    Args:
        choices: the chosen item and the items it was chosen from, itself included, by number.
        size: number of items.
        prior_std: standard deviation of the prior, in logits.

    Returns:
        Shape ``(size,)``, float64, in logits.

    Source:
        Bradley and Terry, Biometrika 39 (1952); Luce, Individual Choice Behavior (1959).
    """
    was_shown = torch.zeros(len(choices), size, dtype=torch.bool)
    wins = torch.zeros(size, dtype=torch.float64)
    for row, (chosen, shown) in enumerate(choices):
        was_shown[row, list(shown)] = True
        wins[chosen] += 1

    def logits(scores: Tensor) -> Tensor:
        return scores.expand_as(was_shown).masked_fill(~was_shown, -torch.inf)

    def log_posterior(scores: Tensor) -> Tensor:
        return scores @ wins - logits(scores).logsumexp(1).sum() - scores.square().sum() / (2 * prior_std**2)

    scores = torch.zeros(size, dtype=torch.float64)
    for _ in range(MOST_STEPS):
        chances = logits(scores).softmax(1)
        gradient = wins - chances.sum(0) - scores / prior_std**2
        if gradient.abs().max() < TOLERANCE:
            break
        curvature = torch.diag(chances.sum(0) + 1 / prior_std**2) - chances.T @ chances
        step = torch.linalg.solve(curvature, gradient)
        before = log_posterior(scores)
        while log_posterior(scores + step) < before and step.abs().max() > TOLERANCE:
            step = step / 2  # Newton's step is too long far from the maximum
        scores = scores + step
    return scores
