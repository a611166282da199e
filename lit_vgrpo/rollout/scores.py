"""Scores of an iteration's images: collected during sampling, gathered from all ranks, compared in groups.

The images of a policy that edits are also compared with the pictures that they edit.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageAggregate, AdvantageStd, combined_advantages, mean_score, no_spread_share
from lit_vgrpo.core.gather import all_gather, all_gather_objects, rank_and_world_size
from lit_vgrpo.core.pictures import stacked_references
from lit_vgrpo.core.records import IterationRecord, PassLedger, timed
from lit_vgrpo.core.types import Rollout
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.errors import RewardErrorOfAll
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import ScoreQueue, Scores, Weighted
from lit_vgrpo.system.process import bar

SIDE = 64
"""Longer side, in pixels, of the reduced images that are compared; losses of an autoencoder hardly show in them."""
BLOCK = 8
"""Side of the blocks, in reduced pixels, that are checked for a change: an edit may be small, but is local."""
COPY = 0.05
"""An image counts as a copy if no block differs by this mean absolute difference. A choice, not a measurement."""


class ScoreCollector:
    """Decodes and scores images batch by batch, so that all pixels never exist at once.

    A reward that runs in a thread scores a batch while the next one is sampled.

    Args:
        needs_reward: False for a method without a reward, whose images are only counted.
        any_failure: Refuse a result in which any image failed, not only one in which all failed.
        ledger: Counts the forward passes of ``rollout``, and measures the peaks of all phases.

    Attributes:
        seconds: Wall time of the iteration by phase: ``rollout``, ``decode``, ``reward`` and ``reward_overlapped``,
            which is the time that threads scored during other phases.
    """

    def __init__(
        self, policy: Policy, reward: Weighted, needs_reward: bool, any_failure: bool, ledger: PassLedger
    ) -> None:
        self.policy, self.reward, self.any_failure, self.ledger = policy, reward, any_failure, ledger
        self.queue = ScoreQueue(reward) if needs_reward else None
        self.copies = CopyGuard()
        self.seconds: dict[str, float] = {}
        self._parts: list[Rollout] = []
        self._sources: list[str] = []

    @contextmanager
    def collecting(self, rollout: Generator[Rollout, None, None], total: int) -> Iterator[Iterator[Rollout]]:
        """Start an iteration, and yield its batches of images, which the block submits; close ``rollout`` at the end.

        If the block fails, pending scoring is cancelled.

        Args:
            total: Images of this rank.
        """
        self.seconds, self._parts, self._sources, self.copies = {}, [], [], CopyGuard()
        try:
            with closing(rollout), closing(self._sampled(rollout, total)) as sampled:
                yield sampled
        except BaseException:
            if self.queue is not None:
                self.queue.close()
            raise

    def _sampled(self, rollout: Iterator[Rollout], total: int) -> Generator[Rollout, None, None]:
        with bar("Rollout", total=total, is_brief=True) as done:
            while True:
                with self.ledger.phase("rollout"), timed(self.seconds, "rollout"):
                    images = next(rollout, None)
                if images is None:
                    return
                done.update(len(images))
                yield images

    @torch.no_grad()
    def submit(self, images: Rollout, batch: PromptBatch) -> None:
        """Decode a batch of images and queue them for scoring."""
        self._parts.append(images)
        if self.queue is None:
            return
        groups = [batch.slots.index(slot) for slot in images.group_ids.tolist()]
        self._sources += [batch.sources[group] for group in groups if batch.sources]
        size = self.policy.decode_batch_size
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            with timed(self.seconds, "decode"), self.ledger.memory.during("decode"):
                pixels = self.policy.decode(images.latents[part].to(self.policy.device))
            prompts, rows = [batch.prompts[g] for g in groups[part]], [dict(batch.rows[g]) for g in groups[part]]
            with timed(self.seconds, "reward"), self.ledger.memory.during("reward"):
                self.queue.put(pixels, prompts, rows)
                self.copies.add(pixels, rows)

    def result(self) -> tuple[Rollout, Scores]:
        """Return this rank's images and, after waiting for them, the scores of all ranks' images, in rank order.

        On every rank, RewardError is raised if every image failed and is trained on its score, or any failed with
        ``any_failure``.
        """
        rollout, self._parts = Rollout.joined(self._parts), []
        if self.queue is None:
            return rollout, gathered(Scores.empty(len(rollout)))
        with timed(self.seconds, "reward"), self.ledger.memory.during("reward"):
            local = self.queue.take()
        # Negative if the overhead of threads exceeded the overlap.
        self.seconds["reward_overlapped"] = max(0.0, sum(local.seconds.values()) - self.seconds["reward"])
        scores = gathered(local)
        failed, number = int(scores.total.isnan().sum()), len(scores)
        if failed and (self.any_failure or (failed == number and not self.reward.is_only_logged)):
            name, message = next(iter(scores.errors.items()), ("", "no message"))
            stop = ", and model.failed_images=stop" if failed < number else ", so there is nothing to learn"
            images = f"images of iteration {rollout.iteration + 1}"
            raise RewardErrorOfAll(f'{failed} of {number} {images} failed{stop}. Reward "{name}": {message}')
        return rollout, scores

    def compare(
        self, rollout: Rollout, scores: Scores, std: AdvantageStd, aggregate: AdvantageAggregate
    ) -> tuple[Tensor, IterationRecord]:
        """Compare each image with its group: advantages of this rank's images, ``(B,)``, and the iteration's record.

        ``rollout`` has this rank's images, ``scores`` those of all ranks.
        """
        group_ids = all_gather(rollout.group_ids)
        shaped = {name: self.reward.shaped(name, scores.parts) for name in scores.parts}
        weights = self.reward.weight_of
        sources = [source for own in all_gather_objects(self._sources) for source in own]
        advantages = combined_advantages(scores.total, shaped, weights, group_ids, std, aggregate, sources)
        group_size = int((rollout.group_ids == rollout.group_ids[0]).sum())
        record = IterationRecord(
            iteration=rollout.iteration,
            rewards=scores.total,
            group_ids=group_ids,
            parts=statistics(scores, group_ids),
            errors=scores.errors,
            local_group_ids=rollout.group_ids,
            images=len(scores),
            seconds={**self.seconds},
            has_advantage=self.queue is None or bool(advantages.any()),
            sources=statistics(scores_by_source(scores, sources), group_ids),
            edits={name: all_gather(values) for name, values in self.copies.scores(group_size).items()},
        )
        return advantages.split(len(rollout))[rank_and_world_size()[0]], record


def gathered(local: Scores) -> Scores:
    """Return the scores of all ranks' images, in rank order; seconds and counts are sums over ranks."""
    return Scores.joined(all_gather_objects(local))


def statistics(scores: Scores, group_ids: Tensor) -> dict[str, dict[str, float]]:
    """Return the statistics of each reward over the images that it applies to.

    By name: ``mean``, ``std``, ``no_spread``, ``failed``, ``seconds_per_image`` and the reward's counts.
    """
    table = {}
    for name, values in scores.parts.items():
        applies = scores.applies_to(name)
        asked = values[applies]
        valid = asked[~asked.isnan()]
        mean = valid.mean()
        table[name] = {
            "mean": mean_score(valid),
            "std": float((valid - mean).square().mean().sqrt()),  # torch.std warns if there are no images
            "no_spread": no_spread_share(asked, group_ids[applies]),
            "failed": float(asked.isnan().sum()),
            **{event: float(count) for event, count in scores.counts.get(name, {}).items()},
        }
        if name in scores.seconds:
            table[name]["seconds_per_image"] = scores.seconds[name] / max(int(applies.sum()), 1)
    return table


def scores_by_source(scores: Scores, sources: Sequence[str]) -> Scores:
    """Return the total as one part per source; ``sources`` are those of the images, empty if there is only one."""
    applies = {name: torch.tensor([one == name for one in sources]) for name in sorted(set(sources))}
    return Scores(scores.total, dict.fromkeys(applies, scores.total), scores.ok, applies=applies)


class CopyGuard:
    """Compares an iteration's images with the pictures that they edit, and with their group.

    Similarity is 1 minus the mean absolute difference of two images in [0, 1], reduced to :data:`SIDE` pixels.
    """

    def __init__(self) -> None:
        self._images: list[Tensor] = []
        self._to_reference: list[Tensor] = []
        self._copies: list[Tensor] = []

    def add(self, images: Tensor, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a batch of images ``(B, 3, H, W)`` or videos ``(B, F, 3, H, W)`` in [0, 1] with their rows.

        Nothing if those have no pictures. A video is compared as an image of all its frames, so that a copy stands
        still.
        """
        given = stacked_references(rows)
        if given is not None:
            small, references = reduced(images.cpu().flatten(0, -4)), reduced(given.flatten(0, -4))
            if images.ndim > 4:  # one frame below the other
                small = small.unflatten(0, images.shape[:2]).transpose(1, 2).flatten(2, 3)
                references = references.repeat(1, 1, images.shape[1], 1)
            each = small.repeat_interleave(len(references) // len(small), 0)  # once per picture
            self._images.append(small)
            self._to_reference.append(similarity(each, references).unflatten(0, (len(small), -1)).amax(1))
            self._copies.append((largest_change(each, references) < COPY).unflatten(0, (len(small), -1)).any(1))

    def scores(self, group_size: int) -> dict[str, Tensor]:
        """Return values of each image, ``(B,)``, in consecutive groups; {} without pictures.

        ``similarity_to_reference``, to the most similar of several pictures; ``similarity_in_group``, the mean over the
        other images of the group on this rank, NaN without any; ``copies``, 1 for a copy of a picture and 0 for others.
        """
        if not self._images:
            return {}
        groups = torch.cat(self._images).unflatten(0, (-1, group_size))
        # (P, G, G), 1 on the diagonal; all pairs of images of an iteration would not fit into memory
        pairs = torch.stack([similarity(group[:, None], group) for group in groups])
        others = (pairs.sum(-1) - 1) / (group_size - 1) if group_size > 1 else pairs[..., 0] * torch.nan
        return {
            "similarity_to_reference": torch.cat(self._to_reference),
            "similarity_in_group": others.flatten(),
            "copies": torch.cat(self._copies).float(),
        }


def reduced(images: Tensor) -> Tensor:
    """Return images ``(B, 3, H, W)`` with a longer side of :data:`SIDE` pixels at most."""
    scale = SIDE / max(images.shape[-2:])
    sides = [max(1, round(side * scale)) for side in images.shape[-2:]]
    return images if scale >= 1 else F.interpolate(images, sides, mode="area")


def similarity(images: Tensor, others: Tensor) -> Tensor:
    """Return 1 minus the mean absolute difference over the last three dimensions.

    >>> similarity(torch.zeros(1, 3, 2, 2), torch.full((1, 3, 2, 2), 0.25))
    tensor([0.7500])
    """
    return 1 - (images - others).abs().mean((-3, -2, -1))


def largest_change(images: Tensor, others: Tensor) -> Tensor:
    """Return the largest mean absolute difference of a block of :data:`BLOCK` pixels' side, ``(B,)``."""
    blocks = F.avg_pool2d((images - others).abs().mean(1, keepdim=True), BLOCK, ceil_mode=True)
    return blocks.flatten(1).amax(1)


def copying_warning(copies: Tensor, iteration: int) -> str | None:
    """Return a warning if more than half of an iteration's images are copies, in one line, or ``None``."""
    share = float(copies.mean())
    what = f"{share:.0%} of the images of iteration {iteration} are copies of the picture to edit."
    advice = "Give the edit reward more weight than the similarity reward, or raise guidance."
    return f"{what} {advice}" if share > 0.5 else None
