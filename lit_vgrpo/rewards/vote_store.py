"""Votes of people on images, in an SQLite file that a run and the voting page share, and the scores that explain them.

An open group is the images of one prompt. Voters get comparisons of a few of them, and choose the best or skip.
"""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lit_vgrpo.errors import UserError, one_line

FILE_NAME = "votes.sqlite3"
BUSY_S = 30.0
"""Time to wait for another process that is writing."""
PRIOR_STD = 1.5
"""Prior standard deviation of a score, in logits: the winner of a single pair gets +0.63, the other -0.63."""
TOLERANCE = 1e-10
Numbers = npt.NDArray[np.float64]
_TABLES = (
    "CREATE TABLE IF NOT EXISTS images (id TEXT PRIMARY KEY, png BLOB)",
    "CREATE TABLE IF NOT EXISTS groups (id INTEGER PRIMARY KEY, key TEXT UNIQUE, prompt TEXT, images TEXT,"
    " owner INTEGER, is_open INTEGER, voters INTEGER)",
    "CREATE TABLE IF NOT EXISTS comparisons (id INTEGER PRIMARY KEY, group_id INTEGER, images TEXT,"
    " UNIQUE (group_id, images))",
    "CREATE TABLE IF NOT EXISTS votes (id INTEGER PRIMARY KEY AUTOINCREMENT, comparison INTEGER, voter TEXT,"
    " image TEXT, time REAL, UNIQUE (comparison, voter))",
    "CREATE INDEX IF NOT EXISTS open_groups ON groups (is_open)",
)


class VoteStoreError(UserError):
    """The file cannot be used, with the reason in one line."""


class VoteRefused(Exception):
    """A vote that cannot be stored or undone, with the reason in one line."""


@dataclass(frozen=True)
class Comparison:
    """Images of one prompt from which a voter chooses the best."""

    id: int
    prompt: str
    images: list[str]


@dataclass(frozen=True)
class Progress:
    """Votes on groups."""

    given: int  # with skipped comparisons; no more than needed
    needed: int
    skipped: int  # votes without a choice

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Progress:
        return cls(
            given=sum(group.given for group in groups),
            needed=sum(len(group.comparisons) * group.voters for group in groups),
            skipped=sum(list(votes.values()).count(None) for group in groups for votes in group.votes.values()),
        )


@dataclass
class Group:
    """A group, and its comparisons with the choice of each voter."""

    id: int
    prompt: str
    images: list[str]
    voters: int  # people who answer each comparison
    comparisons: dict[int, list[str]]  # images by number
    votes: dict[int, dict[str, str | None]]  # the chosen image by comparison and voter; None for a skip

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


def comparisons(images: Sequence[str], size: int) -> list[Sequence[str]]:
    """Return the fewest overlapping parts of at most ``size`` images that connect all of them.

    >>> comparisons("abcdef", 4)
    ['abcd', 'cdef']
    """
    last = max(0, len(images) - size)
    return [images[min(start, last) :][:size] for start in range(0, len(images) - 1, size - 1)]


class VoteStore:
    """The votes of a run, in a file that is created if it is missing. Each call is one transaction, on disk at return.

    Any number of processes and threads may use one file.

    Raises:
        VoteStoreError: The file is damaged or cannot be written. So does every other call.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._transaction() as db:
            for table in _TABLES:
                db.execute(table)

    def publish(
        self,
        groups: Iterable[tuple[str, Mapping[str, bytes]]],
        images_per_vote: int = 4,
        voters: int = 1,
        owner: int = 0,
        num_owners: int = 1,
    ) -> list[int]:
        """Open groups for voting, close the others of this owner, and return their numbers; old votes are kept.

        Args:
            groups: The prompt of each group, and its images as PNG files by their ids.
            images_per_vote: Images of a comparison.
            voters: People who answer each comparison.
            owner: The rank that asks.
            num_owners: Number of ranks; groups of ranks beyond it, from an earlier part of the run, are closed.
        """
        numbers = []
        with self._transaction() as db:
            db.execute("UPDATE groups SET is_open = 0 WHERE owner = ? OR owner >= ?", (owner, num_owners))
            for prompt, images in groups:
                db.executemany("INSERT OR REPLACE INTO images VALUES (?, ?)", images.items())
                key = sha256("\n".join([prompt, *sorted(images)]).encode()).hexdigest()
                order = random.Random(key).sample(sorted(images), len(images))
                added = db.execute(
                    "INSERT INTO groups (is_open, key, prompt, images, owner, voters) VALUES (1, ?, ?, ?, ?, ?)"
                    " ON CONFLICT (key) DO UPDATE SET is_open = 1, owner = excluded.owner, voters = excluded.voters"
                    " RETURNING id",
                    (key, prompt, json.dumps(order), owner, voters),
                )
                numbers.append(int(added.fetchone()[0]))
                asked = [json.dumps(shown) for shown in comparisons(order, images_per_vote)]
                db.execute(  # those of another size, from an earlier part of the run
                    f"DELETE FROM comparisons WHERE group_id = ? AND images NOT IN ({', '.join('?' * len(asked))})"
                    " AND id NOT IN (SELECT comparison FROM votes)",
                    (numbers[-1], *asked),
                )
                db.executemany(
                    "INSERT OR IGNORE INTO comparisons (group_id, images) VALUES (?, ?)",
                    [(numbers[-1], shown) for shown in asked],
                )
        return numbers

    def scores(self, numbers: Sequence[int]) -> list[dict[str, float]]:
        """Return the scores of each group's images by their ids."""
        with self._transaction() as db:
            return [group.scores() for group in _groups(db, numbers)]

    def close(self, numbers: Sequence[int]) -> Progress | None:
        """End the voting on groups, delete their images and return their progress; votes stay.

        It does nothing and returns ``None`` while votes are missing, on these groups or on any other that is open.
        """
        with self._transaction() as db:
            groups, waiting = _groups(db, numbers), Progress.of(_groups(db))
            if waiting.given < waiting.needed:
                return None
            for group in groups:
                db.execute("UPDATE groups SET is_open = 0 WHERE id = ?", (group.id,))
                db.executemany("UPDATE images SET png = NULL WHERE id = ?", [(image,) for image in group.images])
        return Progress.of(groups)

    def progress(self, numbers: Sequence[int] | None = None) -> Progress:
        """Return the progress of some groups, by default of all that are open."""
        with self._transaction() as db:
            return Progress.of(_groups(db, numbers))

    def next_comparison(self, voter: str) -> Comparison | None:
        """Return a voter's next comparison, if any: fewest votes first, among equals in each voter's own order."""
        with self._transaction() as db:
            groups = _groups(db)
            groups.sort(key=lambda group: (group.given, random.Random(f"{voter}/{group.id}").random()))
            for group in groups:
                for number, images in group.comparisons.items():
                    if len(group.votes[number]) < group.voters and voter not in group.votes[number]:
                        return Comparison(number, group.prompt, images)
        return None

    def vote(self, number: int, voter: str, image: str | None) -> None:
        """Store a voter's best image of a comparison, None for no preference; the same vote again does nothing.

        It raises VoteRefused if there is no such image, the voting is over, or the voter has voted otherwise.
        """
        with self._transaction() as db:
            asked = db.execute(
                "SELECT comparisons.images, is_open FROM comparisons JOIN groups ON groups.id = group_id"
                " WHERE comparisons.id = ?",
                (number,),
            ).fetchone()
            if asked is None or (image is not None and image not in json.loads(asked[0])):
                raise VoteRefused("These images do not exist. The vote was not stored.")
            last = db.execute("SELECT image FROM votes WHERE comparison = ? AND voter = ?", (number, voter)).fetchone()
            if last == (image,):
                return
            if last is not None:
                raise VoteRefused("You have already voted on these images. Undo that vote first.")
            if not asked[1]:
                raise VoteRefused("Voting on these images has ended. The vote was not stored.")
            db.execute(
                "INSERT INTO votes (comparison, voter, image, time) VALUES (?, ?, ?, ?)",
                (number, voter, image, time.time()),
            )

    def undo(self, voter: str) -> Comparison:
        """Delete a voter's last vote and return its comparison; raise VoteRefused if there is none that is not used."""
        with self._transaction() as db:
            last = db.execute(
                "SELECT votes.id, comparisons.id, prompt, comparisons.images, is_open FROM votes"
                " JOIN comparisons ON comparisons.id = comparison JOIN groups ON groups.id = group_id"
                " WHERE voter = ? ORDER BY votes.id DESC LIMIT 1",
                (voter,),
            ).fetchone()
            if last is None or not last[4]:
                raise VoteRefused("There is no vote to undo, or training has used it.")
            db.execute("DELETE FROM votes WHERE id = ?", (last[0],))
            return Comparison(last[1], last[2], json.loads(last[3]))

    def image(self, image: str) -> bytes | None:
        """Return an image as a PNG file, or ``None`` if it does not exist (any more)."""
        with self._transaction() as db:
            row = db.execute("SELECT png FROM images WHERE id = ?", (image,)).fetchone()
        return None if row is None else row[0]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self.path.is_symlink():  # sqlite would write to the file that it names
            raise VoteStoreError(f"{self.path} is a link. Move it aside to start over.")
        try:
            with closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                with db:  # commits, or rolls back after an error
                    yield db
        except (sqlite3.Error, TypeError, ValueError, KeyError) as error:  # the latter of rows that are damaged
            why = one_line(error) if isinstance(error, sqlite3.Error) else "its content is damaged"
            advice = "Check the disk, or move the file aside to start over"
            raise VoteStoreError(f"{self.path} cannot be used: {why}. {advice}.") from error


def _groups(db: sqlite3.Connection, numbers: Sequence[int] | None = None) -> list[Group]:
    """Return some groups, by default all that are open."""
    if numbers is None:
        numbers = [number for (number,) in db.execute("SELECT id FROM groups WHERE is_open ORDER BY id")]
    groups = []
    for number in numbers:
        query = "SELECT prompt, images, voters FROM groups WHERE id = ?"
        prompt, images, voters = db.execute(query, (number,)).fetchone()
        group = Group(number, prompt, json.loads(images), voters, {}, {})
        for comparison, shown, voter, image in db.execute(
            "SELECT comparisons.id, images, voter, image FROM comparisons"
            " LEFT JOIN votes ON comparison = comparisons.id WHERE group_id = ? ORDER BY comparisons.id, votes.id",
            (number,),
        ):
            group.comparisons[comparison] = json.loads(shown)
            group.votes.setdefault(comparison, {}).update({} if voter is None else {voter: image})
        groups.append(group)
    return groups


def choice_scores(choices: Sequence[tuple[int, Sequence[int]]], size: int, prior_std: float = PRIOR_STD) -> Tensor:
    r"""Return the scores under which the choices are most likely, ``(size,)``, float64, in logits.

    The probability of choosing item w from a set S is ``exp(s_w) / sum_{j in S} exp(s_j)``, which for two items is the
    model of Bradley and Terry. A normal prior keeps the scores finite if an item always wins or is never shown, and
    makes their mean 0.

    Args:
        choices: The chosen item and the items it was chosen from, itself included, by number.
        size: Number of items.
        prior_std: Standard deviation of the prior, in logits.

    Source:
        Bradley and Terry, Biometrika 39 (1952); Luce, Individual Choice Behavior (1959).
    """
    from scipy.optimize import root  # importing it takes 0.5 s
    from scipy.special import softmax

    hidden = np.full((len(choices), size), -np.inf)
    wins = np.zeros(size)
    for row, (chosen, shown) in enumerate(choices):
        hidden[row, list(shown)] = 0
        wins[chosen] += 1

    def slope(scores: Numbers) -> Numbers:
        return softmax(scores + hidden, axis=1).sum(0) - wins + scores / prior_std**2

    def curvature(scores: Numbers) -> Numbers:
        chances = softmax(scores + hidden, axis=1)
        return np.diag(chances.sum(0) + 1 / prior_std**2) - chances.T @ chances

    return torch.from_numpy(root(slope, np.zeros(size), jac=curvature, tol=TOLERANCE).x)
