"""Scores of an iteration's images: collected while sampling goes on, gathered from all ranks, compared in groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageAggregate, AdvantageStd, combined_advantages, no_spread_share
from lit_vgrpo.core.gather import objects_of_all_ranks
from lit_vgrpo.core.records import IterationRecord, timed
from lit_vgrpo.core.types import Rollout
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import RewardError, ScoreQueue, Scores, Weighted
from lit_vgrpo.rollout.copying import CopyGuard
from lit_vgrpo.rollout.sampler import ImageSampler

Gather = Callable[[Tensor], Tensor]
"""Concatenates every rank's ``(B, ...)`` in rank order; collective."""


class ScoreCollector:
    """Decodes and scores images batch by batch, so that all pixels never exist at once.

    A reward that runs in a thread scores a batch while the next one is sampled.

    Args:
        policy: decodes the latents.
        queue: scores the images; ``None`` for a method without a reward.
        all_ranks: concatenates every rank's ``(B, ...)`` in rank order; collective.
        any_failure: refuse a result in which any image failed, not only one in which all failed.

    Attributes:
        seconds: wall time of the iteration by phase: ``decode``, ``reward`` and ``reward_overlapped``, which is the
            time that threads scored during other phases.
    """

    def __init__(self, policy: Policy, queue: ScoreQueue | None, all_ranks: Gather, any_failure: bool = False) -> None:
        self.policy, self.queue, self.all_ranks, self.any_failure = policy, queue, all_ranks, any_failure
        self.copies = CopyGuard()
        self.seconds: dict[str, float] = {}
        self._submitted = 0

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Start an iteration; if the block fails, pending scoring is cancelled."""
        self.seconds, self._submitted, self.copies = {}, 0, CopyGuard()
        try:
            yield
        except BaseException:
            if self.queue is not None:
                self.queue.close()
            raise

    @torch.no_grad()
    def submit(self, images: Rollout, batch: PromptBatch) -> None:
        """Decode a batch of images and queue them for scoring."""
        self._submitted += len(images)
        if self.queue is None:
            return
        groups = [batch.slots.index(slot) for slot in images.group_ids.tolist()]
        size = self.policy.decode_batch_size
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            with timed(self.seconds, "decode"):
                pixels = self.policy.decode(images.latents[part].to(self.policy.device))
            prompts, rows = [batch.prompts[g] for g in groups[part]], [dict(batch.rows[g]) for g in groups[part]]
            with timed(self.seconds, "reward"):
                self.queue.put(pixels, prompts, rows)
                self.copies.add(pixels, rows)

    def result(self, what: str) -> Scores:
        """Wait for the scores and return those of all ranks' images, in rank order.

        Args:
            what: the images, for the message, such as ``images of iteration 3``.

        Raises:
            RewardError: every image failed, or any with ``any_failure``; on every rank.
        """
        if self.queue is None:
            return gathered(Scores.empty(self._submitted), self.all_ranks)
        with timed(self.seconds, "reward"):
            local = self.queue.take()
        # Negative if the overhead of threads exceeded the overlap.
        self.seconds["reward_overlapped"] = sum(local.seconds.values()) - self.seconds["reward"]
        scores = gathered(local, self.all_ranks)
        failed, number = int(scores.total.isnan().sum()), len(scores)
        if failed and (self.any_failure or failed == number):
            name, message = next(iter(scores.errors.items()), ("", "no message"))
            stop = ", and model.failed_images=stop" if failed < number else ", so there is nothing to learn"
            raise RewardError(f'{failed} of {number} {what} failed{stop}. Reward "{name}": {message}')
        return scores

    def record(
        self, rollout: Rollout, scores: Scores, group_ids: Tensor, advantages: Tensor, sampler: ImageSampler
    ) -> IterationRecord:
        """Return the record of an iteration whose updates are still to come.

        Args:
            rollout: this rank's images.
            scores: those of all ranks' images, whose groups are ``group_ids (B,)``.
            advantages: of all ranks' images, ``(B,)``.
            sampler: sampled the images.
        """
        group_size = int((rollout.group_ids == rollout.group_ids[0]).sum())
        return IterationRecord(
            iteration=rollout.iteration,
            rewards=scores.total,
            group_ids=group_ids,
            parts=statistics(scores, group_ids),
            errors=scores.errors,
            local_group_ids=rollout.group_ids,
            images=len(scores),
            seconds={**sampler.seconds, **self.seconds},
            has_advantage=self.queue is None or bool(advantages.any()),
            blocks_run=rollout.blocks_run,
            scouts=sampler.metrics(rollout, scores),
            edits={name: self.all_ranks(values) for name, values in self.copies.scores(group_size).items()},
        )


def gathered(local: Scores, all_ranks: Gather) -> Scores:
    """Return the scores of all ranks' images, in rank order; seconds and counts are sums over ranks."""
    names = list(local.parts)
    columns = [local.total, *local.parts.values(), *(local.applies_to(name).float() for name in names)]
    total, *others = all_ranks(torch.stack([column.cpu() for column in columns], dim=1)).unbind(dim=1)
    reports = objects_of_all_ranks((local.errors, local.seconds, local.counts))
    counts = {name: Counter[str]() for name in names}
    for _, _, of_rank in reports:
        for name, events in of_rank.items():
            counts[name].update(events)
    return Scores(
        total=total,
        parts=dict(zip(names, others, strict=False)),
        ok=~total.isnan(),
        errors={name: message for of_rank, _, _ in reports for name, message in of_rank.items()},
        applies={name: flag.bool() for name, flag in zip(names, others[len(names) :], strict=True)},
        seconds={name: sum(of_rank.get(name, 0.0) for _, of_rank, _ in reports) for name in names},
        counts={name: dict(events) for name, events in counts.items()},
    )


def compare(
    scores: Scores, group_ids: Tensor, reward: Weighted, std: AdvantageStd, aggregate: AdvantageAggregate
) -> Tensor:
    """Compare every image with its group: advantages ``(B,)``.

    Args:
        scores: those of all ranks' images, whose groups are ``group_ids (B,)``.
    """
    shaped = {name: reward.shaped(name, scores.parts) for name in scores.parts}
    return combined_advantages(scores.total, shaped, reward.weight_of, group_ids, std=std, aggregate=aggregate)


def statistics(scores: Scores, group_ids: Tensor) -> dict[str, dict[str, float]]:
    """Return the statistics of each reward over the images that it applies to.

    By name: ``mean``, ``std``, ``no_spread``, ``failed``, ``seconds_per_image`` and the reward's own counts.
    """
    found = {}
    for name, values in scores.parts.items():
        applies = scores.applies_to(name)
        asked = values[applies]
        valid = asked[~asked.isnan()]
        mean = valid.mean()
        found[name] = {
            "mean": float(mean),
            "std": float((valid - mean).square().mean().sqrt()),  # torch.std warns where there are no images
            "no_spread": no_spread_share(asked, group_ids[applies]),
            "failed": float(asked.isnan().sum()),
            "seconds_per_image": scores.seconds.get(name, 0.0) / max(int(applies.sum()), 1),
            **{event: float(count) for event, count in scores.counts.get(name, {}).items()},
        }
    return found
