"""The LightningModule: the paper's Algorithm 1, one iteration per training step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from pydantic import InstanceOf
from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageAggregate, AdvantageStd
from lit_vgrpo.core.batches import BATCH_SIZE, at_most
from lit_vgrpo.core.gather import count_ranks_of, image_ranks
from lit_vgrpo.core.noise import seed_of_run
from lit_vgrpo.core.ranges import BatchSize, NonNegativeFloat, Seed, checked
from lit_vgrpo.core.records import IterationRecord, PassLedger
from lit_vgrpo.core.snapshots import Snapshot, trainable_parameters
from lit_vgrpo.data.batch import PromptBatch
from lit_vgrpo.errors import counted
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.placement import in_own_precision
from lit_vgrpo.rewards import as_weighted
from lit_vgrpo.rewards.function import RewardsLike
from lit_vgrpo.rollout.iteration import Iteration, Replay
from lit_vgrpo.rollout.scores import ScoreCollector
from lit_vgrpo.system.process import bar, shows_bars
from lit_vgrpo.training.checkpoint_file import is_plain, read_sound
from lit_vgrpo.training.compilation import compile_if_it_pays
from lit_vgrpo.training.evaluation import EvaluationSpec, Evaluator
from lit_vgrpo.training.micro_batch import choose_micro_batch_size
from lit_vgrpo.training.optimizer import LRSchedulerCallable, Optimization, OptimizerCallable, OptimizerConfig
from lit_vgrpo.training.resume_guard import ResumeGuard
from lit_vgrpo.training.saved_weights import POLICY_PREFIX, load_policy, other_alpha, other_weights
from lit_vgrpo.training.settings import fitting_callbacks, hide_expected_warnings, set_up, sizes_of
from lit_vgrpo.training.strategies import precision_error
from lit_vgrpo.training.teachers import load_teachers
from lit_vgrpo.training.trainer_internals import (
    accumulating,
    call_hooks,
    move_root_dir,
    read_limits,
    read_optimizers,
    round_progress,
    set_logged_step,
    show_in_bar,
    skip_step,
)
from lit_vgrpo.training.update_guard import NonFinite, UpdateGuard

PARTS = ("ledger", "evaluator", "guard", "objective", "replay")
"""Attributes of the module whose state is saved."""
HYPERPARAMETERS = {"hyper_parameters", "datamodule_hyper_parameters"}
"""Entries of a checkpoint that ``save_hyperparameters`` makes."""
NEEDED_HOOKS = {"setup", "configure_model", "configure_callbacks", "on_fit_start", "on_train_start"}
NEEDED_HOOKS |= {"on_train_epoch_start", "on_before_optimizer_step", "on_train_epoch_end"}
NEEDED_HOOKS |= {"on_validation_start", "on_validation_epoch_end", "on_save_checkpoint", "on_load_checkpoint"}
"""Hooks that check and clip gradients, evaluate, resume and save."""


@checked
class VGRPOModule(L.LightningModule):
    """Trains a policy by manual optimization: one training step, a whole epoch, is one iteration of Algorithm 1.

    Args:
        policy: The denoising model; its weights are loaded in ``configure_model``.
        objective: The training method.
        reward: Scores the images: a reward, a function of images and prompts, or a list of them, whose mean is trained
            on; ``Weighted`` weighs several.
        optimizer: AdamW's settings, or any other optimizer, by ``class_path`` or as a function of the weights.
        untrained_reward: Scores held-out images in addition to the reward; never trained on.
        advantage_std: The std that divides advantages: the iteration's, source's, group's or none; null: the paper's.
        advantage_aggregate: Normalise the sum of the rewards, or sum each one's advantages; null follows the paper.
        evaluation: Sampling of held-out images by an ODE, optionally at another size; null uses the objective's rollout
            without noise.
        rollout_batch_size: Images per forward pass while sampling, the last batch padded; null takes all at once.
        rollout_device: Device of an iteration's latents, pairs and embeddings; cpu saves device memory.
        failed_images: Leave images that a reward failed to score out of their group, or stop with the reason.
        evaluate_at_start: Evaluate on the held-out prompts before training, also when a run resumes with others.
        non_finite: Stop at an update whose loss or gradient is not finite on any rank, or skip it on all ranks.
        seed: Seed of rollout noise, pairs and held-out noise; null uses that of ``seed_everything``, or 0.
        lr_scheduler: Any of torch's schedules, by ``class_path`` or as a function of the optimizer, stepped after every
            update; null keeps the rate constant after the warm-up.
        gradient_clip_val: Largest gradient of an update; null or 0 clips none.
        gradient_clip_algorithm: Clip by the norm of all gradients, or each by its value.

    Attributes:
        evaluator: Samples and scores held-out images; usable without a trainer.
        is_savable: A checkpoint of the current state continues the iteration, so that one can be saved after an error.
        ledger: Forward passes, images and time of the run so far.
        record: Metrics of the current or last iteration, for callbacks.
        weights_source: Another object after weights are loaded, so that what was made of the earlier ones is not used.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a subclass whose hook replaces one that a run needs: Lightning's own are empty, but not these.

        Raises:
            TypeError: A hook does not call the one that it overrides.
        """
        super().__init_subclass__(**options)
        for kind in cls.__mro__[: cls.__mro__.index(VGRPOModule)]:
            for name in NEEDED_HOOKS & vars(kind).keys():
                code = getattr(inspect.unwrap(vars(kind)[name]), "__code__", None)
                if code is not None and name not in code.co_names:
                    needed = f"{kind.__name__}.{name} replaces the method of VGRPOModule, which a run needs"
                    raise TypeError(f"{needed}. Call super().{name}(...) in it.")

    def __init__(
        self,
        policy: InstanceOf[Policy],
        objective: InstanceOf[Objective],
        reward: RewardsLike,
        optimizer: OptimizerConfig | OptimizerCallable | None = None,
        untrained_reward: RewardsLike | None = None,
        advantage_std: AdvantageStd | None = None,
        advantage_aggregate: AdvantageAggregate | None = None,
        evaluation: EvaluationSpec | None = None,
        rollout_batch_size: BatchSize | None = BATCH_SIZE,
        rollout_device: Literal["cpu"] | None = None,
        failed_images: Literal["leave_out", "stop"] = "leave_out",
        evaluate_at_start: bool = True,
        non_finite: NonFinite = "stop",
        seed: Seed | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        gradient_clip_val: NonNegativeFloat | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
    ) -> None:
        super().__init__()
        hide_expected_warnings()
        self.automatic_optimization = False
        self.policy, self.objective, self.seed = policy, objective, seed_of_run(seed)
        self.reward = as_weighted(reward, "model.reward")
        if not objective.trains_on_reward:
            self.reward = self.reward.only_logged()
        self.optimization = Optimization(optimizer, lr_scheduler)
        self.gradient_clip_val, self.gradient_clip_algorithm = gradient_clip_val, gradient_clip_algorithm
        self.advantage_std: AdvantageStd = advantage_std or objective.advantage_std
        self.advantage_aggregate: AdvantageAggregate = advantage_aggregate or objective.advantage_aggregate
        self.evaluation, self.evaluate_at_start = evaluation, evaluate_at_start
        self.unscorable: tuple[Any, list[Any], list[str]] | None = None  # prompts that were checked; errors of them
        self.rollout_batch_size, self.failed_images = rollout_batch_size, failed_images
        self.rollout_device = None if rollout_device is None else torch.device(rollout_device)

        self.ledger = ledger = PassLedger()
        stops = failed_images == "stop"
        self.scores = ScoreCollector(policy, self.reward, objective.needs_reward, stops, ledger)
        spec, queue = evaluation or objective.rollout_spec(0).as_ode(), self.scores.queue
        sampling = spec, rollout_batch_size, self.seed
        self.evaluator = Evaluator(policy, self.reward, untrained_reward, *sampling, ledger, queue)
        self.guard, self.replay = UpdateGuard(non_finite), Replay()
        self.is_resumed = self.is_savable = False
        self.saved_iteration: dict[str, Any] | None = None  # from a checkpoint, until it continues
        self.saved_metrics: dict[str, float] = {}
        self.iteration: Iteration | None = None  # None between iterations
        self.record: IterationRecord | None = None
        self.reference: Snapshot | Any = None
        self.weights_source = object()
        self.other_weights: set[str] = set()  # names of those outside the policy that are trained
        self.strict_loading = False  # checkpoints hold only trained weights

    # --- Algorithm 1 -----------------------------------------------------------------------------------------------

    @in_own_precision
    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        """Train one iteration, and return the loss of its last micro-batch.

        Callbacks may save and stop in any hook; a resumed run continues with the first unfinished update.
        """
        optimizer: Any = self.optimizers()
        loss = torch.zeros((), device=self.device)
        self.is_savable = True
        with self.ledger.training_step():
            iteration = self.iteration = self.restore(batch) or self.collect(batch)
            record = self.record = iteration.record
            for micros in iteration.remaining_updates():
                if record.has_advantage:
                    self.objective.before_update(self.policy, micros, self.ledger)
                    for micro in bar("Updating", micros, is_brief=True):
                        with accumulating(self.trainer, is_last=micro is micros[-1]):
                            loss, metrics = self.objective.loss(self.policy, micro)
                            record.add(loss, metrics, len(micro))
                            self.guard.watch(loss)
                            self.manual_backward(loss / len(micros))
                            loss = loss.detach()  # its graph would outlive the next micro-batch's
                    optimizer.step(closure=lambda loss=loss: loss)  # checks and clips in on_before_optimizer_step
                    took_step, norm = self.guard.took_step(self.trainer), self.guard.norm
                else:  # Adam would turn the KL's rounding error into full-size steps
                    took_step, norm = skip_step(self.trainer), None
                iteration.end_update(took_step, norm)
                if took_step:
                    self.objective.after_update(self.policy)
                if iteration.is_over and record.updates:
                    self.objective.after_iteration(self.policy)
                self.optimization.step(self.trainer.lr_scheduler_configs, self.trainer.global_step)
                call_hooks(self.trainer, "on_before_zero_grad", self.trainer.optimizers[0])
                self.is_savable = True
                optimizer.zero_grad()
            self.is_savable, self.iteration = False, None
        set_logged_step(self.trainer, remaining=0)
        return loss

    def restore(self, batch: PromptBatch) -> Iteration | None:
        """Return the unfinished iteration of the checkpoint that the run resumed from, once."""
        saved, self.saved_iteration = self.saved_iteration, None
        return None if saved is None else Iteration.restored(saved, batch, self.rollout_device or self.device)

    def collect(self, batch: PromptBatch) -> Iteration:
        """Roll out, score, compare within groups, and prepare what the updates need."""
        request = batch.request(self.seed, at_most(batch.images, self.rollout_batch_size))
        sampled = self.objective.rollout_batches(self.policy, request)
        with self.scores.collecting(sampled, len(batch.slots) * len(batch.members)) as batches:
            for images in batches:
                self.scores.submit(images, batch)  # scored while the next images are sampled
            rollout, scores = self.scores.result()
        advantages, record = self.scores.compare(rollout, scores, self.advantage_std, self.advantage_aggregate)
        iteration = Iteration.prepared(
            self.objective, self.policy, rollout, advantages, record, batch, self.ledger, self.replay, self.reward
        )
        self.ledger.images += len(scores)
        self.ledger.unscored += int(record.rewards.isnan().sum()) if self.objective.needs_reward else 0
        return iteration

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.guard.check(self.trainer, self.policy, f"in {self.iteration}")
        self.is_savable = False
        self.configure_gradient_clipping(optimizer, self.gradient_clip_val, self.gradient_clip_algorithm)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log as in Lightning, which finds no size in a batch of prompts; in training it is the whole epoch."""
        if self.training and kwargs.get("batch_size") is None:
            kwargs["batch_size"] = 1
        super().log(*args, **kwargs)

    def on_train_epoch_start(self) -> None:
        set_logged_step(self.trainer, remaining=sizes_of(self.trainer).updates_per_iteration)

    def on_train_epoch_end(self) -> None:
        metrics, newest = {**self.evaluator.latest, **self.trainer.callback_metrics}, self.evaluator.history[-1:]
        iterations = self.trainer.current_epoch + 1
        is_evaluated = any(one.iteration == iterations for one in newest)
        self.optimization.end_epoch(self.trainer.lr_scheduler_configs, iterations, metrics, is_evaluated)

    @property
    def iterations_done(self) -> int:
        """Number of finished iterations, also in the hooks that run before the trainer counts the last one."""
        return self.trainer.current_epoch if self.record is None else self.record.iteration + (self.iteration is None)

    def on_train_end(self) -> None:
        if course := self.evaluator.course:
            rank_zero_info(f"{course}.")  # the command hides it, since RunSummary says more there

    # --- held-out images -------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Evaluate the weights, or their EMA, on the held-out prompts, on every rank; return {} if there are none."""
        return self.evaluator.evaluate(self)

    def on_validation_start(self) -> None:
        self.evaluator.start_over()

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:  # a part of the images
            self.evaluator.add(batch)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            means = self.evaluator.finish(self)
            self.log_dict(means)
            if "heldout/reward" in means:
                show_in_bar(self.trainer, "held-out", means["heldout/reward"])

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
            self.is_resumed, self.saved_iteration = False, None
            set_up(self)
            read_optimizers(self, self.keep_optimizers)
        elif error := precision_error(self.trainer.strategy):
            raise ValueError(error)

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

        shows_bars.set(False)  # until ProgressBar's setup
        return fitting_callbacks(self.trainer, RewardLogger, ResumeGuard)

    def configure_optimizers(self) -> Any:
        if self.reference is None:
            raise RuntimeError("VGRPOModule works only as the trainer's module. Subclass it instead of wrapping it.")
        return self.optimization.build(trainable_parameters(self.policy).values())

    def keep_optimizers(self, optimizers: list[Any], schedules: list[dict[str, Any]]) -> None:
        """Keep what checkpoints and schedules need of the result of ``configure_optimizers``; ValueError if it fails.

        Raises:
            RuntimeError: The run resumed from a checkpoint without some of the trained weights.
        """
        self.optimization.keep(optimizers, schedules)
        others = other_weights(self, optimizers[0], self.trainer.strategy)
        if self.is_resumed:
            self._refuse_missing(others - self.other_weights)
        self.other_weights = others

    def on_fit_start(self) -> None:
        self.iteration, self.record = None, None
        self.optimization.watch(self.trainer.lr_scheduler_configs)
        self.zero_grad()  # of an update that an exception ended
        for copy in (self.reference, *self.objective.copies.values()):
            copy.follow()
        self.reward.enter_run(move_root_dir(self.trainer))
        if not self.is_resumed and self.trainer.global_step == 0:  # no state of an earlier fit
            self.evaluator.load_state_dict({"history": [], "contents": {}, "starts": {}})
            self.ledger.load_state_dict(PassLedger().state_dict())
            self.guard.load_state_dict(UpdateGuard().state_dict())
            self.objective.start_over(self.policy)
            self.replay = Replay()
        elif not self.is_resumed and self.ledger.images:
            known = f"This fit continues after {counted(self.trainer.global_step, 'optimizer step')}"
            lost = "the optimizer's state and the learning-rate schedule start over, as in every fit of Lightning"
            rank_zero_warn(f"{known}, but {lost}. To continue exactly, pass ckpt_path to fit.")
        compile_if_it_pays(self)
        choose_micro_batch_size(self)
        if not self.is_resumed and self.evaluate_at_start:
            read_limits(self.trainer)  # before the first image, and not after the evaluation
            self.evaluator.evaluate(self, logs=True)

    def on_train_start(self) -> None:
        self.optimization.start(self.trainer.lr_scheduler_configs, self.is_resumed)
        if self.is_resumed:
            known = {name: torch.tensor(value) for name, value in self.saved_metrics.items()}
            self.trainer.callback_metrics.update(known)  # for the end of an iteration that was evaluated

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep only the trained weights in a checkpoint, and add the state of the run; all ranks must call it."""
        trained = self._trained_names()
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}
        # Include the images of an unfinished iteration, so that no rollout is repeated.
        iteration = self.saved_iteration if self.iteration is None else self.iteration.state_dict()
        if round_progress(checkpoint) and self.record is not None:
            iteration = {"record": self.record.state_dict()}  # its evaluation and its end are missing
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        checkpoint["lit_vgrpo"] = {name: getattr(self, name).state_dict() for name in PARTS} | {"iteration": iteration}
        checkpoint["lit_vgrpo"] |= {"pipeline": self.policy.description(), "lora_alpha": self.policy.lora_alpha}
        checkpoint["lit_vgrpo"] |= {"metrics": metrics}
        for key in HYPERPARAMETERS & checkpoint.keys():
            others = [name for name, value in checkpoint[key].items() if not is_plain(value)]
            checkpoint[key] = {name: value for name, value in checkpoint[key].items() if name not in others}
            if others:  # such as the policy, if a subclass calls save_hyperparameters()
                what = f"Checkpoints leave out hyperparameters that are not plain values: {', '.join(others)}"
                rank_zero_warn(f"{what}. Pass them to load_from_checkpoint.")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the state of the run, and let ``fit`` continue it.

        Raises:
            RuntimeError: Trained weights are missing, or are of another method, pipeline or ``lora_alpha``.
        """
        self.weights_source = object()  # not every strategy calls load_state_dict
        state, saved = checkpoint["lit_vgrpo"], checkpoint["state_dict"].keys()
        self.other_weights = {name for name in saved if not name.startswith(POLICY_PREFIX)}
        self._refuse_missing(self._trained_names() - saved)
        if error := other_alpha(state["lora_alpha"], self.policy):
            raise RuntimeError(f"The checkpoint was {error}")
        for before, now in zip(state["pipeline"], self.policy.description(), strict=False):
            if without_sizes(before) != without_sizes(now):
                raise RuntimeError(
                    f"The pipeline is used in another way than in the run so far: {now!r}, but {before!r} before. "
                    "Resume with the same diffusers version and model.policy.checkpoint."
                )
        stage: str | None = "fit"
        with suppress(RuntimeError):  # without a trainer
            stage = self.trainer.state.fn
            self.is_resumed = stage == "fit"
        if stage != "fit":  # an evaluation does not change the run's history
            self.evaluator.add_starts(state["evaluator"])
            return
        for name in PARTS:
            getattr(self, name).load_state_dict(state[name])
        if self.is_resumed:
            self.saved_iteration = state["iteration"]
            self.saved_metrics = state.get("metrics", {})  # an earlier version saved none

    def _trained_names(self) -> set[str]:
        return {f"{POLICY_PREFIX}{name}" for name in trainable_parameters(self.policy)} | self.other_weights

    def _refuse_missing(self, missing: Set[str]) -> None:
        if missing:
            total = len(self._trained_names() | missing)
            raise RuntimeError(
                f"The checkpoint lacks {len(missing)} of {total} trained tensors, e.g. {min(missing)}. "
                "Resume with the recipe that wrote it (RUN/config.yaml)."
            )

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Return the module with a checkpoint's weights, after checking the file; other arguments as the class's."""
        given = {*kwargs, *read_sound(Path(checkpoint_path)).get("hyper_parameters", ())}
        own = inspect.signature(cls).parameters.keys()
        if missing := [name for name in ("policy", "objective", "reward") if name in own and name not in given]:
            call = f"{cls.__name__}.load_from_checkpoint(path, {', '.join(f'{name}=...' for name in missing)})"
            raise TypeError(f"A checkpoint has the trained weights, but not the module's parts. Pass them: {call}")
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.weights_source = object()
        self.configure_model()  # spawned processes return their weights to a process that has loaded none
        keys, trained = super().load_state_dict(state_dict, *args, **kwargs), self._trained_names()
        keys.missing_keys[:] = [name for name in keys.missing_keys if name in trained]  # Lightning warns of the others
        return keys


def without_sizes(line: str) -> str:
    """Return a line without the sizes in brackets, which may change when a run is resumed.

    >>> without_sizes("latents: [4, 16, 12], passed as [48, 16]")
    'latents: [n, n, n], passed as [n, n]'
    """
    return re.sub(r"(?<=[\[ ])\d+(?=, \d|\])", "n", line)
