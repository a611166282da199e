"""Groups of images that people compare: what is shown next, and what the votes say."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil

from lit_vgrpo.rewards.bradley_terry import choice_scores


@dataclass(frozen=True)
class Demand:
    """The votes that a group needs.

    Attributes:
        images_per_vote: images of a comparison.
        votes_per_group: comparisons of a group; ``None`` for the fewest that connect all its images.
        voters: people who answer each comparison.
    """

    images_per_vote: int = 4
    votes_per_group: int | None = None
    voters: int = 1

    def of_group(self, size: int) -> int:
        """Return the comparisons of a group of ``size`` different images."""
        if size < 2:
            return 0
        return self.votes_per_group or ceil((size - 1) / (min(self.images_per_vote, size) - 1))


@dataclass(frozen=True)
class Comparison:
    """Images of one prompt, of which a voter chooses the best."""

    id: int
    prompt: str
    images: list[str]


@dataclass(frozen=True)
class Progress:
    """Votes on the open groups.

    Attributes:
        given: votes, skipped comparisons included; no more than needed.
        needed: votes that the groups need.
        skipped: votes without a choice.
        voters: people who voted.
        same: pairs of votes by two people on the same images with the same choice.
        compared: all such pairs; a skipped comparison makes none.
    """

    given: int
    needed: int
    skipped: int
    voters: int
    same: int
    compared: int


@dataclass
class Group:
    """An open group: its images, and its comparisons with the choice of each voter."""

    id: int
    prompt: str
    shown: int
    needed: int
    voters: int
    images: list[str]
    comparisons: dict[int, list[str]]
    votes: dict[int, dict[str, str | None]]

    @property
    def given(self) -> int:
        """Votes so far, no more than needed."""
        return sum(min(len(self.votes[number]), self.voters) for number in self.comparisons)

    def choices(self) -> list[tuple[int, list[int]]]:
        """Return each choice and what it was made from, as numbers of images; skipped comparisons are left out."""
        place = {image: number for number, image in enumerate(self.images)}
        return [
            (place[chosen], [place[image] for image in self.comparisons[number]])
            for number, own in self.votes.items()
            for chosen in own.values()
            if chosen is not None
        ]

    def scores(self) -> dict[str, float]:
        """Return the images' scores."""
        return dict(zip(self.images, choice_scores(self.choices(), len(self.images)).tolist(), strict=True))

    def next_images(self) -> list[str]:
        """Return the images of a new comparison.

        One of those shown least, with images that nothing connects to it yet, then those shown least, then those of the
        closest scores.
        """
        times = Counter(image for images in self.comparisons.values() for image in images)
        score = self.scores()
        draw = random.Random(f"{self.id}-{len(self.comparisons)}")
        first, *rest = sorted(self.images, key=lambda image: (times[image], draw.random()))
        linked = self._linked(first)
        rest.sort(key=lambda own: (own in linked, times[own], abs(score[own] - score[first]), draw.random()))
        return sorted([first, *rest[: self.shown - 1]])

    def _linked(self, image: str) -> set[str]:
        """Return the images that comparisons connect with one, directly or through others."""
        linked, sets = {image}, [set(images) for images in self.comparisons.values()]
        for _ in sets:
            linked = linked.union(*(images for images in sets if images & linked))
        return linked


def progress_of(groups: Sequence[Group]) -> Progress:
    """Return the progress of groups."""
    answers = [list(own.values()) for group in groups for own in group.votes.values()]
    pairs = [pair for own in answers for pair in combinations(own, 2) if None not in pair]
    return Progress(
        given=sum(group.given for group in groups),
        needed=sum(group.needed * group.voters for group in groups),
        skipped=sum(own.count(None) for own in answers),
        voters=len({voter for group in groups for own in group.votes.values() for voter in own}),
        same=sum(first == second for first, second in pairs),
        compared=len(pairs),
    )
