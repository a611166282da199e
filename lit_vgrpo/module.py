"""The LightningModule: the paper's Algorithm 1, one iteration per epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from pydantic import InstanceOf
from torch import Tensor
from typing_extensions import Self

from lit_vgrpo.core.advantages import AdvantageAggregate, AdvantageStd
from lit_vgrpo.core.batches import BATCH_SIZE
from lit_vgrpo.core.gather import rank_and_world_size
from lit_vgrpo.core.ranges import BatchSize, Seed, checked
from lit_vgrpo.core.records import IterationRecord, PassLedger
from lit_vgrpo.core.snapshots import Snapshot, trainable_parameters
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.loading import distillation_warning
from lit_vgrpo.policies.placement import in_own_precision
from lit_vgrpo.rewards import as_weighted
from lit_vgrpo.rewards.function import RewardLike
from lit_vgrpo.rollout.iteration import Continuation, Iteration, Replay
from lit_vgrpo.rollout.sampler import Sampler
from lit_vgrpo.rollout.scores import ScoreCollector
from lit_vgrpo.rollout.scouts import image_sampler
from lit_vgrpo.training.checkpoint_file import CheckpointDamage, read_sound
from lit_vgrpo.training.evaluation import Evaluator
from lit_vgrpo.training.micro_batch import settle
from lit_vgrpo.training.optimizer import LRSchedulerCallable, Optimization, OptimizerCallable, OptimizerConfig
from lit_vgrpo.training.resume_guard import ResumeGuard
from lit_vgrpo.training.saved_weights import load_policy, refuse_other_weights, trained_only
from lit_vgrpo.training.settings import hide_expected_warnings, refuse_unfit, set_up
from lit_vgrpo.training.update_guard import NonFinite, UpdateGuard


@checked
class VGRPOModule(L.LightningModule):
    """Trains a policy; one epoch is one iteration of Algorithm 1.

    The first step of an iteration samples its images, see :meth:`collect`. Every step returns the loss of one
    micro-batch, so Lightning accumulates, clips and steps as usual.

    Args:
        policy: The denoising model; its weights are loaded in ``configure_model``.
        objective: The training method.
        reward: Scores the images: a reward or a function of images and prompts; ``Weighted`` combines several.
        optimizer: AdamW's settings, or any other optimizer by ``class_path`` or as a function of the weights.
        heldout_reward: Scores held-out images in addition to the reward; never trained on.
        advantage_std: Divide advantages by the std of the whole iteration, of the group, or by none; null follows the
            method's paper.
        advantage_aggregate: With several rewards, sum the rewards and normalise the sum, or normalise each and sum the
            advantages; null follows the method's paper.
        evaluation: Sampling of held-out images, by an ODE; null uses the objective's rollout without noise.
        rollout_batch_size: Images per forward pass while sampling, the last batch padded; null takes all at once.
        rollout_device: Device of an iteration's latents, pairs and embeddings; cpu saves device memory.
        failed_images: Leave images that a reward failed to score out of their group, or stop with the reason.
        evaluate_at_start: Evaluate on the held-out prompts before training.
        non_finite: Stop at an update whose loss or gradient is not finite on any rank, or skip it on all ranks.
        seed: Seed of rollout noise, pairs and held-out noise.
        lr_scheduler: Any of torch's schedules, by ``class_path`` or as a function of the optimizer, stepped after every
            update; null keeps the rate constant after the warm-up.

    Attributes:
        evaluator: Samples and scores held-out images; usable without a trainer.
        ledger: Forward passes, images and time of the run so far.
        record: Metrics of the current or last iteration, for callbacks.
    """

    def __init__(
        self,
        policy: InstanceOf[Policy],
        objective: InstanceOf[Objective],
        reward: RewardLike,
        optimizer: OptimizerConfig | OptimizerCallable | None = None,
        heldout_reward: RewardLike | None = None,
        advantage_std: AdvantageStd | None = None,
        advantage_aggregate: AdvantageAggregate | None = None,
        evaluation: RolloutSpec | None = None,
        rollout_batch_size: BatchSize | None = BATCH_SIZE,
        rollout_device: Literal["cpu"] | None = None,
        failed_images: Literal["leave_out", "stop"] = "leave_out",
        evaluate_at_start: bool = True,
        non_finite: NonFinite = "stop",
        seed: Seed = 0,
        lr_scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        hide_expected_warnings()
        self.policy, self.objective, self.seed = policy, objective, seed
        self.reward = as_weighted(reward, "model.reward")
        self.optimization = Optimization(optimizer, lr_scheduler)
        self.advantage_std: AdvantageStd = advantage_std or objective.advantage_std
        self.advantage_aggregate: AdvantageAggregate = advantage_aggregate or objective.advantage_aggregate
        self.evaluation, self.evaluate_at_start = evaluation, evaluate_at_start
        self.rollout_batch_size = rollout_batch_size
        self.rollout_device = None if rollout_device is None else torch.device(rollout_device)
        self.failed_images = failed_images

        self.ledger = PassLedger()
        self.scores = ScoreCollector(policy, self.reward, objective.needs_reward, failed_images == "stop")
        sampler = Sampler(policy, objective, self.ledger, seed, rollout_batch_size)
        self.sampler = image_sampler(sampler, self.scores)
        spec, queue = evaluation or objective.rollout_spec(0).as_ode(), self.scores.queue
        self.evaluator = Evaluator(
            policy, self.reward, heldout_reward, spec, rollout_batch_size, seed, self.ledger, queue
        )
        self.guard = UpdateGuard(non_finite)
        self.record: IterationRecord | None = None
        self.reference: Snapshot | None = None
        self.iteration: Iteration | Any = None  # None between iterations
        self.replay = Replay()
        self._continuation: Continuation | None = None
        self._stops = False
        # Checkpoints hold only trained weights; the frozen ones come from the policy's checkpoint.
        self.strict_loading = False

    # --- Algorithm 1 -----------------------------------------------------------------------------------------------

    @in_own_precision
    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch; the first step of an iteration samples its images."""
        left = self._continuation and self._continuation.take_up(batch, self.rollout_device or self.device)
        self.iteration = left or (self.collect(batch) if batch.is_first else self.iteration)
        iteration, self.record = self.iteration, self.iteration.record
        if not iteration.record.has_advantage:
            return torch.zeros((), device=self.device)
        if batch.starts_update:
            self.objective.before_update(self.policy, iteration.micros_of_update(batch), self.ledger)
        loss, metrics = self.objective.loss(self.policy, iteration.micro_of_step(batch).to(self.policy.device))
        iteration.record.add(loss, metrics)
        self.guard.watch(loss)
        return loss

    def collect(self, batch: PromptBatch) -> Iteration:
        """Roll out, score, compare within groups, and prepare what the updates need.

        Raises:
            RewardError: Every image failed, or any with ``failed_images="stop"``.
        """
        with self.scores.collecting(self.sampler.batches(batch)) as sampled:
            for images in sampled:
                self.scores.submit(images, batch)  # scored while the next images are sampled
            with self.ledger.phase("reward"):
                rollout, scores = self.scores.result(f"images of iteration {batch.iteration + 1}")
        advantages, record = self.scores.compare(
            rollout, scores, self.advantage_std, self.advantage_aggregate, self.sampler
        )
        self.ledger.count_images(len(scores))
        replayed = self.replay.exchange(rollout, advantages, batch) if self.objective.replay else None
        return Iteration.prepared(
            self.objective, self.policy, rollout, advantages, record, batch, self.ledger, replayed, self.reward
        )

    # --- one update ------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        # Without advantages no step is taken: Adam would turn the KL's rounding error into full-size steps.
        if self.iteration.record.has_advantage:
            super().backward(loss, *args, **kwargs)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.guard.look(self.trainer, self.policy, self.iteration.place)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        loss = optimizer_closure()  # an iteration's first step rolls out inside it
        took_step = False
        if self.iteration.record.has_advantage:
            super().optimizer_step(epoch, batch_idx, optimizer, lambda: loss)
            took_step = self.guard.took_step(self.trainer)
            if took_step:
                self.objective.after_update(self.policy)
        self.iteration.end_update(took_step)
        # Not in on_train_batch_end, before which a checkpoint callback may have saved the state.
        if self.iteration.is_over:
            if self.iteration.record.updates:
                self.objective.after_iteration(self.policy)
            self.iteration = None

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        self.ledger.stopwatch.start(waits=batch.is_first)

    def on_train_batch_end(self, outputs: Any, batch: PromptBatch, batch_idx: int) -> None:
        self.ledger.stopwatch.stop(waits=batch.is_last)
        # After max_time, finish the iteration first: its images are already sampled.
        self._stops |= self.trainer.should_stop
        self.trainer.should_stop = self._stops and batch.is_last

    def on_train_epoch_end(self) -> None:
        """Fail if updates are missing: Lightning takes any StopIteration, even a callback's, for the last batch."""
        is_whole = self.iteration is None and self.trainer.is_last_batch
        if not is_whole and not 0 <= self.trainer.max_steps <= self.trainer.global_step:
            number = self.trainer.current_epoch + 1
            raise RuntimeError(f"Iteration {number} ended before its last update. Did a callback raise StopIteration?")

    # --- held-out images -------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current weights on the held-out prompts, on every rank; return {} if there are none."""
        self.evaluator.run(self.trainer.datamodule.val_dataloader(), self.trainer.limit_val_batches)  # type: ignore[attr-defined]
        if self.evaluator.is_pending:
            self._finish_evaluation()
        return self.evaluator.latest

    def _finish_evaluation(self) -> None:
        # The trainer's own count lags by one during validation.
        iteration = self.record.iteration + 1 if self.record is not None else self.trainer.current_epoch
        self.evaluator.finish(self, iteration, self.trainer.global_step)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.evaluator.add(batch)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self._finish_evaluation()
        self.log_dict(self.evaluator.latest)

    def on_test_epoch_end(self) -> None:
        means = self.evaluator.means(self)
        self.log_dict({f"test/{name.removeprefix('heldout/')}": value for name, value in means.items()})

    def on_predict_start(self) -> None:
        self.evaluator.start_predicting()

    def predict_step(self, batch: PromptBatch | Sequence[str], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return images of a batch of prompts, ``(B, 3, H, W)`` in [0, 1], on the CPU.

        The data module's held-out prompts give the images of the evaluation. In any other loader, whose batches are
        lists of texts, prompt n starts from noise n on any number of ranks.
        """
        return self.evaluator.predict(batch, self.global_rank, self.trainer.world_size).cpu()

    # --- set-up ----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        if stage == "fit":
            set_up(self)

    def configure_model(self) -> None:
        if self.reference is not None:
            return
        load_policy(self.policy)
        self.ledger.attach(self.policy.network, rank_and_world_size()[1])
        self.objective.connect(self.rollout_device, self.seed)
        self.objective.setup(self.policy)
        # One copy of the start is enough if the method already has it.
        self.reference = self.objective.copies.get("reference") or Snapshot(self.policy, device="cpu")

    def configure_callbacks(self) -> list[L.Callback]:
        """Add the metrics of every iteration, and the check of checkpoints before they are loaded."""
        from lit_vgrpo.callbacks.reward_logger import RewardLogger

        refuse_unfit(self.trainer)
        chosen = self.trainer.callbacks  # type: ignore[attr-defined]
        return [cls() for cls in (RewardLogger, ResumeGuard) if not any(isinstance(other, cls) for other in chosen)]

    def configure_optimizers(self) -> Any:
        weights = trainable_parameters(self.policy).values()
        return self.optimization.build(weights)

    def on_fit_start(self) -> None:
        self._stops = False
        assert self.reference is not None
        for copy in (self.reference, *self.objective.copies.values()):
            copy.follow()
        settle(self, self.optimization.optimizer)
        if self._continuation is not None:
            self._continuation.rewind(self.trainer.datamodule, self.trainer.world_size)  # type: ignore[attr-defined]
        elif self.evaluate_at_start and self.evaluate():
            for logger in self.loggers:
                logger.log_metrics(self.evaluator.latest, step=0)

    def on_train_start(self) -> None:
        if (distilled := distillation_warning(self.policy)) is not None:
            rank_zero_warn(distilled)
        if self._continuation is not None:
            self.optimization.resume(self.lr_schedulers())

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = trained_only(self.policy, checkpoint["state_dict"])
        checkpoint["lit_vgrpo"] = {
            "ledger": self.ledger.state_dict(),
            "evaluator": self.evaluator.state_dict(),
            **self.guard.state_dict(),
            "objective": self.objective.state_dict(),
            # Include the images of an unfinished iteration, so that no rollout is repeated.
            "iteration": self.iteration.state_dict() if self.iteration is not None else None,
            "replay": self.replay.state_dict(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        refuse_other_weights(self.policy, checkpoint["state_dict"])
        state = checkpoint["lit_vgrpo"]
        self.objective.load_state_dict(state["objective"])
        self.guard.load_state_dict(state)
        self.ledger.load_state_dict(state["ledger"])
        self.replay.load_state_dict(state["replay"])
        self.evaluator.load_state_dict(state["evaluator"])
        with suppress(RuntimeError):  # without a trainer, only the weights are needed
            if self.trainer.state.fn == "fit":
                progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
                self._continuation = Continuation(state["iteration"], progress)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Return the module with a checkpoint's weights; the other arguments are the constructor's.

        Raises:
            RuntimeError: The file is damaged, or a weight is not finite.
        """
        try:
            read_sound(Path(checkpoint_path))
        except CheckpointDamage as damage:
            raise RuntimeError(f"{checkpoint_path} {damage}. Give another checkpoint of the same run.") from damage
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        # Spawned processes return their weights to a process that has loaded none.
        self.configure_model()
        return super().load_state_dict(state_dict, *args, **kwargs)
