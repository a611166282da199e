"""The LightningModule: the paper's Algorithm 1, one iteration an epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from lit_vgrpo.advantages import combined_advantages
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.ledger import PassLedger
from lit_vgrpo.objectives.base import Objective, update_order
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.record import Evaluation, IterationRecord, Stopwatch, timed
from lit_vgrpo.rewards import Reward, RewardBatch, RewardError, as_weighted
from lit_vgrpo.rollout import STREAM_HELDOUT, Experience, Rollout, RolloutSpec, image_generators, sample
from lit_vgrpo.sizes import Sizes
from lit_vgrpo.snapshots import Snapshot, trainable_parameters


@dataclass
class OptimizerConfig:
    """AdamW over the trainable weights.

    Args:
        lr: learning rate after warm-up; constant from there on.
        betas: decay of the first and second moment.
        weight_decay: decoupled weight decay.
        eps: term added to the denominator.
        warmup_steps: optimizer steps over which the rate rises linearly.
    """

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 1e-4
    eps: float = 1e-8
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"model.optimizer.lr={self.lr} does not train. Use a positive number such as 3e-4.")
        if self.warmup_steps < 0:
            raise ValueError(f"model.optimizer.warmup_steps={self.warmup_steps} is negative. Use 0 or more.")


class VGRPOModule(L.LightningModule):
    """Holds the policy, its frozen reference and the objective; rolls out and trains inside ``training_step``.

    One epoch is one iteration. Its first step rolls out, scores and prepares; every step takes one micro-batch of that
    and returns its loss, so that Lightning accumulates, clips and steps as in any other run.

    Args:
        policy: the denoising model; its weights load in ``configure_model``.
        objective: the training method.
        reward: what images are scored by; ``Weighted`` combines several.
        optimizer: AdamW's settings.
        advantage_std: divide advantages by the std of the whole iteration, or of the group; null as the method's paper.
        advantage_aggregate: with several rewards, sum the rewards and then normalise, or normalise each and sum the
            advantages; null as the method's paper.
        evaluation: how held-out images are sampled, by an ODE; null takes the objective's rollout, without noise.
        rollout_batch_size: images a network pass while sampling; null takes all of a rank's at once.
        evaluate_at_start: score the held-out prompts once before training.
        seed: fixes all rollout noise, pairs and held-out noise.
    """

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        reward: Reward,
        optimizer: OptimizerConfig | None = None,
        advantage_std: Literal["global", "group"] | None = None,
        advantage_aggregate: Literal["rewards", "advantages"] | None = None,
        evaluation: RolloutSpec | None = None,
        rollout_batch_size: int | None = None,
        evaluate_at_start: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.objective = objective
        self.reward = as_weighted(reward)
        self.optimizer_config = optimizer or OptimizerConfig()
        self.advantage_std: Literal["global", "group"] = advantage_std or objective.advantage_std
        self.advantage_aggregate: Literal["rewards", "advantages"] = (
            advantage_aggregate or objective.advantage_aggregate
        )
        self.evaluation = evaluation
        self.rollout_batch_size = rollout_batch_size
        self.evaluate_at_start = evaluate_at_start
        self.seed = seed
        self.ledger = PassLedger()
        self.images_seen = 0
        self.record: IterationRecord | None = None
        self.heldout: dict[str, float] = {}
        self.heldout_step = -1
        self.evaluations: list[Evaluation] = []
        self.stopwatch = Stopwatch()
        self.reference: Snapshot | None = None
        self._steps: list[Experience] = []
        self._heldout_scores: list[RewardBatch] = []
        self._resumed = False
        self._is_last_step = False
        self._has_moved = False
        # Checkpoints hold only what is trained; the frozen rest comes from the policy's own checkpoint.
        self.strict_loading = False

    # --- set-up ----------------------------------------------------------------------------------------------------

    def check(self, sizes: Sizes) -> list[str]:
        """Faults of the policy, the objective and the reward that can be found without loading weights."""
        faults = [*self.policy.check(), *self.reward.check()]
        family, method = type(self.policy).__name__, type(self.objective).__name__
        if self.policy.path_kind not in self.objective.path_kinds:
            path = {"flow": "a rectified flow", "vp": "a variance-preserving path"}[self.policy.path_kind]
            return [*faults, f"model.objective={method} does not work on {family}: it is not defined on {path}."]
        faults += self.objective.check(sizes)
        spec = self.objective.rollout_spec(0)
        known = self.policy.sde_solvers if spec.is_sde else self.policy.solvers
        if spec.solver not in known:
            options = " or ".join((*self.policy.solvers, *self.policy.sde_solvers))
            faults.append(f"model.objective.rollout.solver={spec.solver} is not a solver of {family}. Use {options}.")
        if self.evaluation is not None and self.evaluation.solver not in self.policy.solvers:
            options = " or ".join(self.policy.solvers)
            faults.append(
                f"model.evaluation.solver={self.evaluation.solver} is not an ODE solver of {family}. Use {options}."
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
        for fault in self.check(sizes):
            raise ValueError(fault)
        needed = sizes.plan(self.trainer.world_size).micro_batches_per_update
        if self.trainer.accumulate_grad_batches not in (1, needed):
            raise ValueError(
                f"trainer.accumulate_grad_batches={self.trainer.accumulate_grad_batches} is set by the sizes. "
                "Leave it out; use data.micro_batch_size."
            )
        self.trainer.accumulate_grad_batches = needed

    def configure_model(self) -> None:
        if self.reference is not None:
            return
        self.policy.load()
        self.ledger.attach(self.policy.network)
        self.objective.setup(self.policy)
        # A method that needs the start holds it already; one copy of it is enough.
        self.reference = self.objective.copies.get("reference") or Snapshot(self.policy, device="cpu")

    def configure_optimizers(self) -> Any:
        config = self.optimizer_config
        optimizer = torch.optim.AdamW(
            list(trainable_parameters(self.policy).values()),
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            eps=config.eps,
        )
        if not config.warmup_steps:
            return optimizer
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / config.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    # --- Algorithm 1 -----------------------------------------------------------------------------------------------

    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        if batch.is_first:
            experience = self.collect(batch)
            self._steps = experience.micro_batches(batch.micro_batch_size)
        self._is_last_step = batch.is_last
        position, per_update = batch.step % len(self._steps), batch.micro_batches_per_update
        if position % per_update == 0:
            self.objective.before_update(self.policy, self._steps[position : position + per_update], self.ledger)
        micro = self._steps[position]
        loss, metrics = self.objective.loss(self.policy, micro)
        assert self.record is not None
        self.record.add(loss, metrics)
        return loss

    def collect(self, batch: PromptBatch) -> Experience:
        """Roll out, score, compare within groups, and prepare what the updates need."""
        seconds: dict[str, float] = {}
        with self.ledger.phase("rollout"), timed(seconds, "rollout"):
            rollout = self.objective.collect(
                self.policy,
                batch.prompts,
                batch.rows,
                batch.slots,
                batch.group_size,
                batch.iteration,
                self.seed,
                self.rollout_batch_size,
            )
        self.record, advantages = self.score(batch, rollout, seconds)
        with timed(seconds, "prepare"):
            experience = self.objective.prepare(
                self.policy,
                rollout,
                advantages,
                micro_batch_size=batch.micro_batch_size,
                updates=batch.updates,
                ledger=self.ledger,
            )
        if not batch.split_updates:
            return experience
        order = update_order(len(batch.prompts), batch.group_size, batch.updates)
        self.record.local_group_ids = self.record.local_group_ids[order]
        return experience.select(order.to(experience.latents.device))

    def score(self, batch: PromptBatch, rollout: Rollout, seconds: dict[str, float]) -> tuple[IterationRecord, Tensor]:
        """Reward every image and compare it with its group; statistics are those of all ranks' images.

        Raises:
            RewardError: every image of the iteration failed.
        """
        scores = self._decode_and_score(batch, rollout, seconds)
        rewards, group_ids = self.all_ranks(scores.total.cpu()), self.all_ranks(rollout.group_ids)
        self.images_seen += len(rewards)
        if rewards.isnan().all():
            name, message = next(iter(scores.errors.items()), (self.reward.part_names[0], "no message on this rank"))
            raise RewardError(
                f"Every image of iteration {batch.iteration} failed, so there is nothing to learn. "
                f'Reward "{name}": {message}'
            )
        parts = {name: self.all_ranks(part.cpu()) for name, part in scores.parts.items()}
        advantages = combined_advantages(
            rewards,
            parts,
            self.reward.weight_of,
            group_ids,
            std=self.advantage_std,
            aggregate=self.advantage_aggregate,
        )
        local = slice(self.global_rank * len(rollout), (self.global_rank + 1) * len(rollout))
        record = IterationRecord(
            iteration=batch.iteration,
            rewards=rewards,
            group_ids=group_ids,
            parts={name: _nanmean(part) for name, part in parts.items()},
            errors=scores.errors,
            local_group_ids=rollout.group_ids,
            images=len(rewards),
            seconds=seconds,
        )
        return record, advantages[local].to(self.device)

    def _decode_and_score(self, batch: PromptBatch, rollout: Rollout, seconds: dict[str, float]) -> RewardBatch:
        """Scores of this rank's images; pixels exist for one decoded batch at a time."""
        if not self.objective.needs_reward:
            return RewardBatch(torch.zeros(len(rollout)), {}, torch.ones(len(rollout), dtype=torch.bool))
        prompts = [prompt for prompt in batch.prompts for _ in range(batch.group_size)]
        rows = [row for row in batch.rows for _ in range(batch.group_size)]
        scored = []
        for start in range(0, len(rollout), self.policy.decode_batch_size):
            part = slice(start, start + self.policy.decode_batch_size)
            with timed(seconds, "decode"):
                images = self.policy.decode(rollout.latents[part])
            with timed(seconds, "reward"):
                scored.append(self.reward.score(images, prompts[part], rows[part]))
        return RewardBatch.joined(scored)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = scaler.get_scale() if scaler is not None else 0.0
        super().optimizer_step(*args, **kwargs)
        # A gradient scaler lowers its scale when it skips a step: then no clock may move.
        if scaler is None or scaler.get_scale() >= scale:
            self.objective.after_update(self.policy)
            self._has_moved = True
        # Here and not at the batch's end, where a checkpoint callback may already have saved the state.
        if self._is_last_step:
            if self._has_moved:
                self.objective.after_iteration(self.policy)
            self._has_moved = False
            self._steps = []

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        self.stopwatch.start()

    def on_train_batch_end(self, outputs: Any, batch: PromptBatch, batch_idx: int) -> None:
        self.stopwatch.stop()

    def all_ranks(self, values: Tensor) -> Tensor:
        """Concatenate every rank's ``(B, ...)`` in rank order, on the CPU."""
        if self._trainer is None or self.trainer.world_size == 1:
            return values
        gathered = self.all_gather(values.to(self.device))
        assert isinstance(gathered, Tensor)
        return gathered.flatten(0, 1).cpu()

    # --- evaluation ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, prompts: list[str], image_ids: list[int]) -> Tensor:
        """Held-out images ``(B, 3, H, W)`` in [0, 1]; the noise depends on the seed and ``image_ids`` alone."""
        spec = self.evaluation or self.objective.rollout_spec(self.current_epoch if self._trainer else 0).as_ode()
        conditioning, rows = self.policy.encode_each(prompts)
        noise = self.policy.prior(image_generators(STREAM_HELDOUT, self.seed, 0, image_ids))
        latents, _ = sample(self.policy, conditioning, rows, spec, noise, self.rollout_batch_size)
        return self.policy.decode(latents)

    def on_fit_start(self) -> None:
        if self.evaluate_at_start and not self._resumed and self.evaluate():
            for logger in self.loggers:
                logger.log_metrics(self.heldout, step=0)

    def evaluate(self) -> dict[str, float]:
        """Score the held-out prompts with the weights as they are, on every rank; empty without held-out prompts."""
        for index, batch in enumerate(self.trainer.datamodule.val_dataloader()):  # type: ignore[attr-defined]
            self.validation_step(batch, index)
        if self._heldout_scores:
            self._finish_heldout()
        return self.heldout

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        with self.ledger.phase("evaluation"):
            images = self.generate(batch.prompts, batch.slots)
        self._heldout_scores.append(self.reward.score(images, batch.prompts, batch.rows))

    def on_validation_epoch_end(self) -> None:
        self._finish_heldout()
        self.log_dict(self.heldout)

    def _finish_heldout(self) -> None:
        """Mean held-out reward and parts over all ranks, into ``self.heldout``."""
        scores = RewardBatch.joined(self._heldout_scores)
        self._heldout_scores = []
        totals = {"heldout/reward": scores.total, **{f"heldout/{name}": part for name, part in scores.parts.items()}}
        sums = torch.stack([torch.stack([v.nansum(), (~v.isnan()).sum()]) for v in totals.values()]).double()
        sums = self.all_ranks(sums[None]).sum(dim=0)
        means = (sums[:, 0] / sums[:, 1]).tolist()
        self.heldout = dict(zip(totals, means, strict=True))
        self.heldout_step = self.trainer.global_step
        evaluation = Evaluation(
            # The trainer's own count is behind by one while an epoch is being validated.
            iteration=self.record.iteration + 1 if self.record is not None else self.trainer.current_epoch,
            reward=means[0],
            images=self.images_seen,
            passes=self.ledger.training_passes() * self.trainer.world_size,
            train_seconds=self.stopwatch.wall_s,
            cpu_seconds=self.stopwatch.cpu_s,
        )
        self.evaluations.append(evaluation)

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = {f"policy.{name}" for name in trainable_parameters(self.policy)}
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k in trained}
        checkpoint["lit_vgrpo"] = {
            "objective": self.objective.state_dict(),
            "ledger": self.ledger.state_dict(),
            "images_seen": self.images_seen,
            "stopwatch": self.stopwatch.state_dict(),
            "evaluations": [evaluation.as_dict() for evaluation in self.evaluations],
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = {f"policy.{name}" for name in trainable_parameters(self.policy)}
        missing = trained - checkpoint["state_dict"].keys()
        if missing:
            raise RuntimeError(
                f"The checkpoint lacks {len(missing)} of {len(trained)} trained tensors, e.g. {min(missing)}. "
                "Resume with the recipe that wrote it (RUN/config.yaml)."
            )
        self._resumed = True
        # The images of an iteration are not saved: one that was cut short starts over, with the same noise.
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        if not progress["is_last_batch"]:
            progress["current"] = dict.fromkeys(progress["current"], 0)
            progress["total"] = dict.fromkeys(progress["total"], progress["total"]["completed"])
        state = checkpoint["lit_vgrpo"]
        self.objective.load_state_dict(state["objective"])
        self.ledger.load_state_dict(state["ledger"])
        self.images_seen = state["images_seen"]
        self.stopwatch.load_state_dict(state["stopwatch"])
        self.evaluations = [Evaluation(**values) for values in state["evaluations"]]


def _nanmean(values: Tensor) -> float:
    return float(values.nanmean()) if len(values) else math.nan
