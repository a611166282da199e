"""A reward from people, who choose the best of several images on the page of ``lightning vote``."""

from __future__ import annotations

import threading
import time
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.gather import rank_and_world_size
from lit_vgrpo.core.pixels import to_uint8
from lit_vgrpo.core.ranges import PositiveFloat, PositiveInt, Range, checked
from lit_vgrpo.errors import counted, say
from lit_vgrpo.rewards.base import Reward, RewardError, RewardOutage
from lit_vgrpo.rewards.protocol import encode_png
from lit_vgrpo.rewards.vote_store import FILE_NAME, VoteStore, VoteStoreError
from lit_vgrpo.system.signals import is_stop_requested

WhenLate = Literal["continue", "stop"]
POLL_S = 0.25


@checked
class VoteReward(Reward):
    """Scores from people: the strengths, within the images of one prompt, that explain their choices best.

    The images of an iteration are shown on the page of ``lightning vote RUN``, a few of one prompt at a time, in the
    fewest comparisons that connect all images of the prompt; a voter chooses the best, or skips. Votes are kept in
    ``votes.sqlite3`` in the run folder, by the images' content: a resumed run that samples the same images again has
    their votes. Held-out images are never shown to people; set ``model.heldout_reward`` for those.

    Args:
        images_per_vote: images shown at a time, 2 to 4.
        voters: people who answer each comparison.
        timeout_s: seconds to wait for the votes of an iteration; null for no limit.
        when_late: after ``timeout_s``, ``stop`` the run, or ``continue`` with the votes that were given: a group
            without any gets equal scores, and no gradient.
        name: key of the score.

    Raises:
        ValueError: a setting is outside its range.

    Source:
        The scores: Bradley and Terry, Biometrika 39 (1952).
    """

    asks_people = True

    def __init__(
        self,
        images_per_vote: Annotated[int, Range(2, 4)] = 4,
        voters: PositiveInt = 1,
        timeout_s: PositiveFloat | None = None,
        when_late: WhenLate = "stop",
        name: str = "votes",
    ) -> None:
        self.images_per_vote = images_per_vote
        self.voters = voters
        self.timeout_s = timeout_s
        self.when_late = when_late
        self.name = name
        self._store: VoteStore | None = None
        self._is_closed = threading.Event()
        self._counts: dict[str, int] = {}
        self._was_announced = False

    def enter_run(self, folder: Path) -> None:
        """Open the votes of a run.

        Raises:
            RewardOutage: they cannot be read or written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._store = VoteStore(folder / FILE_NAME)
        except (VoteStoreError, OSError) as error:
            raise RewardOutage(str(error)) from error

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        """Ask people and wait for their votes; images of the same prompt are compared.

        Raises:
            RewardError: there is no run.
            RewardOutage: the votes did not come in time, or cannot be stored.
        """
        if self._store is None:
            raise RewardError("VoteReward asks people about the images of a run. Start one: lightning vote RECIPE")
        files = [encode_png(image) for image in to_uint8(images).cpu()]
        ids = [sha256(data).hexdigest()[:32] for data in files]
        groups: dict[str, dict[str, bytes]] = {prompt: {} for prompt in prompts}
        for prompt, image, data in zip(prompts, ids, files, strict=True):
            groups[prompt][image] = data
        keyed = [
            (sha256("\n".join([prompt, *sorted(group)]).encode()).hexdigest(), prompt, group)
            for prompt, group in groups.items()
        ]
        rank, num_ranks = rank_and_world_size()
        try:
            numbers = self._store.publish(keyed, self.images_per_vote, self.voters, rank, num_ranks)
            self._wait(self._store, speaks=rank == 0)
            progress = self._store.progress(numbers)
            scores = dict(zip(groups, self._store.scores(numbers), strict=True))
            self._store.close(numbers)
        except VoteStoreError as error:
            raise RewardOutage(str(error)) from error
        voters = progress.voters if rank == 0 else 0  # the same people on every rank
        self._counts = {"given": progress.given, "skipped": progress.skipped, "voters": voters}
        if progress.given < progress.needed:
            self._counts["late"] = progress.needed - progress.given
        return torch.tensor([scores[prompt][image] for prompt, image in zip(prompts, ids, strict=True)])

    def take_counts(self) -> dict[str, int]:
        counts, self._counts = self._counts, {}
        return counts

    def close(self) -> None:
        """End the waiting in another thread."""
        self._is_closed.set()

    def _wait(self, store: VoteStore, speaks: bool) -> None:
        """Wait until there are enough votes on the images of all ranks, or until the time limit.

        A rank that continued alone would time out in the next collective while people vote on the others' images.
        """
        self._is_closed.clear()
        start = time.monotonic()
        while (progress := store.progress()).given < progress.needed:
            left = progress.needed - progress.given
            if speaks and not self._was_announced:
                page = f"The page to vote: lightning vote {store.path.parent}"
                say(f"Waiting for {counted(left, 'vote')} on {store.path}. {page}")
                self._was_announced = True
            if self.timeout_s is not None and time.monotonic() - start > self.timeout_s:
                if self.when_late == "continue":
                    return
                missing = f"{left} of {progress.needed} votes are missing after {self.timeout_s:g} s"
                raise RewardOutage(f"{missing}. Vote, then resume the run: the votes given so far are kept.")
            if self._is_closed.wait(POLL_S) or is_stop_requested():
                raise KeyboardInterrupt  # people may take hours: the run is saved as it is, and asks again
