"""The LightningModule: the paper's Algorithm 1, one iteration an epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageAggregate, AdvantageStd, combined_advantages
from lit_vgrpo.core.batches import BATCH_SIZE, at_most
from lit_vgrpo.core.nonfinite import NonFinite, NonFiniteGuard
from lit_vgrpo.core.ranges import BatchSize, Seed, checked
from lit_vgrpo.core.records import Evaluation, IterationRecord, timed
from lit_vgrpo.core.rollout import Experience, Rollout, RolloutSpec
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot, trainable_parameters
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.distributed.registry import strategy_faults
from lit_vgrpo.distributed.zero import local_gradients
from lit_vgrpo.objectives.base import Objective, PrepareContext
from lit_vgrpo.optimizers.optimizer import OptimizerCallable, OptimizerConfig, as_optimizer
from lit_vgrpo.optimizers.schedule import LRSchedulerCallable, Schedule
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.placement import in_own_precision
from lit_vgrpo.rewards import Reward, RewardBatch
from lit_vgrpo.runs.heldout import HeldOutModule
from lit_vgrpo.runs.iteration import Iteration, rewind
from lit_vgrpo.runs.limits import keep_iterations_whole, settings_without_effect
from lit_vgrpo.runs.micro_batch import accumulate, settle
from lit_vgrpo.runs.resume_guard import ResumeGuard
from lit_vgrpo.runs.reward_logger import RewardLogger
from lit_vgrpo.runs.scoring import IterationScores, RolloutScoring
from lit_vgrpo.runs.start import load_policy, policy_faults


@checked
class VGRPOModule(HeldOutModule):
    """Holds the policy, its frozen reference and the objective; rolls out and trains inside ``training_step``.

    One epoch is one iteration. Its first step rolls out, scores and prepares; every step takes one micro-batch of that
    and returns its loss, so that Lightning accumulates, clips and steps as in any other run.

    Args:
        policy: the denoising model; its weights load in ``configure_model``.
        objective: the training method.
        reward: what images are scored by; ``Weighted`` combines several.
        optimizer: AdamW's settings; or any other optimizer, by ``class_path`` or as a function of the weights.
        heldout_reward: what held-out images are scored by beside the reward; never trained on.
        advantage_std: divide advantages by the std of the whole iteration, or of the group; null as the method's paper.
        advantage_aggregate: with several rewards, sum the rewards and then normalise, or normalise each and sum the
            advantages; null as the method's paper.
        evaluation: how held-out images are sampled, by an ODE; null takes the objective's rollout, without noise.
        rollout_batch_size: images of every network pass while sampling, filled up at the end; null takes all at once.
        rollout_device: where an iteration's latents, pairs and embeddings are kept; cpu saves the device's memory.
        failed_images: leave images that a reward could not score out of their group, or stop with the reason.
        evaluate_at_start: score the held-out prompts once before training.
        non_finite: what to do with an update whose loss or gradient is not finite on any rank: stop with the reason,
            or skip it on all of them.
        seed: fixes all rollout noise, pairs and held-out noise.
        lr_scheduler: any schedule of torch's, by ``class_path`` or as a function of the optimizer, stepped with every
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
        self.optimizer_config = as_optimizer(optimizer)
        self.schedule = None if lr_scheduler is None else Schedule(lr_scheduler)
        self.advantage_std: AdvantageStd = advantage_std or objective.advantage_std
        self.advantage_aggregate: AdvantageAggregate = advantage_aggregate or objective.advantage_aggregate
        self.rollout_device = None if rollout_device is None else torch.device(rollout_device)
        self.evaluate_at_start = evaluate_at_start
        self.guard = NonFiniteGuard(non_finite)
        self.reference: Snapshot | None = None
        self._iteration: Iteration | None = None
        self._saved_iteration: dict[str, Any] | None = None
        self._cut_short: dict[str, Any] | None = None
        self._batch: PromptBatch | None = None
        self._resumed = self._is_refused = self._stops = False
        # Checkpoints hold only what is trained; the frozen rest comes from the policy's own checkpoint.
        self.strict_loading = False

    # --- set-up ----------------------------------------------------------------------------------------------------

    def check(self, sizes: Sizes) -> list[str]:
        """Faults of the policy, the objective and the reward that can be found without loading weights."""
        faults = [*policy_faults(self.policy), *self.observed.check(), *self.optimizer_config.check()]
        if self.schedule is not None and not faults:
            faults += self.schedule.check(self.optimizer_config.trial())
        if self.schedule is not None and self.optimizer_config.warmup_steps:
            faults.append(
                f"model.optimizer.warmup_steps={self.optimizer_config.warmup_steps} and model.lr_scheduler are both "
                "given. Leave one of them out; torch.optim.lr_scheduler.OneCycleLR warms up by itself."
            )
        faults += [*self.objective.policy_faults(type(self.policy)), *self.objective.check(sizes)]
        if self.evaluation is not None and self.evaluation.solver not in self.policy.solvers:
            options = " or ".join(self.policy.solvers)
            faults.append(
                f"model.evaluation.solver={self.evaluation.solver} is not an ODE solver of "
                f"{type(self.policy).__name__}. Use {options}."
            )
        return faults

    def setup(self, stage: str) -> None:
        if stage != "fit":
            return
        sizes = getattr(getattr(self.trainer, "datamodule", None), "sizes", None)
        if sizes is None:
            raise RuntimeError(
                "VGRPOModule takes its sizes from the data module. "
                "Call trainer.fit(module, datamodule=PromptDataModule(...))."
            )
        of_strategy = strategy_faults(self.trainer.strategy, self.policy, self.optimizer_config, sizes)
        for fault in (*of_strategy, *self.check(sizes)):
            raise ValueError(fault)
        keep_iterations_whole(self.trainer, sizes)
        accumulate(self.trainer, sizes)

    def configure_model(self) -> None:
        if self.reference is not None:
            return
        load_policy(self.policy)
        self.ledger.attach(self.policy.network, self.trainer.world_size if self.has_trainer else 1)
        self.objective.connect(self.all_ranks, self.rollout_device)
        self.objective.setup(self.policy)
        # A method that needs the start holds it already; one copy of it is enough.
        self.reference = self.objective.copies.get("reference") or Snapshot(self.policy, device="cpu")

    def configure_callbacks(self) -> list[L.Callback]:
        """Add the metrics of every iteration, and the check of checkpoints before they are loaded."""
        there = tuple(type(callback) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [cls() for cls in (RewardLogger, ResumeGuard) if not any(issubclass(own, cls) for own in there)]

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_config.build(trainable_parameters(self.policy).values())
        return optimizer if self.schedule is None else self.schedule.around(optimizer)

    def on_fit_start(self) -> None:
        self._stops = False
        assert self.reference is not None
        for copy in (self.reference, *self.objective.copies.values()):
            copy.follow()
        settle(self, self.optimizer_config)
        if self._cut_short is not None:
            done = self._saved_iteration["updates_done"] if self._saved_iteration is not None else 0
            rewind(self._cut_short, self.trainer.datamodule, self.trainer.world_size, done)  # type: ignore[attr-defined]
            self._cut_short = None
        if self.evaluate_at_start and not self._resumed and self.evaluate():
            for logger in self.loggers:
                logger.log_metrics(self.heldout, step=0)

    def on_train_start(self) -> None:
        for line in settings_without_effect(self.trainer, self.policy):
            rank_zero_warn(line)
        if self.schedule is not None and self._resumed:
            self.schedule.resume(self.lr_schedulers())

    # --- Algorithm 1 -----------------------------------------------------------------------------------------------

    @in_own_precision
    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        iteration = self._iteration_of(batch)
        if self.is_idle:
            return torch.zeros((), device=self.device)
        position, per_update = batch.step % len(iteration.micros), batch.micro_batches_per_update
        if position % per_update == 0:
            micros = iteration.micros[position : position + per_update]
            self.objective.before_update(self.policy, micros, self.ledger)
        loss, metrics = self.objective.loss(self.policy, iteration.micros[position].to(self.policy.device))
        iteration.record.add(loss, metrics)
        self.guard.watch(loss)
        return loss

    def _iteration_of(self, batch: PromptBatch) -> Iteration:
        """Return the step's iteration: the current one, a new one, or the rest of a saved one."""
        self._batch = batch
        if (saved := self._saved_iteration) is not None:
            self._iteration = Iteration.restored(saved, batch, self.rollout_device or self.device)
            self._saved_iteration = None
        elif batch.is_first:
            self._iteration = self.collect(batch)
        assert self._iteration is not None
        self.record = self._iteration.record
        return self._iteration

    @property
    def is_idle(self) -> bool:
        """Whether the iteration under way takes no step, since none of its images is better than another.

        What would move the weights then is the KL's rounding error, which Adam makes whole steps of.
        """
        return self._iteration is not None and not self._iteration.record.has_advantage

    def collect(self, batch: PromptBatch) -> Iteration:
        """Roll out, score, compare within groups, and prepare what the updates need."""
        seconds: dict[str, float] = {}
        rollout, scores = self._roll_out_and_score(batch, seconds)
        record, advantages = self._compare(batch, rollout, scores, seconds)
        experience = self._prepare(batch, rollout, advantages, record)
        return Iteration.of(experience, rollout.image_ids, record, batch)

    def _roll_out_and_score(self, batch: PromptBatch, seconds: dict[str, float]) -> tuple[Rollout, RewardBatch]:
        """Return this rank's images and their scores; a batch is scored while the next one is sampled."""
        size = at_most(batch.images, self.rollout_batch_size)
        request = batch.request(self.seed, size)
        scoring = RolloutScoring(self.policy, self._scores, batch, seconds) if self.objective.needs_reward else None
        with self._scores.closed_on_error():
            with self.ledger.phase("rollout"), timed(seconds, "rollout"):
                rollout = self.objective.roll_out(self.policy, request, on_batch=scoring)
            return rollout, RewardBatch.empty(len(rollout)) if scoring is None else scoring.result()

    def _prepare(self, batch: PromptBatch, rollout: Rollout, advantages: Tensor, record: IterationRecord) -> Experience:
        with timed(record.seconds, "prepare"):
            if not record.has_advantage:
                return Experience.of(rollout, advantages)
            context = PrepareContext(
                self.policy, rollout, advantages, batch.micro_batch_size, batch.updates, self.ledger
            )
            return self.objective.prepare(context)

    def _compare(
        self, batch: PromptBatch, rollout: Rollout, own: RewardBatch, seconds: dict[str, float]
    ) -> tuple[IterationRecord, Tensor]:
        """Compare every image with its group; statistics are those of all ranks' images.

        Args:
            own: the scores of this rank's images.

        Raises:
            RewardError: every image of the iteration failed, or any where that is to stop the run.
        """
        group_ids = self.all_ranks(rollout.group_ids)
        scores = IterationScores.gathered(own, group_ids, self.all_ranks)
        self.images_seen += len(scores.total)
        scores.refuse_failures(batch.iteration, any_failure=self.failed_images == "stop")
        advantages = combined_advantages(
            scores.total,
            {name: self.reward.shaped(name, scores.parts) for name in scores.parts},
            self.reward.weight_of,
            group_ids,
            std=self.advantage_std,
            aggregate=self.advantage_aggregate,
        )
        local = slice(self.global_rank * len(rollout), (self.global_rank + 1) * len(rollout))
        record = IterationRecord(
            iteration=batch.iteration,
            rewards=scores.total,
            group_ids=group_ids,
            parts=scores.metrics,
            errors=scores.errors,
            local_group_ids=rollout.group_ids,
            images=len(scores.total),
            seconds=seconds,
            has_advantage=bool(advantages.any()) or not self.objective.needs_reward,
        )
        return record, advantages[local]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self.is_idle:
            super().backward(loss, *args, **kwargs)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = list(trainable_parameters(self.policy).values())
        # A gradient scaler looks for overflows itself, and finding one now and then is how it works.
        found = [] if self._scale is not None else local_gradients(parameters)
        self._is_refused = self.guard.refuses(found, self.all_ranks, self._place)
        assert self._iteration is not None
        self._iteration.record.skipped_updates = self.guard.skipped if self.guard.action == "skip" else None
        if self._is_refused:
            for p in parameters:
                p.grad = None  # an optimizer leaves a weight without gradient as it is, moments and all

    @property
    def _scale(self) -> float | None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return None if scaler is None else scaler.get_scale()

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        assert optimizer_closure is not None
        # Only the first step of an iteration, which rolls out, can tell whether there is anything to learn.
        loss = optimizer_closure()
        assert self._iteration is not None
        assert self._batch is not None
        if not self.is_idle:
            before = self._scale
            super().optimizer_step(epoch, batch_idx, optimizer, lambda: loss)
            after = self._scale
            # A gradient scaler lowers its scale when it skips a step: then no clock may move.
            if not self._is_refused and (before is None or after is None or after >= before):
                self.objective.after_update(self.policy)
                self._iteration.record.updates += 1
        self._iteration.updates_done += 1
        # Here and not at the batch's end, where a checkpoint callback may already have saved the state.
        if self._batch.is_last:
            if self._iteration.record.updates:
                self.objective.after_iteration(self.policy)
            self._iteration = None

    @property
    def _place(self) -> str:
        assert self._batch is not None
        update = self._batch.step // self._batch.micro_batches_per_update
        return f"in update {update + 1} of iteration {self._batch.iteration}"

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        self.stopwatch.start()

    def on_train_batch_end(self, outputs: Any, batch: PromptBatch, batch_idx: int) -> None:
        self.stopwatch.stop()
        # Where max_time is over, the images of this iteration are paid for: it is finished first.
        self._stops |= self.trainer.should_stop
        self.trainer.should_stop = self._stops and batch.is_last

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = {f"policy.{name}" for name in trainable_parameters(self.policy)}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trained}
        checkpoint["lit_vgrpo"] = {
            "objective": self.objective.state_dict(),
            "ledger": self.ledger.state_dict(),
            "images_seen": self.images_seen,
            "skipped_updates": self.guard.skipped,
            "stopwatch": self.stopwatch.state_dict(),
            "evaluations": [evaluation.as_dict() for evaluation in self.evaluations],
            # The images of an iteration that was cut short, so that no rollout is paid twice.
            "iteration": self._iteration.state_dict(self.all_ranks) if self._iteration is not None else None,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = {f"policy.{name}" for name in trainable_parameters(self.policy)}
        missing = trained - checkpoint["state_dict"].keys()
        if missing:
            raise RuntimeError(
                f"The checkpoint lacks {len(missing)} of {len(trained)} trained tensors, e.g. {min(missing)}. "
                "Resume with the recipe that wrote it (RUN/config.yaml)."
            )
        state = checkpoint["lit_vgrpo"]
        self.objective.load_state_dict(state["objective"])
        self.ledger.load_state_dict(state["ledger"])
        self.images_seen, self.guard.skipped = state["images_seen"], state["skipped_updates"]
        self.stopwatch.load_state_dict(state["stopwatch"])
        self.evaluations = [Evaluation(**values) for values in state["evaluations"]]
        if not self.has_trainer or self.trainer.state.fn != TrainerFn.FITTING:
            return  # only the weights are wanted
        self._resumed = True
        self._saved_iteration = state["iteration"]
        # The trainer reads its progress after on_fit_start, where it is rewound.
        self._cut_short = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
