"""Scores of a rollout, and the comparison of an iteration's scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageAggregate, AdvantageStd, combined_advantages, no_spread_share
from lit_vgrpo.core.gather import objects_of_all_ranks
from lit_vgrpo.core.records import IterationRecord, timed
from lit_vgrpo.core.types import Rollout, RolloutRequest
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import RewardError, Scores, Weighted
from lit_vgrpo.rewards.queue import ScoreQueue
from lit_vgrpo.rollout.copying import CopyGuard


class RolloutScoring:
    """Samples images, and decodes and scores them batch by batch, so that all pixels never exist at once.

    A reward that runs in a thread works while the next batch is sampled.

    Args:
        policy: samples, and decodes the latents.
        queue: scores the images; ``None`` for a method without a reward.
        request: the images that this rank samples.
        all_ranks: concatenates every rank's ``(B, ...)`` in rank order; collective.

    Attributes:
        seconds: wall time by phase: ``rollout``, ``decode`` and ``reward``. Work of threads does not count.
        rollout: the sampled images, once there are any.
    """

    rollout: Rollout

    def __init__(
        self, policy: Policy, queue: ScoreQueue | None, request: RolloutRequest, all_ranks: Callable[[Tensor], Tensor]
    ) -> None:
        self.policy = policy
        self.queue = queue
        self.request = request
        self.all_ranks = all_ranks
        groups = request.layout()[0].tolist()
        self.prompts = [request.prompts[group] for group in groups]
        self.rows = [dict(request.rows[group]) for group in groups]
        self.copies = CopyGuard()
        self.seconds: dict[str, float] = {}

    def sample(self, draw: Callable[..., Rollout]) -> Rollout:
        """Sample the images by an objective's ``roll_out`` or ``send_scouts``."""
        if self.queue is None:
            with timed(self.seconds, "rollout"):
                self.rollout = draw(self.policy, self.request)
            return self.rollout
        with self.queue.closed_on_error(), timed(self.seconds, "rollout"):
            self.rollout = draw(self.policy, self.request, on_batch=self._score)
        self.seconds["rollout"] -= self.seconds["decode"] + self.seconds["reward"]
        return self.rollout

    def _score(self, part: slice, latents: Tensor) -> None:
        """Decode and score the latents ``(b, C, h, w)`` of the images ``part`` of the rollout."""
        assert self.queue is not None
        size = self.policy.decode_batch_size
        for start in range(0, len(latents), size):
            with timed(self.seconds, "decode"):
                images = self.policy.decode(latents[start : start + size])
            own = slice(part.start + start, part.start + start + len(images))
            with timed(self.seconds, "reward"):
                self.queue.put(images, self.prompts[own], self.rows[own])
                self.copies.add(images, self.rows[own])

    def scores(self) -> IterationScores:
        """Wait for all ranks' scores of what :meth:`sample` returned."""
        own = Scores.empty(len(self.rollout)) if self.queue is None else self._own(self.queue)
        return IterationScores.gathered(own, self.all_ranks(self.rollout.group_ids), self.all_ranks)

    def _own(self, queue: ScoreQueue) -> Scores:
        """Return this rank's scores in rollout order."""
        with queue.closed_on_error(), timed(self.seconds, "reward"):
            scores = queue.take()
        # Negative if the overhead of threads exceeded the overlap.
        self.seconds["reward_overlapped"] = sum(scores.seconds.values()) - self.seconds["reward"]
        return scores

    def record(self, scores: IterationScores, advantages: Tensor) -> IterationRecord:
        """Return the record of an iteration whose updates are still to come; see its attributes.

        Args:
            scores: those of all ranks' images.
            advantages: of all ranks' images, ``(B,)``.
        """
        edits = self.copies.scores(len(self.rows) // max(1, len(self.request.prompts)))
        return IterationRecord(
            iteration=self.rollout.iteration,
            rewards=scores.total,
            group_ids=scores.group_ids,
            parts=scores.metrics,
            errors=scores.errors,
            local_group_ids=self.rollout.group_ids,
            images=len(scores.total),
            seconds=self.seconds,
            has_advantage=self.queue is None or bool(advantages.any()),
            blocks_run=self.rollout.blocks_run,
            edits={name: self.all_ranks(values) for name, values in edits.items()},
        )


@dataclass
class IterationScores:
    """The scores of an iteration's images over all ranks, the same on every rank.

    Attributes:
        total: ``(B,)``, NaN where an image failed.
        group_ids: ``(B,)``.
        parts: by name, ``(B,)``.
        metrics: by name: ``mean``, ``std``, ``no_spread``, ``failed``, ``seconds_per_image`` and the reward's counts.
        errors: by name, the last failure.
    """

    total: Tensor
    group_ids: Tensor
    parts: dict[str, Tensor]
    metrics: dict[str, dict[str, float]]
    errors: dict[str, str]

    @classmethod
    def gathered(cls, own: Scores, group_ids: Tensor, all_ranks: Callable[[Tensor], Tensor]) -> IterationScores:
        """Collect every rank's scores.

        Args:
            own: this rank's.
            group_ids: those of all ranks' images.
            all_ranks: concatenates every rank's ``(B, ...)`` in rank order.
        """
        names = list(own.parts)
        columns = [own.total, *own.parts.values(), *(own.applies_to(name).float() for name in names)]
        table = all_ranks(torch.stack([column.cpu() for column in columns], dim=1)).unbind(dim=1)
        parts = dict(zip(names, table[1 : 1 + len(names)], strict=True))
        applies = {name: flag.bool() for name, flag in zip(names, table[1 + len(names) :], strict=True)}
        reports = objects_of_all_ranks((own.errors, own.seconds, own.counts))
        metrics = {name: _statistics(parts[name], applies[name], group_ids) for name in names}
        for name in names:
            seconds = sum(of_rank.get(name, 0.0) for _, of_rank, _ in reports)
            metrics[name]["seconds_per_image"] = seconds / max(int(applies[name].sum()), 1)
            counts = Counter[str]()
            for _, _, of_rank in reports:
                counts.update(of_rank.get(name, {}))
            metrics[name] |= {key: float(count) for key, count in counts.items()}
        errors = {name: message for of_rank, _, _ in reports for name, message in of_rank.items()}
        return cls(table[0], group_ids, parts, metrics, errors)

    def advantages(self, reward: Weighted, std: AdvantageStd, aggregate: AdvantageAggregate) -> Tensor:
        """Compare every image with its group: ``(B,)``."""
        shaped = {name: reward.shaped(name, self.parts) for name in self.parts}
        return combined_advantages(self.total, shaped, reward.weight_of, self.group_ids, std=std, aggregate=aggregate)

    def refuse_failures(self, iteration: int, any_failure: bool, images: str = "images") -> None:
        """Stop the run if every image failed, or any with ``any_failure``.

        Args:
            iteration: number for the message.
            images: what they are, for the message.

        Raises:
            RewardError: on every rank.
        """
        failed, number = int(self.total.isnan().sum()), len(self.total)
        if not failed or not (any_failure or failed == number):
            return
        what = f"{failed} of {number} {images} of iteration {iteration} failed, and model.failed_images=stop"
        if failed == number:
            what = f"Every {images.removesuffix('s')} of iteration {iteration} failed, so there is nothing to learn"
        name, message = next(iter(self.errors.items()), ("", "no message"))
        raise RewardError(f'{what}. Reward "{name}": {message}')


def _statistics(scores: Tensor, applies: Tensor, group_ids: Tensor) -> dict[str, float]:
    """Return the statistics of the images that a reward applies to."""
    asked = scores[applies]
    valid = asked[~asked.isnan()]
    mean = valid.mean()
    return {
        "mean": float(mean),
        "std": float((valid - mean).square().mean().sqrt()),  # torch.std warns where there are no images
        "no_spread": no_spread_share(asked, group_ids[applies]),
        "failed": float(asked.isnan().sum()),
    }
