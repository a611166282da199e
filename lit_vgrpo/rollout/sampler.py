"""Samples the images of an iteration, one forward batch at a time."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from lit_vgrpo.core.batches import at_most
from lit_vgrpo.core.records import PassLedger, timed
from lit_vgrpo.core.types import Rollout
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.system.process import bar


class Sampler:
    """Samples the images of an iteration with an objective's rollout.

    Args:
        ledger: Counts the forward passes, under ``rollout``.
        batch_size: Images per forward pass; ``None`` samples all at once.

    Attributes:
        seconds: Wall time of the iteration by phase, without other work between two batches.
    """

    def __init__(
        self, policy: Policy, objective: Objective, ledger: PassLedger, seed: int = 0, batch_size: int | None = None
    ) -> None:
        self.policy, self.objective, self.ledger = policy, objective, ledger
        self.seed, self.batch_size = seed, batch_size
        self.seconds: dict[str, float] = {}

    def batches(self, batch: PromptBatch) -> Generator[Rollout, None, None]:
        """Yield this rank's images of an iteration; close the iterator if it is not exhausted."""
        self.seconds = {}
        request = batch.request(self.seed, at_most(batch.images, self.batch_size))
        rollout, total = self.objective.rollout_batches(self.policy, request), len(batch.slots) * len(batch.members)
        with closing(rollout) as drawn, bar("Rollout", total=total, is_brief=True) as done:
            while True:
                with self.ledger.phase("rollout"), timed(self.seconds, "rollout"):
                    images = next(drawn, None)
                if images is None:
                    return
                done.update(len(images))
                yield images
