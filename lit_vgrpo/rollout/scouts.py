"""Scouts: a sampler around the sampler, which draws many cheap images and resamples the best and worst at full cost."""

from __future__ import annotations

from collections.abc import Generator
from copy import copy
from dataclasses import replace

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_vgrpo.core.advantages import extremes, rank_correlation
from lit_vgrpo.core.gather import of_all_ranks
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.types import Rollout
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import Scores
from lit_vgrpo.rollout.sampler import ImageSampler, Sampler
from lit_vgrpo.rollout.scores import ScoreCollector


def image_sampler(
    policy: Policy, objective: Objective, ledger: PassLedger, seed: int, batch_size: int | None, scores: ScoreCollector
) -> ImageSampler:
    """Return a :class:`Sampler`, or a :class:`ScoutSampler` if there are scouts, which ``scores.queue`` also scores."""
    sampler = Sampler(policy, objective, ledger, seed, batch_size)
    has_scouts = objective.rollout_spec(0).scouts is not None and scores.queue is not None
    return ScoutSampler(sampler, copy(scores)) if has_scouts else sampler


class ScoutSampler:
    """Samples the images of an iteration from the noise of chosen scouts.

    All ranks must sample together: a group is chosen whole, even if its images are split over ranks.

    Args:
        sampler: Samples the scouts, and then the images.
        scores: Scores the scouts; shares the queue of the images' collector.
    """

    def __init__(self, sampler: Sampler, scores: ScoreCollector) -> None:
        self.sampler, self.scores = sampler, scores
        self._chosen = torch.empty(0)
        self._metrics: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    @property
    def seconds(self) -> dict[str, float]:
        return {**self._seconds, **self.sampler.seconds}

    def batches(self, batch: PromptBatch) -> Generator[Rollout, None, None]:
        """Sample, score and choose the scouts, then yield this rank's images.

        Raises:
            RewardError: Every scout failed, or any with the collector's ``any_failure``.
        """
        sampler = self.sampler
        sampler.reset()
        spec = sampler.objective.rollout_spec(batch.iteration)
        assert spec.scouts is not None
        request = sampler.request(batch, spec.scouts.factor)
        with self.scores.collecting(sampler.draw(request, spec.of_scouts, "scouts")) as drawn:
            for images in drawn:
                self.scores.submit(images, batch)
            scouts, scores = self.scores.result(f"scouts of iteration {batch.iteration + 1}")
        for name, message in scores.errors.items():
            rank_zero_warn(f'Reward "{name}" failed for some scouts of iteration {batch.iteration + 1}: {message}')
        seconds = {"rollout": sampler.seconds["scouts"], **self.scores.seconds}
        self._seconds = {f"scouts_{name}": value for name, value in seconds.items()}
        sampler.reset()
        rewards = in_order(scores.total, of_all_ranks(scouts.image_ids), request.group_size)
        chosen = extremes(rewards, batch.group_size)
        self._chosen = rewards.gather(1, chosen)
        valid = rewards[~rewards.isnan()]
        self._metrics = {
            "reward_mean": float(valid.mean()),
            "reward_std": float(valid.std(correction=0)),
            "failed": float(rewards.isnan().sum()),
        }
        slots = torch.tensor(batch.slots)
        local = chosen[slots][:, torch.tensor(batch.members)] + slots.unsqueeze(1) * request.group_size
        redrawn = replace(sampler.request(batch), noise_ids=local.flatten(), conditioning=scouts.conditioning)
        yield from sampler.draw(redrawn)

    def metrics(self, rollout: Rollout, scores: Scores) -> dict[str, float]:
        """Return the scouts' metrics, and how well their order predicts that of the images trained on."""
        images = in_order(scores.total, of_all_ranks(rollout.image_ids), self._chosen.shape[1])
        correlation = rank_correlation(self._chosen, images)
        return self._metrics if correlation is None else {**self._metrics, "rank_correlation": correlation}


def in_order(values: Tensor, ids: Tensor, group_size: int) -> Tensor:
    """Return the values of all ranks' images ``(B,)`` in the order of their global indices, ``(P, group_size)``."""
    return values[ids.argsort().to(values.device)].view(-1, group_size)
