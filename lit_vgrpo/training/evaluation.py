"""Held-out evaluation: the module's hooks that sample and score images of held-out prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import Self

from lit_vgrpo.core.batches import at_most
from lit_vgrpo.core.gather import objects_of_all_ranks, rows_of_all_ranks
from lit_vgrpo.core.noise import STREAM_HELDOUT, image_generators
from lit_vgrpo.core.pass_counter import PassLedger
from lit_vgrpo.core.records import Evaluation, IterationRecord, Stopwatch
from lit_vgrpo.core.sampling import sample
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.placement import in_own_precision
from lit_vgrpo.rewards import Reward, ScoreQueue, Weighted, as_weighted
from lit_vgrpo.training.checkpoint_file import CheckpointDamage, PortableCheckpoints, read_sound
from lit_vgrpo.training.limits import hide_expected_warnings
from lit_vgrpo.training.update_guard import UpdateGuard


class HeldOutObserver(Protocol):
    """A metric of held-out images besides the reward, such as FID; called on every rank at every evaluation."""

    def update(self, images: Tensor, batch: PromptBatch) -> None:
        """Add a batch of this rank's images, ``(B, 3, H, W)`` in [0, 1]."""

    def compute(self, module: HeldOutModule) -> dict[str, float]:
        """Return the metrics over all ranks' images since the last call, the same on every rank."""


class HeldOutScores:
    """Collects the scores of one evaluation, batch by batch.

    Args:
        observed: the trained reward and the untrained one.
        untrained: the untrained one alone.
        beside: queue of the training images, whose threads are shared.
    """

    def __init__(self, observed: Weighted, untrained: Weighted | None, beside: ScoreQueue) -> None:
        self.untrained = untrained
        self.queue = ScoreQueue(observed, beside=beside)
        self._of_images: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return len(self.queue) > 0

    def add(self, images: Tensor, batch: PromptBatch) -> None:
        """Score this rank's images ``(B, 3, H, W)`` of a batch."""
        self.queue.put(images, batch.prompts, batch.rows)

    def get(self, name: str) -> Tensor | None:
        """Return a metric of the last evaluation per image over all ranks, ``(N,)``, ordered by image number.

        NaN where an image has none; ``None`` for a metric that is not defined per image.
        """
        return self._of_images.get(name)

    def means(self) -> dict[str, float]:
        """Return the means over all ranks' images that were scored, the same on every rank, and start over.

        ``heldout/reward`` is the trained reward, ``heldout/untrained_reward`` the untrained one, ``heldout/<part>``
        each reward alone, and ``heldout/failed`` the number of images that a reward failed to score; a warning says
        why.
        """
        scores = self.queue.take()
        values = {"heldout/reward": scores.total}
        if self.untrained is not None:
            values["heldout/untrained_reward"] = self.untrained.total(scores.parts, scores.applies)
        values |= {f"heldout/{name}": part for name, part in scores.parts.items()}
        failed = [part.isnan() & scores.applies_to(name) for name, part in scores.parts.items()]
        values["heldout/failed"] = torch.stack(failed).any(dim=0)
        # Each rank has a contiguous share of the images, in rank order.
        table = rows_of_all_ranks(torch.stack(list(values.values()), dim=1).double())
        self._of_images = dict(zip(values, table.unbind(dim=1), strict=True))
        means = {name: float(own.nanmean()) for name, own in self._of_images.items()}
        num_failed = int(self._of_images.pop("heldout/failed").sum())
        if num_failed:
            reasons = {
                name: reason for errors in objects_of_all_ranks(scores.errors) for name, reason in errors.items()
            }
            for name, reason in reasons.items():
                rank_zero_warn(f'Reward "{name}" failed for some of the {len(table)} held-out images: {reason}')
        return {**means, "heldout/failed": float(num_failed)}


class HeldOutModule(L.LightningModule):
    """The part of :class:`~lit_vgrpo.module.VGRPOModule` that evaluates: it samples images and does not train.

    ``validate`` and ``test`` score the held-out prompts, as ``heldout/*`` and ``test/*``; ``predict`` returns images.
    """

    guard: UpdateGuard  # of the module that trains

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        reward: Reward,
        heldout_reward: Reward | None,
        evaluation: RolloutSpec | None,
        rollout_batch_size: int | None,
        seed: int,
    ) -> None:
        super().__init__()
        hide_expected_warnings()
        self.policy = policy
        self.objective = objective
        self.reward = as_weighted(reward.found_at("model.reward"))
        other = None if heldout_reward is None else heldout_reward.found_at("model.heldout_reward")
        self.heldout_reward = None if other is None else as_weighted(other)
        self.evaluation = evaluation
        self.rollout_batch_size = rollout_batch_size
        self.seed = seed
        self.ledger, self.images_seen = PassLedger(), 0
        self.record: IterationRecord | None = None
        self.stopwatch = Stopwatch()
        self.heldout: dict[str, float] = {}
        self.heldout_step = -1
        self.heldout_observers: list[HeldOutObserver] = []
        self.evaluations: list[Evaluation] = []
        self.observed = self.reward.observing(self.heldout_reward)
        self._scores = ScoreQueue(self.reward)
        self.heldout_scores = HeldOutScores(self.observed, self.heldout_reward, self._scores)
        self._num_predicted = 0

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Return the module with a checkpoint's weights; the other arguments are the constructor's.

        Raises:
            TypeError: a part is missing.
            RuntimeError: the file is damaged, or a weight is not finite.
        """
        if isinstance(checkpoint_path, str | Path) and Path(checkpoint_path).is_file():
            try:
                read_sound(Path(checkpoint_path))
            except CheckpointDamage as damage:
                raise RuntimeError(f"{checkpoint_path} {damage}. Give another checkpoint of its run.") from damage
        try:
            return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
        except TypeError as error:
            missing = re.findall(r"'(\w+)'", str(error)) if "missing" in str(error) else []
            if not missing:
                raise
            parts = ", ".join(f"{name}=..." for name in missing)
            raise TypeError(
                f"A checkpoint holds what was trained, not the parts it was built from. "
                f"Call {cls.__name__}.load_from_checkpoint(path, {parts})."
            ) from None

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        # Spawned processes return their weights to a process that has loaded none.
        self.configure_model()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def costs(self) -> dict[str, Any]:
        """Return the costs and evaluations so far, for a checkpoint."""
        return {
            "ledger": self.ledger.state_dict(),
            "images_seen": self.images_seen,
            "stopwatch": self.stopwatch.state_dict(),
            "evaluations": [evaluation.as_dict() for evaluation in self.evaluations],
        }

    def load_costs(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`costs` returned."""
        self.ledger.load_state_dict(state["ledger"])
        self.images_seen = state["images_seen"]
        self.stopwatch.load_state_dict(state["stopwatch"])
        self.evaluations = [Evaluation(**values) for values in state["evaluations"]]

    # The trainer evaluates in inference mode, but cached embeddings are used in training too.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    @in_own_precision
    def generate(
        self,
        prompts: Sequence[str],
        image_ids: list[int],
        images: int = 0,
        references: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Sample held-out images ``(B, 3, H, W)`` in [0, 1].

        Args:
            image_ids: numbers of the images, which with the seed determine their noise.
            images: number of images over all ranks.
            references: the pictures that the prompts edit, ``(3, H, W)``, uint8, for a policy that edits.
        """
        spec = self.evaluation or self.objective.rollout_spec(self.current_epoch if self.has_trainer else 0).as_ode()
        conditioning, rows = self.policy.encode_each(prompts, references)
        noise = self.policy.prior(image_generators(STREAM_HELDOUT, self.seed, 0, image_ids))
        latents, _ = sample(self.policy, conditioning, rows, spec, noise, at_most(images, self.rollout_batch_size))
        return self.policy.decode(latents)

    def generate_batch(self, batch: PromptBatch) -> Tensor:
        """Sample a held-out batch's images ``(B, 3, H, W)`` in [0, 1]."""
        return self.generate(*batch.padded(), batch.images, batch.references())[: len(batch.slots)]

    @property
    def has_trainer(self) -> bool:
        """``True`` while the module is attached to a trainer."""
        try:
            return self.trainer is not None
        except RuntimeError:  # raised by Lightning when there is none
            return False

    def all_ranks(self, values: Tensor) -> Tensor:
        """Concatenate every rank's ``(B, ...)`` in rank order, on the CPU."""
        if not self.has_trainer or self.trainer.world_size == 1:
            return values.cpu()
        gathered: Any = self.all_gather(values.to(self.device))
        return gathered.flatten(0, 1).cpu()

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current weights on the held-out prompts, on every rank; return {} if there are none."""
        loader, limit = self.trainer.datamodule.val_dataloader(), self.trainer.limit_val_batches  # type: ignore[attr-defined]
        batches = limit if isinstance(limit, int) else int(limit * len(loader))
        for index, batch in enumerate(islice(loader, batches)):
            self.validation_step(batch, index)
        if self.heldout_scores:
            self._finish_heldout()
        return self.heldout

    @torch.inference_mode(mode=False)
    @torch.no_grad()
    @in_own_precision
    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        with self._scores.closed_on_error():
            with self.ledger.phase("evaluation"):
                images = self.generate_batch(batch)
            for observer in self.heldout_observers:
                observer.update(images, batch)
            self.heldout_scores.add(images, batch)

    def on_validation_epoch_end(self) -> None:
        self._finish_heldout()
        self.log_dict(self.heldout)

    def _finish_heldout(self) -> None:
        """Store the evaluation's means in ``self.heldout``, and what it cost in ``self.evaluations``."""
        self.heldout = self._measured()
        self.heldout_step = self.trainer.global_step
        evaluation = Evaluation(
            # The trainer's own count lags by one during validation.
            iteration=self.record.iteration + 1 if self.record is not None else self.trainer.current_epoch,
            reward=self.heldout["heldout/reward"],
            images=self.images_seen,
            passes=self.ledger.training_passes(),
            train_seconds=self.stopwatch.wall_s,
            cpu_seconds=self.stopwatch.cpu_s,
            forward_equivalents=self.ledger.training_equivalents(),
            phases={name: dict(count) for name, count in self.ledger.training_counts().items()},
        )
        self.evaluations.append(evaluation)

    def _measured(self) -> dict[str, float]:
        measured = self.heldout_scores.means()
        for observer in self.heldout_observers:
            measured |= observer.compute(self)
        return measured

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self.log_dict({f"test/{name.removeprefix('heldout/')}": value for name, value in self._measured().items()})

    def on_predict_start(self) -> None:
        self._num_predicted = 0

    def predict_step(self, batch: PromptBatch | Sequence[str], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return images ``(B, 3, H, W)`` in [0, 1] of a batch of prompts, on the CPU.

        The data module's held-out prompts give the images of the evaluation. In any other loader, prompt n starts from
        noise n on any number of ranks.

        Raises:
            TypeError: the batch does not hold prompts.
            ValueError: the weights are sharded, and the batch does not come from the data module.
        """
        if isinstance(batch, PromptBatch):
            with self.ledger.phase("evaluation"):
                return self.generate_batch(batch).cpu()
        if not isinstance(batch, list | tuple) or not all(isinstance(prompt, str) for prompt in batch):
            raise TypeError(
                f"predict was given a batch of type {type(batch).__name__}. Give prompts: "
                "trainer.predict(module, DataLoader(list_of_texts, batch_size=8))."
            )
        ranks = self.trainer.world_size
        if ranks > 1 and isinstance(self.trainer.strategy, PortableCheckpoints):
            raise ValueError(
                f"{type(self.trainer.strategy).__name__} needs equally many batches on every rank, which only "
                "PromptDataModule gives. Use trainer.predict(module, datamodule=...), or one device."
            )
        first, self._num_predicted = self._num_predicted, self._num_predicted + len(batch)
        # The trainer assigns a loader's batches to ranks in turn.
        numbers = [self.global_rank + ranks * number for number in range(first, self._num_predicted)]
        with self.ledger.phase("evaluation"):
            return self.generate(batch, numbers).cpu()
