"""The images that an iteration samples, and the scouts they are redrawn from, where the recipe has scouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_vgrpo.core.batches import at_most
from lit_vgrpo.core.records import IterationRecord
from lit_vgrpo.core.scouts import extremes, rank_correlation
from lit_vgrpo.core.types import Conditioning, RolloutRequest, RolloutSpec
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.rewards.queue import ScoreQueue
from lit_vgrpo.rollout.scores import RolloutScoring
from lit_vgrpo.training.evaluation import HeldOutModule

LOW_CORRELATION, PATIENCE = 0.3, 5
"""A rank correlation below this in so many iterations in a row gives a warning. A choice, not a measurement."""


@dataclass(frozen=True)
class Choice:
    """The scouts of an iteration that are redrawn.

    Attributes:
        noise_ids: this rank's, in the order of its images ``(B,)``.
        rewards: the scouts' rewards over all ranks, ``(P, G)``, in the order of the images' global indices.
        conditioning: this rank's prompts, encoded.
        metrics: of all scouts, over all ranks.
        errors: by reward, the last failure.
        seconds: wall time by phase: ``scouts_rollout``, ``scouts_decode``, ...
    """

    noise_ids: Tensor
    rewards: Tensor
    conditioning: Conditioning
    metrics: dict[str, float]
    errors: dict[str, str]
    seconds: dict[str, float]

    def redrawn(self, request: RolloutRequest) -> RolloutRequest:
        """Return the request for this rank's images, from the noise of the chosen scouts."""
        return replace(request, noise_ids=self.noise_ids, conditioning=self.conditioning)


class Scouting:
    """Chooses the images of every iteration by its scouts, and compares the scouts with what they have become.

    Args:
        module: whose policy and objective are used.
        queue: scores scouts and images.
        any_failure: stop if a reward fails to score any scout, not only if it fails for all.
    """

    def __init__(self, module: HeldOutModule, queue: ScoreQueue, any_failure: bool) -> None:
        self.module = module
        self.queue = queue
        self.any_failure = any_failure
        self._choice: Choice | None = None
        self._low = 0
        self._has_warned = False

    def images(self, batch: PromptBatch) -> RolloutScoring:
        """Return the images of an iteration, still to be sampled; with scouts, they are sampled and chosen now.

        All ranks must call it: a group is chosen whole, even if its images are split over ranks.

        Raises:
            RewardError: every scout failed, or any that must not.
        """
        module, choice = self.module, self._send(batch)
        request = batch.request(module.seed, at_most(batch.images, module.rollout_batch_size))
        if choice is not None:
            request = choice.redrawn(request)
        queue = self.queue if module.objective.needs_reward else None
        images = RolloutScoring(module.policy, queue, request, module.all_ranks)
        if choice is not None:
            images.seconds |= choice.seconds
        self._choice = choice
        return images

    def _send(self, batch: PromptBatch) -> Choice | None:
        """Sample and score the scouts of an iteration and choose among them; ``None`` without scouts."""
        spec = self.module.objective.rollout_spec(batch.iteration)
        if spec.scouts is None or not self.module.objective.needs_reward:
            return None
        module, factor = self.module, spec.scouts.factor
        request = batch.request(module.seed, at_most(batch.images * factor, module.rollout_batch_size))
        request = request.of_scouts(factor)
        scoring = RolloutScoring(module.policy, self.queue, request, module.all_ranks)
        with module.ledger.phase("scouts"):
            scouts = scoring.sample(module.objective.send_scouts)
        scores = scoring.scores()
        scores.refuse_failures(batch.iteration, self.any_failure, "scouts")
        rewards = in_order(scores.total, module.all_ranks(scouts.image_ids), request.group_size)
        chosen = extremes(rewards, batch.group_size)
        own = chosen[torch.tensor(batch.slots)][:, torch.tensor(batch.members)]
        valid = rewards[~rewards.isnan()]
        return Choice(
            noise_ids=(own + torch.tensor(batch.slots).unsqueeze(1) * request.group_size).flatten(),
            rewards=rewards.gather(1, chosen),
            conditioning=scouts.conditioning,
            metrics={
                "reward_mean": float(valid.mean()),
                "reward_std": float(valid.std(correction=0)),
                "failed": float(rewards.isnan().sum()),
            },
            errors=scores.errors,
            seconds={f"scouts_{name}": value for name, value in scoring.seconds.items()},
        )

    def compare(self, record: IterationRecord, image_ids: Tensor) -> IterationRecord:
        """Return the record with the scouts, if any; warn once if their order says little about the images'.

        Args:
            image_ids: global index of each of this rank's images, ``(B,)``.
        """
        choice, self._choice = self._choice, None
        if choice is None:
            return record
        images = in_order(record.rewards, self.module.all_ranks(image_ids), choice.rewards.shape[1])
        found = rank_correlation(choice.rewards, images)
        if found is None:
            return replace(record, scouts=choice.metrics, errors=choice.errors | record.errors)
        self._low = self._low + 1 if found < LOW_CORRELATION else 0
        if self._low == PATIENCE and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(self._advice(found, self.module.objective.rollout_spec(record.iteration)))
        metrics = {**choice.metrics, "rank_correlation": found}
        return replace(record, scouts=metrics, errors=choice.errors | record.errors)

    @staticmethod
    def _advice(correlation: float, spec: RolloutSpec) -> str:
        assert spec.scouts is not None
        key, steps = "model.objective.rollout.scouts", spec.scouts.steps
        more = min(spec.steps - 1, steps + max(2, steps // 2))
        fix = f"Use more steps: {key}.steps={more}" if more > steps else f"Leave them out: {key}=null"
        return (
            f"scouts/rank_correlation is {correlation:.2f} and has been below {LOW_CORRELATION} for {PATIENCE} "
            f"iterations: the order of the scouts says little about the images trained on. {fix}."
        )


def in_order(values: Tensor, ids: Tensor, group_size: int) -> Tensor:
    """Return the values of all ranks' images ``(B,)`` in the order of their global indices, ``(P, group_size)``."""
    return values[ids.argsort().to(values.device)].view(-1, group_size)
