"""A reward from people, who choose the best of several images on the page of ``lightning vote``."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.gather import rank_and_world_size
from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.ranges import PositiveFloat, PositiveInt, Range, checked
from lit_vgrpo.errors import counted, say
from lit_vgrpo.rewards.base import Reward, RewardError, RewardOutage
from lit_vgrpo.rewards.png import encode_png
from lit_vgrpo.rewards.vote_groups import Demand, Progress
from lit_vgrpo.rewards.vote_store import FILE_NAME, VoteStore, VoteStoreError
from lit_vgrpo.system.signals import is_stop_requested

WhenLate = Literal["wait", "continue", "stop"]
POLL_S = 0.25


@checked
class VoteReward(Reward):
    """Scores from people: the strengths, within the images of one prompt, that explain their choices best.

    The images of an iteration are shown on the page of ``lightning vote RUN``, a few of one prompt at a time; a voter
    chooses the best, or skips. Votes are kept in ``votes.sqlite3`` in the run folder, by the images' pixels: a resumed
    run that samples the same images again has their votes. Held-out images are never shown to people; set
    ``model.heldout_reward`` for those.

    Args:
        images_per_vote: images shown at a time, 2 to 4.
        votes_per_group: comparisons of a group, each of the images shown least and closest in score; null for the
            fewest that connect all images of the group.
        voters: people who answer each comparison; their agreement is logged.
        timeout_s: seconds to wait for the votes of an iteration; null for no limit.
        when_late: after ``timeout_s``, ``wait`` on and say so, ``continue`` with the votes that were given (a group
            without any gets equal scores, and no gradient), or ``stop`` the run.
        keep_images: keep the images in ``votes.sqlite3`` after their iteration; votes are always kept.
        folder: folder of ``votes.sqlite3``; null for the run folder.
        name: key of the score.

    Raises:
        ValueError: a setting is unknown, or without effect.

    Source:
        The scores: Bradley and Terry, Biometrika 39 (1952).
    """

    asks_people = True

    def __init__(
        self,
        images_per_vote: Annotated[int, Range(2, 4)] = 4,
        votes_per_group: PositiveInt | None = None,
        voters: PositiveInt = 1,
        timeout_s: PositiveFloat | None = None,
        when_late: WhenLate = "wait",
        keep_images: bool = False,
        folder: str | None = None,
        name: str = "votes",
    ) -> None:
        if when_late != "wait" and timeout_s is None:
            raise ValueError(f"when_late={when_late} has no effect without a time limit. Set timeout_s to seconds.")
        self.demand = Demand(images_per_vote, votes_per_group, voters)
        self.timeout_s = timeout_s
        self.when_late = when_late
        self.keep_images = keep_images
        self.name = name
        self.folder = None if folder is None else Path(folder).expanduser()
        self._store: VoteStore | None = None
        self._is_closed = threading.Event()
        self._counts: Counter[str] = Counter()
        self._was_announced = False

    def enter_run(self, folder: Path) -> None:
        """Open the votes of a run.

        Raises:
            RewardOutage: they cannot be read or written.
        """
        self.folder = self.folder or folder
        self._open()

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        """Ask people and wait for their votes; images of the same prompt are compared.

        Raises:
            RewardOutage: the votes did not come in time, or cannot be stored.
        """
        store = self._open()
        ids, groups = _groups(to_uint8(images), prompts)
        rank, num_ranks = rank_and_world_size()
        try:
            numbers = store.publish(list(groups.values()), self.demand, rank, num_ranks)
            self._wait(store, speaks=rank == 0)
            self._count(store.progress(numbers), rank)
            scores = dict(zip(groups, store.scores(numbers), strict=True))
            store.close(numbers, self.keep_images)
        except VoteStoreError as error:
            raise RewardOutage(str(error)) from error
        return torch.tensor([scores[prompt][image] for prompt, image in zip(prompts, ids, strict=True)])

    def take_counts(self) -> dict[str, int]:
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """End the waiting in another thread."""
        self._is_closed.set()

    def _open(self) -> VoteStore:
        if self.folder is None:
            raise RewardError("VoteReward asks people about the images of a run. Start one: lightning vote RECIPE")
        if self._store is None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._store = VoteStore(self.folder / FILE_NAME)
            except (VoteStoreError, OSError) as error:
                raise RewardOutage(str(error)) from error
        return self._store

    def _wait(self, store: VoteStore, speaks: bool) -> None:
        """Wait until there are enough votes on the images of all ranks, or the time limit says so.

        A rank that went on alone would time out in the next collective while people vote on the others' images.
        """
        self._is_closed.clear()
        asked = time.monotonic()
        while (progress := store.progress()).given < progress.needed:
            left = progress.needed - progress.given
            page = f"The page to vote: lightning vote {store.path.parent}"
            if speaks and not self._was_announced:
                say(f"Waiting for {counted(left, 'vote')} on {store.path}. {page}")
                self._was_announced = True
            if self.timeout_s is not None and time.monotonic() - asked > self.timeout_s:
                missing = f"{left} of {progress.needed} votes are missing after {self.timeout_s:g} s"
                if self.when_late == "stop":
                    raise RewardOutage(f"{missing}. Vote, then resume the run: the votes given so far are kept.")
                if self.when_late == "continue":
                    return
                if speaks:
                    say(f"{missing}. {page}", error=True)
                asked = time.monotonic()
            if self._is_closed.wait(POLL_S) or is_stop_requested():
                raise KeyboardInterrupt  # people may take hours: the run is saved as it is, and asks again

    def _count(self, progress: Progress, rank: int) -> None:
        if progress.given < progress.needed:
            self._counts["late"] += progress.needed - progress.given
        self._counts["given"] += progress.given
        self._counts["skipped"] += progress.skipped
        self._counts["voters"] += progress.voters if rank == 0 else 0  # the same people on every rank
        if progress.compared:
            self._counts["agreements"] += progress.same
            self._counts["disagreements"] += progress.compared - progress.same


def _groups(images: Tensor, prompts: list[str]) -> tuple[list[str], dict[str, tuple[str, str, dict[str, bytes]]]]:
    """Return each image's id and, by prompt, the group's key, prompt and images as PNG files.

    Args:
        images: shape ``(B, 3, H, W)``, uint8.
    """
    ids = [_hash(str(tuple(image.shape)).encode(), image.cpu().numpy().tobytes()) for image in images]
    files: dict[str, dict[str, bytes]] = {prompt: {} for prompt in prompts}
    for image, own, prompt in zip(images, ids, prompts, strict=True):
        if own not in files[prompt]:
            files[prompt][own] = encode_png(image)
    keys = {prompt: _hash(prompt.encode(), *(own.encode() for own in sorted(files[prompt]))) for prompt in files}
    return ids, {prompt: (keys[prompt], prompt, files[prompt]) for prompt in files}


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:32]
