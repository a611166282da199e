"""The LightningModule: the paper's Algorithm 1, one iteration an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_vgrpo.callbacks.reward_logger import RewardLogger
from lit_vgrpo.core.advantages import AdvantageAggregate, AdvantageStd
from lit_vgrpo.core.batches import BATCH_SIZE
from lit_vgrpo.core.nonfinite import NonFinite
from lit_vgrpo.core.ranges import BatchSize, Seed, checked
from lit_vgrpo.core.records import IterationRecord, timed
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot, trainable_parameters
from lit_vgrpo.core.types import Experience, Rollout, RolloutSpec
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.objectives.base import Objective, PrepareContext
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.placement import in_own_precision
from lit_vgrpo.rewards import Reward
from lit_vgrpo.rollout.iteration import Continuation, Iteration
from lit_vgrpo.rollout.scores import IterationScores, RolloutScoring
from lit_vgrpo.rollout.scouts import Scouting
from lit_vgrpo.training.evaluation import HeldOutModule
from lit_vgrpo.training.limits import keep_iterations_whole, sizes_of, training_warnings, unfit_callbacks
from lit_vgrpo.training.micro_batch import accumulate, settle
from lit_vgrpo.training.optimization import LRSchedulerCallable, Optimization
from lit_vgrpo.training.optimizer import OptimizerCallable, OptimizerConfig
from lit_vgrpo.training.resume_guard import ResumeGuard
from lit_vgrpo.training.saved_weights import refuse_other_weights, trained_only
from lit_vgrpo.training.settings import ModuleSettings
from lit_vgrpo.training.start import load_policy
from lit_vgrpo.training.update_guard import UpdateGuard


@checked
class VGRPOModule(HeldOutModule):
    """Trains a policy; one epoch is one iteration of Algorithm 1.

    The first step of an iteration makes its images, see :meth:`collect`. Every step returns the loss of one
    micro-batch, so that Lightning accumulates, clips and steps as in any other run.

    Args:
        policy: the denoising model; its weights are loaded in ``configure_model``.
        objective: the training method.
        reward: scores the images; ``Weighted`` combines several.
        optimizer: AdamW's settings, or any other optimizer by ``class_path`` or as a function of the weights.
        heldout_reward: scores held-out images in addition to the reward; never trained on.
        advantage_std: divide advantages by the std of the whole iteration, of the group, or by none; null follows the
            method's paper.
        advantage_aggregate: with several rewards, sum the rewards and normalise the sum, or normalise each and sum the
            advantages; null follows the method's paper.
        evaluation: how held-out images are sampled, by an ODE; null uses the objective's rollout without noise.
        rollout_batch_size: images per network pass while sampling, the last batch padded; null takes all at once.
        rollout_device: where an iteration's latents, pairs and embeddings are kept; cpu saves device memory.
        failed_images: leave images that a reward failed to score out of their group, or stop with the reason.
        evaluate_at_start: evaluate on the held-out prompts before training.
        non_finite: stop at an update whose loss or gradient is not finite on any rank, or skip it on all ranks.
        seed: seed of all rollout noise, pairs and held-out noise.
        lr_scheduler: any of torch's schedules, by ``class_path`` or as a function of the optimizer, stepped after every
            update; null keeps the rate constant after the warm-up.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        reward: Reward,
        optimizer: OptimizerConfig | OptimizerCallable | None = None,
        heldout_reward: Reward | None = None,
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
        super().__init__(policy, objective, reward, heldout_reward, evaluation, rollout_batch_size, seed)
        self.failed_images = failed_images
        self._scouting = Scouting(self, self._scores, any_failure=failed_images == "stop")
        self.optimization = Optimization(optimizer, lr_scheduler)
        self.advantage_std: AdvantageStd = advantage_std or objective.advantage_std
        self.advantage_aggregate: AdvantageAggregate = advantage_aggregate or objective.advantage_aggregate
        self.rollout_device = None if rollout_device is None else torch.device(rollout_device)
        self.evaluate_at_start = evaluate_at_start
        self.guard = UpdateGuard(non_finite)
        self.reference: Snapshot | None = None
        self._iteration: Iteration | None = None
        self._continuation: Continuation | None = None
        self._stops = False
        # Checkpoints hold only what is trained; the frozen rest comes from the policy's own checkpoint.
        self.strict_loading = False

    # --- Algorithm 1 -----------------------------------------------------------------------------------------------

    @in_own_precision
    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch; the first step of an iteration makes its images."""
        iteration = self._iteration = self._iteration_of(batch)
        self.record = iteration.record
        if self.is_idle:
            return torch.zeros((), device=self.device)
        if batch.starts_update:
            self.objective.before_update(self.policy, iteration.micros_of_update(batch), self.ledger)
        loss, metrics = self.objective.loss(self.policy, iteration.micro_of_step(batch).to(self.policy.device))
        iteration.record.add(loss, metrics)
        self.guard.watch(loss)
        return loss

    def _iteration_of(self, batch: PromptBatch) -> Iteration:
        """Return the step's iteration: the rest of a saved one, a new one, or the current one."""
        if self._continuation is not None:
            rest = self._continuation.take_up(batch, self.rollout_device or self.device)
            if rest is not None:
                return rest
        if batch.is_first:
            return self.collect(batch)
        assert self._iteration is not None
        return self._iteration

    def collect(self, batch: PromptBatch) -> Iteration:
        """Roll out, score, compare within groups, and prepare what the updates need.

        Raises:
            RewardError: every image failed, or any with ``failed_images="stop"``.
        """
        images = self._scouting.images(batch)
        rollout = self._roll_out(images)
        scores = self._score(images)
        advantages = scores.advantages(self.reward, self.advantage_std, self.advantage_aggregate)
        record = self._scouting.compare(images.record(scores, advantages), rollout.image_ids)
        return self._prepare(batch, rollout, advantages, record)

    def _roll_out(self, images: RolloutScoring) -> Rollout:
        """Return this rank's images; each batch is scored while the next is sampled."""
        with self.ledger.phase("rollout"):
            return images.sample(self.objective.roll_out)

    def _score(self, images: RolloutScoring) -> IterationScores:
        """Return the scores of all ranks' images, once they are all there."""
        with self.ledger.phase("reward"):
            scores = images.scores()
        self.images_seen += len(scores.total)
        scores.refuse_failures(images.rollout.iteration, any_failure=self.failed_images == "stop")
        return scores

    def _prepare(self, batch: PromptBatch, rollout: Rollout, advantages: Tensor, record: IterationRecord) -> Iteration:
        """Return the iteration with what the loss needs of this rank's images."""
        own = advantages.split(len(rollout))[self.global_rank]
        context = PrepareContext(
            self.policy, rollout, own, batch.micro_batch_size, batch.updates, self.ledger, batch.later
        )
        with timed(record.seconds, "prepare"):
            experience = self.objective.prepare(context) if record.has_advantage else context.experience()
        return Iteration.of(experience, rollout.image_ids, record, batch)

    # --- one update ------------------------------------------------------------------------------------------------

    @property
    def micros(self) -> list[Experience]:
        """This rank's micro-batches of the current iteration; none between iterations."""
        return [] if self._iteration is None else self._iteration.micros

    @property
    def is_idle(self) -> bool:
        """``True`` in an iteration without advantages, which takes no step.

        Otherwise the KL's rounding error would move the weights: Adam makes whole steps of it.
        """
        return self._iteration is not None and not self._iteration.record.has_advantage

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self.is_idle:
            super().backward(loss, *args, **kwargs)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        weights = list(trainable_parameters(self.policy).values())
        assert self._iteration is not None
        self.guard.look(self.trainer, weights, self.all_ranks, self._iteration.place)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        # The iteration's first step rolls out inside the closure; only then is_idle is known.
        loss = optimizer_closure()
        assert self._iteration is not None
        took_step = False
        if not self.is_idle:
            super().optimizer_step(epoch, batch_idx, optimizer, lambda: loss)
            took_step = self.guard.took_step(self.trainer)
            if took_step:
                self.objective.after_update(self.policy)
        self._iteration.end_update(took_step)
        # Not in on_train_batch_end, before which a checkpoint callback may have saved the state.
        if self._iteration.is_over:
            if self._iteration.record.updates:
                self.objective.after_iteration(self.policy)
            self._iteration = None

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        self.stopwatch.start(waits=batch.is_first)

    def on_train_batch_end(self, outputs: Any, batch: PromptBatch, batch_idx: int) -> None:
        self.stopwatch.stop(waits=batch.is_last)
        # After max_time, finish the iteration first: its images are paid for.
        self._stops |= self.trainer.should_stop
        self.trainer.should_stop = self._stops and batch.is_last

    # --- set-up ----------------------------------------------------------------------------------------------------

    def check(self, sizes: Sizes) -> list[str]:
        """Return one line for each error that can be found without loading weights."""
        return self.settings.errors(sizes)

    @property
    def settings(self) -> ModuleSettings:
        """The settings, to be checked."""
        return ModuleSettings(
            self.policy, self.objective, self.reward, self.observed, self.optimization, self.evaluation
        )

    def setup(self, stage: str) -> None:
        if stage != "fit":
            return
        trainer, sizes = self.trainer, sizes_of(self.trainer)
        has_heldout = trainer.datamodule.has_heldout  # type: ignore[attr-defined]
        for error in self.settings.errors_under(trainer.strategy, sizes, trainer.world_size, has_heldout):
            raise ValueError(error)
        self.reward.enter_run(Path(self.trainer.default_root_dir))
        keep_iterations_whole(self.trainer, sizes)
        accumulate(self.trainer, sizes)

    def configure_model(self) -> None:
        if self.reference is not None:
            return
        load_policy(self.policy)
        self.ledger.attach(self.policy.network, self.trainer.world_size if self.has_trainer else 1)
        self.objective.connect(self.all_ranks, self.rollout_device)
        self.objective.setup(self.policy)
        # One copy of the start is enough where the method has it already.
        self.reference = self.objective.copies.get("reference") or Snapshot(self.policy, device="cpu")

    def configure_callbacks(self) -> list[L.Callback]:
        """Add the metrics of every iteration, and the check of checkpoints before they are loaded."""
        chosen = self.trainer.callbacks  # type: ignore[attr-defined]
        for error in unfit_callbacks(chosen):
            raise ValueError(error)
        there = tuple(map(type, chosen))
        return [cls() for cls in (RewardLogger, ResumeGuard) if not any(issubclass(own, cls) for own in there)]

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
                logger.log_metrics(self.heldout, step=0)

    def on_train_start(self) -> None:
        for line in training_warnings(self.trainer, self.policy):
            rank_zero_warn(line)
        if self._continuation is not None:
            self.optimization.resume(self.lr_schedulers())

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = trained_only(self.policy, checkpoint["state_dict"])
        checkpoint["lit_vgrpo"] = {
            **self.costs(),
            **self.guard.state_dict(),
            "objective": self.objective.state_dict(),
            # With the images of an unfinished iteration, so that no rollout is paid for twice.
            "iteration": self._iteration.state_dict(self.all_ranks) if self._iteration is not None else None,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        refuse_other_weights(self.policy, checkpoint["state_dict"])
        state = checkpoint["lit_vgrpo"]
        self.objective.load_state_dict(state["objective"])
        self.guard.load_state_dict(state)
        self.load_costs(state)
        if self.has_trainer and self.trainer.state.fn == TrainerFn.FITTING:  # else only the weights are wanted
            progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
            self._continuation = Continuation(state["iteration"], progress)
