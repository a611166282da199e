"""Votes of people on images, in an SQLite file that a run and the voting page share."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lit_vgrpo.errors import one_line
from lit_vgrpo.rewards.vote_groups import Comparison, Demand, Group, Progress, progress_of

FILE_NAME = "votes.sqlite3"
APPLICATION, VERSION = 0x4C56_4F54, 1
BUSY_S = 30.0
"""Patience with another process that is writing."""
_TABLES = (
    "CREATE TABLE images (id TEXT PRIMARY KEY, png BLOB)",
    "CREATE TABLE groups (id INTEGER PRIMARY KEY, key TEXT UNIQUE, prompt TEXT, owner INTEGER, is_open INTEGER,"
    " shown INTEGER, votes INTEGER, voters INTEGER)",
    "CREATE TABLE members (group_id INTEGER REFERENCES groups, image TEXT REFERENCES images,"
    " PRIMARY KEY (group_id, image))",
    "CREATE TABLE comparisons (id INTEGER PRIMARY KEY, group_id INTEGER REFERENCES groups, images TEXT)",
    "CREATE TABLE votes (id INTEGER PRIMARY KEY AUTOINCREMENT, comparison INTEGER REFERENCES comparisons, voter TEXT,"
    " image TEXT, time REAL, UNIQUE (comparison, voter))",
    "CREATE INDEX open_groups ON groups (is_open)",
    "CREATE INDEX group_comparisons ON comparisons (group_id)",
)


class VoteStoreError(RuntimeError):
    """The file cannot be used, with the reason in one line."""


class VoteRefused(ValueError):
    """A vote that cannot be stored or taken back, with the reason in one line."""


class VoteStore:
    """The votes of a run. Every call is a transaction of its own, on disk when it returns.

    Any number of processes and threads may use one file.

    Args:
        path: the file; created if it is missing.

    Raises:
        VoteStoreError: the file is damaged, of another version, or cannot be written. So does every other call.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._transaction() as db:
            application, version = (
                db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
            )
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                for table in _TABLES:
                    db.execute(table)
                db.execute(f"PRAGMA application_id = {APPLICATION}")
                db.execute(f"PRAGMA user_version = {VERSION}")
            elif application != APPLICATION:
                raise VoteStoreError(f"{path} is not a file of votes. Move it away, and votes start anew.")
            elif version != VERSION:
                raise VoteStoreError(
                    f"{path} has version {version} of votes, and this lit-vgrpo reads version {VERSION}. "
                    "Use the lit-vgrpo that wrote it, or move it away to start anew."
                )
            elif (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise self._damage(found)

    # --- the run ---------------------------------------------------------------------------------------------------

    def publish(
        self,
        groups: Sequence[tuple[str, str, Mapping[str, bytes]]],
        demand: Demand,
        owner: int = 0,
        num_owners: int = 1,
    ) -> list[int]:
        """Open groups for voting, and close the others of this owner; votes on the same images are kept.

        Args:
            groups: of each group a key, the prompt, and its images as PNG files by their ids.
            demand: the votes that each needs.
            owner: the rank that asks.
            num_owners: number of ranks; groups of further ones, from an earlier part of the run, are closed.

        Returns:
            The groups' numbers.
        """
        numbers = []
        with self._transaction() as db:
            db.execute("UPDATE groups SET is_open = 0 WHERE owner = ? OR owner >= ?", (owner, num_owners))
            for key, prompt, images in groups:
                settings = (
                    owner,
                    min(demand.images_per_vote, len(images)),
                    demand.of_group(len(images)),
                    demand.voters,
                )
                db.execute(
                    "INSERT INTO groups (key, prompt, is_open, owner, shown, votes, voters)"
                    " VALUES (?, ?, 1, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET is_open = 1, owner = excluded.owner,"
                    " shown = excluded.shown, votes = excluded.votes, voters = excluded.voters",
                    (key, prompt, *settings),
                )
                number = int(db.execute("SELECT id FROM groups WHERE key = ?", (key,)).fetchone()[0])
                for image, png in images.items():
                    db.execute(
                        "INSERT INTO images VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET png = excluded.png",
                        (image, png),
                    )
                    db.execute("INSERT OR IGNORE INTO members VALUES (?, ?)", (number, image))
                numbers.append(number)
        return numbers

    def scores(self, numbers: Sequence[int]) -> list[dict[str, float]]:
        """Return the scores of each group's images by their ids."""
        with self._transaction() as db:
            groups = {group.id: group for group in _read_groups(db, numbers)}
        return [groups[number].scores() for number in numbers]

    def close(self, numbers: Sequence[int], keep_images: bool) -> None:
        """End the voting on groups.

        Args:
            keep_images: leave their images in the file; votes always stay.
        """
        with self._transaction() as db:
            for number in numbers:
                db.execute("UPDATE groups SET is_open = 0 WHERE id = ?", (number,))
                if not keep_images:
                    db.execute(
                        "UPDATE images SET png = NULL WHERE id IN (SELECT image FROM members WHERE group_id = ?)",
                        (number,),
                    )

    def progress(self, numbers: Sequence[int] | None = None) -> Progress:
        """Return the progress of some groups, by default of all that are open."""
        with self._transaction() as db:
            return progress_of(_read_groups(db, numbers))

    # --- the page --------------------------------------------------------------------------------------------------

    def next_comparison(self, voter: str, busy: Collection[int] = ()) -> Comparison | None:
        """Return what a voter is to compare next, or ``None``.

        Groups with the fewest votes come first.

        Args:
            busy: comparisons that others look at just now; the voter gets one of them only if there are no others.
        """
        with self._transaction() as db:
            groups = [group for group in _read_groups(db) if group.given < group.needed * group.voters]
            groups.sort(key=lambda group: (group.given, group.id))
            for passed_over in (busy, ()):
                for group in groups:
                    for number, images in group.comparisons.items():
                        own = group.votes[number]
                        if len(own) < group.voters and voter not in own and number not in passed_over:
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
                raise VoteRefused("This vote is for images that do not exist. It was not stored.")
            before = db.execute(
                "SELECT image FROM votes WHERE comparison = ? AND voter = ?", (number, voter)
            ).fetchone()
            if before is not None:
                if before[0] != image:
                    raise VoteRefused("You have voted on these images already. Undo that vote first.")
                return
            if not found[1]:
                raise VoteRefused("Voting on these images has ended. The vote was not stored.")
            db.execute(
                "INSERT INTO votes (comparison, voter, image, time) VALUES (?, ?, ?, ?)",
                (number, voter, image, time.time()),
            )

    def undo(self, voter: str) -> Comparison:
        """Take back a voter's last vote and return what it was about.

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
            if last is None:
                raise VoteRefused("There is no vote to undo.")
            if not last[4]:
                raise VoteRefused("The last vote cannot be undone: training has used it.")
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
            db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
            try:
                db.execute("BEGIN IMMEDIATE")
                try:
                    yield db
                except BaseException:
                    db.execute("ROLLBACK")
                    raise
                db.execute("COMMIT")
            finally:
                db.close()
        except sqlite3.OperationalError as error:
            raise VoteStoreError(
                f"{self.path} cannot be used: {one_line(error)}. Check the disk and the folder."
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._damage(error) from error

    def _damage(self, reason: object) -> VoteStoreError:
        advice = "Move it away to start anew; sqlite3's .recover may save its votes"
        return VoteStoreError(f"{self.path} is damaged: {one_line(reason)}. {advice}.")


def _read_groups(db: sqlite3.Connection, numbers: Sequence[int] | None = None) -> list[Group]:
    """Return groups by number, by default those that are open, with their comparisons in the order they were made."""
    if numbers is None:
        numbers = [row[0] for row in db.execute("SELECT id FROM groups WHERE is_open ORDER BY id")]
    return [_read_group(db, number) for number in numbers]


def _read_group(db: sqlite3.Connection, number: int) -> Group:
    row = db.execute("SELECT prompt, shown, votes, voters FROM groups WHERE id = ?", (number,)).fetchone()
    prompt, shown, needed, voters = row
    images = [row[0] for row in db.execute("SELECT image FROM members WHERE group_id = ? ORDER BY image", (number,))]
    made = db.execute("SELECT id, images FROM comparisons WHERE group_id = ? ORDER BY id", (number,))
    comparisons = {own: json.loads(text) for own, text in made}
    votes: dict[int, dict[str, str | None]] = {own: {} for own in comparisons}
    cast = db.execute(
        "SELECT comparison, voter, votes.image FROM votes JOIN comparisons ON comparisons.id = comparison"
        " WHERE group_id = ? ORDER BY votes.id",
        (number,),
    )
    for own, voter, image in cast:
        votes[own][voter] = image
    return Group(number, prompt, shown, needed, voters, images, comparisons, votes)
