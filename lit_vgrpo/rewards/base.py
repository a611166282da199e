"""The base class of rewards, and their errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from lit_vgrpo.errors import RewardError


class RewardOutage(RewardError):
    """A reward that can score nothing any more. It ends the run; other errors only fail their images."""


class Reward(ABC):
    """Scores images. Construction is cheap and loads nothing; no trainer is needed.

    A subclass sets ``name`` and defines ``__call__``.

    Attributes:
        name: key of its score in the logs.
        concurrent: call it in a thread while the next images are sampled, because it waits for a server or computes on
            the CPU. It is then only called from that thread, batch after batch.
        asks_people: it compares images of a group, and a call may take hours. It is called once per rollout with all of
            a rank's images, and never for held-out images.
        failure: one line on why images of the last call got NaN, if the reward knows.
        key: the reward's key in a recipe, such as ``model.reward``; empty if options are typed without a prefix.
    """

    name: str
    weight_files: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Arguments that name weights, each with a file found there: the weights, or one file of the folder."""
    concurrent: bool = False
    asks_people: bool = False
    failure: str | None = None
    key: str | None = None

    def option(self, name: str) -> str:
        """Return an option's name for messages: the key to type, or the class's attribute outside recipes."""
        return name if self.key == "" else f"{self.key or type(self).__name__}.{name}"

    def found_at(self, key: str) -> Reward:
        """Set the reward's key in the recipe, for its messages."""
        self.key = key
        return self

    @abstractmethod
    def __call__(self, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]) -> Tensor:
        """Score a batch, loading what is needed first.

        A reward with a fourth argument ``references`` gets the pictures that the prompts edit, ``(B, 3, H, W)``,
        float32 in [0, 1], or ``None`` if the rows have none.

        Args:
            images: shape ``(B, 3, H, W)``, float32 in [0, 1].
            prompts: the B prompts.
            rows: the prompts' B rows with their extra fields.

        Returns:
            Shape ``(B,)``, float32, higher is better; NaN marks an image that could not be scored.
        """

    @property
    def takes_references(self) -> bool:
        """True if it is called with the pictures that the prompts edit."""
        return "references" in signature(type(self).__call__).parameters

    def check(self) -> list[str]:
        """Return errors that can be found without loading weights, one line each."""
        return []

    def prompt_error(self, prompt: str, row: dict[str, Any]) -> str | None:
        """Return why no image of this prompt can be scored, or None; called for every prompt before loading."""
        return None

    def load(self) -> None:
        """Load the weights, if any; a second call does nothing."""
        return None

    def enter_run(self, folder: Path) -> None:  # noqa: B027
        """Open what is kept in a run folder; called on every rank before training."""

    def take_counts(self) -> dict[str, int]:
        """Return counts of events since the last call, such as retries by cause."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Cancel pending work and close connections; a later call may reopen them."""
