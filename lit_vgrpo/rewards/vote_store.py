"""Votes of people on images, in an SQLite file that a run and the voting page share."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.vote_groups import Comparison, Group, Progress, progress_of

FILE_NAME = "votes.sqlite3"
BUSY_S = 30.0
"""Patience with another process that is writing."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS images (id TEXT PRIMARY KEY, png BLOB)",
    "CREATE TABLE IF NOT EXISTS groups (id INTEGER PRIMARY KEY, key TEXT UNIQUE, prompt TEXT, owner INTEGER,"
    " is_open INTEGER, shown INTEGER, voters INTEGER)",
    "CREATE TABLE IF NOT EXISTS members (group_id INTEGER, image TEXT, PRIMARY KEY (group_id, image))",
    "CREATE TABLE IF NOT EXISTS comparisons (id INTEGER PRIMARY KEY, group_id INTEGER, images TEXT)",
    "CREATE TABLE IF NOT EXISTS votes (id INTEGER PRIMARY KEY AUTOINCREMENT, comparison INTEGER, voter TEXT,"
    " image TEXT, time REAL, UNIQUE (comparison, voter))",
    "CREATE INDEX IF NOT EXISTS open_groups ON groups (is_open)",
    "CREATE INDEX IF NOT EXISTS group_comparisons ON comparisons (group_id)",
)


class VoteStoreError(RuntimeError):
    """The file cannot be used, with the reason in one line."""


class VoteRefused(ValueError):
    """A vote that cannot be stored or undone, with the reason in one line."""


class VoteStore:
    """The votes of a run. Each call is one transaction, on disk when it returns.

    Any number of processes and threads may use one file.

    Args:
        path: the file; created if it is missing.

    Raises:
        VoteStoreError: the file is damaged or cannot be written. So does every other call.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._transaction() as db:
            for table in _TABLES:
                db.execute(table)

    def publish(
        self,
        groups: Sequence[tuple[str, str, Mapping[str, bytes]]],
        images_per_vote: int = 4,
        voters: int = 1,
        owner: int = 0,
        num_owners: int = 1,
    ) -> list[int]:
        """Open groups for voting, and close the others of this owner; votes on the same images are kept.

        Args:
            groups: of each group a key, the prompt, and its images as PNG files by their ids.
            images_per_vote: images of a comparison.
            voters: people who answer each comparison.
            owner: the rank that asks.
            num_owners: number of ranks; groups of further ones, from an earlier part of the run, are closed.

        Returns:
            The groups' numbers.
        """
        numbers = []
        with self._transaction() as db:
            db.execute("UPDATE groups SET is_open = 0 WHERE owner = ? OR owner >= ?", (owner, num_owners))
            for key, prompt, images in groups:
                db.execute(
                    "INSERT INTO groups (key, prompt, is_open, owner, shown, voters) VALUES (?, ?, 1, ?, ?, ?)"
                    " ON CONFLICT (key) DO UPDATE SET is_open = 1, owner = excluded.owner, shown = excluded.shown,"
                    " voters = excluded.voters",
                    (key, prompt, owner, min(images_per_vote, len(images)), voters),
                )
                number = int(db.execute("SELECT id FROM groups WHERE key = ?", (key,)).fetchone()[0])
                db.executemany("INSERT OR REPLACE INTO images VALUES (?, ?)", images.items())
                db.executemany("INSERT OR IGNORE INTO members VALUES (?, ?)", [(number, image) for image in images])
                numbers.append(number)
        return numbers

    def scores(self, numbers: Sequence[int]) -> list[dict[str, float]]:
        """Return the scores of each group's images by their ids."""
        with self._transaction() as db:
            return [_read_group(db, number).scores() for number in numbers]

    def close(self, numbers: Sequence[int]) -> None:
        """End the voting on groups and delete their images; votes stay."""
        with self._transaction() as db:
            for number in numbers:
                db.execute("UPDATE groups SET is_open = 0 WHERE id = ?", (number,))
                members = "SELECT image FROM members WHERE group_id = ?"
                db.execute(f"UPDATE images SET png = NULL WHERE id IN ({members})", (number,))

    def progress(self, numbers: Sequence[int] | None = None) -> Progress:
        """Return the progress of some groups, by default of all that are open."""
        with self._transaction() as db:
            return progress_of(_open_groups(db) if numbers is None else [_read_group(db, n) for n in numbers])

    def next_comparison(self, voter: str) -> Comparison | None:
        """Return what a voter is to compare next, or ``None``.

        Groups with the fewest votes come first; among equals each voter has another order.
        """
        with self._transaction() as db:
            groups = [group for group in _open_groups(db) if group.given < group.needed * group.voters]
            groups.sort(key=lambda group: (group.given, Random(f"{voter}/{group.id}").random()))
            for group in groups:
                for number, images in group.comparisons.items():
                    if len(group.votes[number]) < group.voters and voter not in group.votes[number]:
                        return Comparison(number, group.prompt, images)
                if len(group.comparisons) < group.needed:
                    images = group.next_images()
                    added = db.execute(
                        "INSERT INTO comparisons (group_id, images) VALUES (?, ?)", (group.id, json.dumps(images))
                    )
                    return Comparison(int(added.lastrowid or 0), group.prompt, images)
        return None

    def vote(self, number: int, voter: str, image: str | None) -> None:
        """Store a vote; the same vote again does nothing.

        Args:
            number: the comparison.
            image: the best image; ``None`` for no preference.

        Raises:
            VoteRefused: there is no such comparison or image, the voting is over, or the voter has voted otherwise.
        """
        with self._transaction() as db:
            found = db.execute(
                "SELECT images, is_open FROM comparisons JOIN groups ON groups.id = group_id WHERE comparisons.id = ?",
                (number,),
            ).fetchone()
            if found is None or (image is not None and image not in json.loads(found[0])):
                raise VoteRefused("These images do not exist. The vote was not stored.")
            before = db.execute(
                "SELECT image FROM votes WHERE comparison = ? AND voter = ?", (number, voter)
            ).fetchone()
            if before == (image,):
                return
            if before is not None:
                raise VoteRefused("You have already voted on these images. Undo that vote first.")
            if not found[1]:
                raise VoteRefused("Voting on these images has ended. The vote was not stored.")
            db.execute(
                "INSERT INTO votes (comparison, voter, image, time) VALUES (?, ?, ?, ?)",
                (number, voter, image, time.time()),
            )

    def undo(self, voter: str) -> Comparison:
        """Delete a voter's last vote and return its comparison.

        Raises:
            VoteRefused: there is none, or the run has used it.
        """
        with self._transaction() as db:
            last = db.execute(
                "SELECT votes.id, comparisons.id, prompt, images, is_open FROM votes"
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
            found = db.execute("SELECT png FROM images WHERE id = ?", (image,)).fetchone()
        return None if found is None else found[0]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")
                with db:  # commits, or rolls back after an error
                    yield db
        except sqlite3.Error as error:
            advice = "Check the disk, or move the file aside to start over"
            raise VoteStoreError(f"{self.path} cannot be used: {one_line(error)}. {advice}.") from error


def _open_groups(db: sqlite3.Connection) -> list[Group]:
    numbers = db.execute("SELECT id FROM groups WHERE is_open ORDER BY id").fetchall()
    return [_read_group(db, number) for (number,) in numbers]


def _read_group(db: sqlite3.Connection, number: int) -> Group:
    row = db.execute("SELECT prompt, shown, voters FROM groups WHERE id = ?", (number,)).fetchone()
    prompt, shown, voters = row
    images = [row[0] for row in db.execute("SELECT image FROM members WHERE group_id = ? ORDER BY image", (number,))]
    made = db.execute("SELECT id, images FROM comparisons WHERE group_id = ? ORDER BY id", (number,))
    comparisons = {comparison: json.loads(text) for comparison, text in made}
    votes: dict[int, dict[str, str | None]] = {comparison: {} for comparison in comparisons}
    cast = db.execute(
        "SELECT comparison, voter, votes.image FROM votes JOIN comparisons ON comparisons.id = comparison"
        " WHERE group_id = ? ORDER BY votes.id",
        (number,),
    )
    for comparison, voter, image in cast:
        votes[comparison][voter] = image
    return Group(number, prompt, shown, voters, images, comparisons, votes)
