"""The LightningModule: the paper's Algorithm 1, one iteration per epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import lightning as L
import torch
from pydantic import InstanceOf
from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageAggregate, AdvantageStd
from lit_vgrpo.core.batches import BATCH_SIZE
from lit_vgrpo.core.gather import count_ranks_of, image_ranks
from lit_vgrpo.core.ranges import BatchSize, Seed, checked
from lit_vgrpo.core.records import IterationRecord, PassLedger
from lit_vgrpo.core.snapshots import Snapshot, trainable_parameters
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.placement import in_own_precision
from lit_vgrpo.rewards import as_weighted
from lit_vgrpo.rewards.function import RewardsLike
from lit_vgrpo.rollout.iteration import Continuation, Iteration, Replay
from lit_vgrpo.rollout.sampler import Sampler
from lit_vgrpo.rollout.scores import ScoreCollector
from lit_vgrpo.training.checkpoint_file import read_sound
from lit_vgrpo.training.evaluation import EvaluationSpec, Evaluator
from lit_vgrpo.training.micro_batch import settle
from lit_vgrpo.training.module_state import load_state, save_state
from lit_vgrpo.training.optimizer import LRSchedulerCallable, Optimization, OptimizerCallable, OptimizerConfig
from lit_vgrpo.training.resume_guard import ResumeGuard
from lit_vgrpo.training.saved_weights import load_policy
from lit_vgrpo.training.settings import fitting_callbacks, hide_expected_warnings, set_up
from lit_vgrpo.training.teachers import load_teachers
from lit_vgrpo.training.trainer_internals import count_steps, move_root_dir, read_limits
from lit_vgrpo.training.update_guard import NonFinite, UpdateGuard


@checked
class VGRPOModule(L.LightningModule):
    """Trains a policy; one epoch is one iteration of Algorithm 1.

    The first step of an iteration samples its images, see :meth:`collect`. Every step returns the loss of one
    micro-batch, so Lightning accumulates, clips and steps as usual.

    Args:
        policy: The denoising model; its weights are loaded in ``configure_model``.
        objective: The training method.
        reward: Scores the images: a reward, a function of images and prompts, or a list of them, whose mean is trained
            on; ``Weighted`` weighs several.
        optimizer: AdamW's settings, or any other optimizer, by ``class_path`` or as a function of the weights.
        heldout_reward: Scores held-out images in addition to the reward; never trained on.
        advantage_std: The std that divides advantages: the iteration's, source's, group's or none; null: the paper's.
        advantage_aggregate: Normalise the sum of the rewards, or sum each one's advantages; null follows the paper.
        evaluation: Sampling of held-out images by an ODE, optionally at another size; null uses the objective's rollout
            without noise.
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
        reward: RewardsLike,
        optimizer: OptimizerConfig | OptimizerCallable | None = None,
        heldout_reward: RewardsLike | None = None,
        advantage_std: AdvantageStd | None = None,
        advantage_aggregate: AdvantageAggregate | None = None,
        evaluation: EvaluationSpec | None = None,
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
        self.rollout_batch_size, self.failed_images = rollout_batch_size, failed_images
        self.rollout_device = None if rollout_device is None else torch.device(rollout_device)

        self.ledger = ledger = PassLedger()
        stops = failed_images == "stop"
        self.scores = ScoreCollector(policy, self.reward, objective.needs_reward, stops, ledger.memory)
        self.sampler = Sampler(policy, objective, ledger, seed, rollout_batch_size)
        spec, queue = evaluation or objective.rollout_spec(0).as_ode(), self.scores.queue
        self.evaluator = Evaluator(policy, self.reward, heldout_reward, spec, rollout_batch_size, seed, ledger, queue)
        self.guard, self.replay, self.continuation = UpdateGuard(non_finite), Replay(), Continuation()
        self.iteration: Iteration | Any = None  # None between iterations
        self.record: IterationRecord | None = None
        self.reference: Snapshot | Any = None
        self.strict_loading = False  # checkpoints hold only trained weights

    # --- Algorithm 1 -----------------------------------------------------------------------------------------------

    @in_own_precision
    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch; the first step of an iteration samples its images."""
        home = self.rollout_device or self.device
        iteration = self.iteration or self.continuation.take_up(batch, home) or self.collect(batch)
        self.iteration, self.record = iteration, iteration.record
        if not iteration.record.has_advantage:
            return torch.zeros((), device=self.device)
        if batch.starts_update:
            self.objective.before_update(self.policy, iteration.micros_of_update(batch), self.ledger)
        loss, metrics = self.objective.loss(self.policy, iteration.micro_of_step(batch).to(self.policy.device))
        iteration.record.add(loss, metrics)
        self.guard.watch(loss)
        return loss

    def collect(self, batch: PromptBatch) -> Iteration:
        """Roll out, score, compare within groups, and prepare what the updates need."""
        with self.scores.collecting(self.sampler.batches(batch)) as sampled:
            for images in sampled:
                self.scores.submit(images, batch)  # scored while the next images are sampled
            rollout, scores = self.scores.result()
        advantages, record = self.scores.compare(
            rollout, scores, self.advantage_std, self.advantage_aggregate, self.sampler
        )
        self.ledger.count_images(len(scores))
        return Iteration.prepared(
            self.objective, self.policy, rollout, advantages, record, batch, self.ledger, self.replay, self.reward
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
        iteration, took_step = self.iteration, False
        if iteration.record.has_advantage:
            super().optimizer_step(epoch, batch_idx, optimizer, lambda: loss)
            took_step = self.guard.took_step(self.trainer)
        iteration.end_update(took_step)
        if took_step:
            self.objective.after_update(self.policy)
        if iteration.is_over and iteration.record.updates:
            self.objective.after_iteration(self.policy)
        # Not in on_train_batch_end, before which a checkpoint callback may have saved the state.
        self.iteration = None if iteration.is_over else iteration

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        count_steps(self.trainer)
        self.ledger.stopwatch.start(waits=batch.is_first)
        self.ledger.memory.enter("update")

    def on_train_batch_end(self, outputs: Any, batch: PromptBatch, batch_idx: int) -> None:
        self.ledger.stopwatch.stop(waits=batch.is_last)
        self.ledger.memory.enter("")
        # After max_time, finish the iteration first: its images are already sampled.
        self._stops |= self.trainer.should_stop
        self.trainer.should_stop = self._stops and batch.is_last

    # --- held-out images -------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current weights on the held-out prompts, on every rank; return {} if there are none."""
        return self.evaluator.evaluate(self)

    def on_validation_start(self) -> None:
        self.evaluator.start_over()

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:  # a part of the images
            self.evaluator.add(batch)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log_dict(self.evaluator.finish(self))

    on_test_start, test_step, on_test_epoch_end = on_validation_start, validation_step, on_validation_epoch_end

    def predict_step(self, batch: PromptBatch | Sequence[str], batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return images of a batch of prompts, ``(B, 3, H, W)`` in [0, 1], on the CPU.

        The data module's held-out prompts give the images of the evaluation. In any other loader, whose batches are
        lists of texts, prompt n starts from noise n on any number of ranks.
        """
        is_first = batch_idx == dataloader_idx == 0
        return self.evaluator.predict(batch, is_first, *image_ranks(self.trainer)).cpu()

    # --- set-up ----------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        count_ranks_of(self.trainer)
        if stage == "fit":
            set_up(self)

    def configure_model(self) -> None:
        if self.reference is not None:
            return
        load_policy(self.policy)
        self.ledger.attach(self.policy.network)
        self.objective.connect(self.rollout_device, self.seed)
        self.objective.setup(self.policy)
        load_teachers(self.objective, self.policy)
        # One copy of the start is enough if the method already has it.
        self.reference = self.objective.copies.get("reference") or Snapshot(self.policy, device="cpu")

    def configure_callbacks(self) -> list[L.Callback]:
        from lit_vgrpo.callbacks.reward_logger import RewardLogger

        return fitting_callbacks(self.trainer, RewardLogger, ResumeGuard)

    def configure_optimizers(self) -> Any:
        return self.optimization.build(trainable_parameters(self.policy).values())

    def on_fit_start(self) -> None:
        self.iteration, self.record, self._stops = None, None, False
        for copy in (self.reference, *self.objective.copies.values()):
            copy.follow()
        self.reward.enter_run(move_root_dir(self.trainer))
        settle(self)
        is_resumed = self.continuation.rewind(self.trainer)
        if not is_resumed and self.trainer.global_step == 0:
            self.evaluator.load_state_dict({"history": []})  # not that of an earlier fit
        if not is_resumed and self.evaluate_at_start:
            read_limits(self.trainer)  # before the first image, and not after the evaluation
            self.evaluator.evaluate(self, logs=True)

    def on_train_start(self) -> None:
        if self.continuation.is_resumed:
            self.optimization.resume(self.lr_schedulers())

    # --- checkpoints -----------------------------------------------------------------------------------------------

    on_save_checkpoint, on_load_checkpoint = save_state, load_state

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Return the module with a checkpoint's weights, after checking the file; other arguments as the class's."""
        read_sound(Path(checkpoint_path))
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.configure_model()  # spawned processes return their weights to a process that has loaded none
        return super().load_state_dict(state_dict, *args, **kwargs)
