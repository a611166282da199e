"""Groups of images that people compare: what is shown next, and the scores that explain their choices best."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

PRIOR_STD = 1.5
"""Of a score in logits: an image that wins its only comparison of two gets +0.63 and the other -0.63."""
MOST_STEPS = 100
TOLERANCE = 1e-10


def comparisons_needed(size: int, shown: int) -> int:
    """Return the fewest comparisons of ``shown`` images that connect a group of ``size``."""
    return 0 if size < 2 else ceil((size - 1) / (min(shown, size) - 1))


@dataclass(frozen=True)
class Comparison:
    """Images of one prompt, of which a voter chooses the best."""

    id: int
    prompt: str
    images: list[str]


@dataclass(frozen=True)
class Progress:
    """Votes on groups.

    Attributes:
        given: votes including skipped comparisons; no more than needed.
        needed: votes that the groups need.
        skipped: votes without a choice.
        voters: people who voted.
    """

    given: int
    needed: int
    skipped: int
    voters: int


@dataclass
class Group:
    """An open group: its images, and its comparisons with the choice of each voter.

    Attributes:
        shown: images of a comparison.
        voters: people who answer each comparison.
        comparisons: images by number.
        votes: by comparison and voter the chosen image; None for a skip.
    """

    id: int
    prompt: str
    shown: int
    voters: int
    images: list[str]
    comparisons: dict[int, list[str]]
    votes: dict[int, dict[str, str | None]]

    @property
    def needed(self) -> int:
        """Comparisons that the group needs."""
        return comparisons_needed(len(self.images), self.shown)

    @property
    def given(self) -> int:
        """Votes so far, no more than needed."""
        return sum(min(len(votes), self.voters) for votes in self.votes.values())

    def scores(self) -> dict[str, float]:
        """Return the images' scores; skipped comparisons do not count."""
        index = {image: number for number, image in enumerate(self.images)}
        choices = [
            (index[chosen], [index[image] for image in self.comparisons[number]])
            for number, votes in self.votes.items()
            for chosen in votes.values()
            if chosen is not None
        ]
        return dict(zip(self.images, choice_scores(choices, len(self.images)).tolist(), strict=True))

    def next_images(self) -> list[str]:
        """Return the images of a new comparison.

        One of those shown least, then images that no comparison connects to it, those shown least, and those of the
        closest scores.
        """
        times = Counter(image for images in self.comparisons.values() for image in images)
        score = self.scores()
        draw = random.Random(f"{self.id}-{len(self.comparisons)}")
        first, *rest = sorted(self.images, key=lambda image: (times[image], draw.random()))
        linked, sets = {first}, [set(images) for images in self.comparisons.values()]
        for _ in sets:
            linked = linked.union(*(images for images in sets if images & linked))
        rest.sort(key=lambda own: (own in linked, times[own], abs(score[own] - score[first]), draw.random()))
        return sorted([first, *rest[: self.shown - 1]])


def progress_of(groups: Sequence[Group]) -> Progress:
    """Return the progress of groups."""
    answers = [votes for group in groups for votes in group.votes.values()]
    return Progress(
        given=sum(group.given for group in groups),
        needed=sum(group.needed * group.voters for group in groups),
        skipped=sum(list(votes.values()).count(None) for votes in answers),
        voters=len({voter for votes in answers for voter in votes}),
    )


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
