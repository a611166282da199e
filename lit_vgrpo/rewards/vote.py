"""A reward from people, who choose the best of several images on the page of ``lightning vote``."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from lit_vgrpo.core.gather import rank_and_world_size
from lit_vgrpo.core.pictures import PICTURE
from lit_vgrpo.core.pixels import encode_png, to_uint8
from lit_vgrpo.core.ranges import PositiveInt, Range, checked
from lit_vgrpo.errors import counted, say, shell_line
from lit_vgrpo.rewards.base import Reward, RewardError, RewardOutage
from lit_vgrpo.rewards.vote_store import FILE_NAME, Progress, VoteStore, VoteStoreError
from lit_vgrpo.system.process import bar
from lit_vgrpo.system.signals import is_stop_requested, waiting_for

POLL_S = 0.25
VOTE_S = 5
"""Time that a person takes for a vote. A choice, not a measurement."""
REMINDER_S = 60.0
"""Time after which a wait is reported again, then after twice as long, and so on."""


@checked
class VoteReward(Reward):
    """Scores from people: the strengths of one prompt's images that best explain their choices.

    The images of an iteration are shown on the page of ``lightning vote RUN``, a few of one prompt at a time, in the
    fewest comparisons that connect all images of the prompt; a voter chooses the best, or skips. Votes are kept in
    ``votes.sqlite3`` in the run folder, by the images' content: a resumed run that samples the same images again has
    their votes. Held-out images are never shown to people; set ``model.untrained_reward`` for those.

    Args:
        images_per_vote: Images shown at a time, 2 to 4.
        voters: People who answer each comparison, told apart by the names they type, which nobody checks.
        name: Key of the score.

    Source:
        The scores: Bradley and Terry, Biometrika 39 (1952).
    """

    compares = True

    def __init__(
        self,
        images_per_vote: Annotated[int, Range(2, 4)] = 4,
        voters: PositiveInt = 1,
        name: str = "votes",
    ) -> None:
        self.images_per_vote = images_per_vote
        self.voters = voters
        self.name = name
        self._store: VoteStore | None = None
        self._is_closed = threading.Event()
        self._counts: dict[str, float] = {}
        self._was_announced = False
        self.page: str | None = None  # its address, if the command that trains also serves it

    def enter_run(self, folder: Path) -> None:
        """Open the votes of a run; raise RewardOutage if that fails."""
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._store = VoteStore(folder / FILE_NAME)
        except VoteStoreError as error:
            raise RewardOutage(str(error)) from error

    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        """Ask people and wait for their votes; raise RewardOutage if they cannot be stored."""
        if self._store is None:
            raise RewardError("VoteReward asks people about the images of a run. Start one: lightning vote RECIPE")
        files = [encode_png(image) for image in to_uint8(images).cpu()]
        ids = [sha256(data).hexdigest()[:32] for data in files]
        keys = [(prompt, str(row.get(PICTURE))) for prompt, row in zip(prompts, rows, strict=True)]
        groups: dict[tuple[str, str], dict[str, bytes]] = {key: {} for key in keys}
        for key, image, data in zip(keys, ids, files, strict=True):
            groups[key][image] = data
        asked = [(prompt, pictures) for (prompt, _), pictures in groups.items()]
        rank, num_ranks = rank_and_world_size()
        try:
            numbers = self._store.publish(asked, self.images_per_vote, self.voters, rank, num_ranks)
            with waiting_for("the votes"):
                progress = self._wait(self._store, numbers, announces=rank == 0)
            scores = self._store.scores(numbers)
        except VoteStoreError as error:
            raise RewardOutage(str(error)) from error
        self._counts = {"given": progress.given, "skipped": progress.skipped}
        scores_by_group = dict(zip(groups, scores, strict=True))
        return torch.tensor([scores_by_group[key][image] for key, image in zip(keys, ids, strict=True)])

    def take_counts(self) -> dict[str, float]:
        counts, self._counts = self._counts, {}
        return counts

    def close(self) -> None:
        """End a wait in another thread."""
        self._is_closed.set()

    def _wait(self, store: VoteStore, numbers: list[int], announces: bool) -> Progress:
        """Wait until there are enough votes on the images of all ranks, and close the groups of this one.

        A rank that continued alone would time out in the next collective while people vote on the others' images.
        """
        self._is_closed.clear()
        started, reminder_s = time.monotonic(), REMINDER_S
        where = f". Open the voting page: {shell_line('lightning', 'vote', store.path.parent)}"
        where = where if self.page is None else f" at {self.page}"
        with bar("Votes", total=0, is_brief=True) if announces else nullcontext() as shown:
            while (given := store.close(numbers)) is None:
                if shown is not None:
                    progress = store.progress()
                    shown.n, shown.total = progress.given, progress.needed
                    shown.refresh()
                    needed = progress.needed - progress.given
                    time_s = needed * VOTE_S
                    about = f"{time_s} s" if time_s < 120 else f"{time_s / 60:.0f} min"
                    left = f"{counted(needed, 'vote')} (about {about} at {VOTE_S} s per vote)"
                    if not self._was_announced:
                        say(f"Waiting for {left}{where}")
                        self._was_announced = True
                    elif time.monotonic() - started > reminder_s:
                        say(f"Still waiting for {left}{where}")
                        reminder_s *= 2
                if self._is_closed.wait(POLL_S) or is_stop_requested():
                    raise KeyboardInterrupt  # people may take hours: save the run and ask again on resume
            return given
