"""Samples the images of an iteration, one forward batch at a time."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Protocol

from lit_vgrpo.core.batches import at_most
from lit_vgrpo.core.records import PassLedger, timed
from lit_vgrpo.core.types import Rollout, RolloutRequest, RolloutSpec
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import Scores


class ImageSampler(Protocol):
    """Sampler of an iteration's images: :class:`Sampler`, or a wrapper of it that chooses them."""

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time of the iteration by phase, without other work between two batches."""

    def batches(self, batch: PromptBatch) -> Generator[Rollout, None, None]:
        """Yield this rank's images of an iteration; close the iterator if it is not exhausted."""

    def metrics(self, rollout: Rollout, scores: Scores) -> dict[str, float]:
        """Return metrics of the choice of the images, given the scores of all ranks' images."""


class Sampler:
    """Samples the images of an iteration with an objective's rollout.

    Args:
        ledger: Counts the forward passes, under ``rollout``.
        seed: The run's seed.
        batch_size: Images per forward pass; ``None`` samples all at once.
    """

    def __init__(
        self, policy: Policy, objective: Objective, ledger: PassLedger, seed: int = 0, batch_size: int | None = None
    ) -> None:
        self.policy, self.objective, self.ledger = policy, objective, ledger
        self.seed, self.batch_size = seed, batch_size
        self.seconds: dict[str, float] = {}

    def request(self, batch: PromptBatch, factor: int = 1) -> RolloutRequest:
        """Return the request for this rank's images, ``factor`` times as many per group."""
        request = batch.request(self.seed, at_most(batch.images * factor, self.batch_size))
        return request if factor == 1 else request.of_scouts(factor)

    def reset(self) -> None:
        """Reset the times at the start of an iteration."""
        self.seconds = {}

    def batches(self, batch: PromptBatch) -> Generator[Rollout, None, None]:
        self.reset()
        yield from self.draw(self.request(batch))

    def draw(
        self, request: RolloutRequest, spec: RolloutSpec | None = None, phase: str = "rollout"
    ) -> Generator[Rollout, None, None]:
        """Yield the images of a request, counting passes and time under ``phase``."""
        with closing(self.objective.rollout_batches(self.policy, request, spec)) as drawn:
            while True:
                with self.ledger.phase(phase), timed(self.seconds, phase):
                    images = next(drawn, None)
                if images is None:
                    return
                yield images

    def metrics(self, rollout: Rollout, scores: Scores) -> dict[str, float]:
        return {}
