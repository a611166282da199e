"""Checks of a module's settings against each other and the trainer's, before weights are loaded."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_vgrpo.core.batches import at_most
from lit_vgrpo.core.gather import image_ranks
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.errors import OWN_FOLDERS, counted, one_line, setting
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.loading import distillation_warning
from lit_vgrpo.policies.meta import policy_on_meta
from lit_vgrpo.rewards import Weighted
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.evaluation import TrainingModule
from lit_vgrpo.training.saved_weights import policy_errors
from lit_vgrpo.training.sharded import FSDP2, ZeRO
from lit_vgrpo.training.strategies import launcher_error, strategy_errors
from lit_vgrpo.training.teachers import teacher_errors
from lit_vgrpo.training.trainer_internals import callbacks_of, declared, saves_by_time

TRAINER_DEFAULTS = {"num_sanity_val_steps": 0, "log_every_n_steps": 1, "enable_model_summary": False}
"""Defaults of the Trainer's options for a recipe, where they differ from Lightning's."""
EXPECTED_WARNINGS = (
    ".*does not have many workers.*",  # the loader yields prompts: there is nothing to prefetch
    ".*module\\(s\\) in eval mode at the start.*",  # a policy is trained as it samples, without dropout
    ".*smaller than the logging interval.*",  # metrics are logged per iteration
    ".*across ranks is zero.*",  # no held-out prompts: nothing to evaluate
    ".*sync_dist=True.*",  # metrics are already computed over all ranks
    ".*all_gather(_tensor`)? is deprecated.*",
    ".*LeafSpec.*is deprecated.*",
)

UNFIT_CALLBACKS = {
    "BaseFinetuning": "It freezes weights before they are loaded. Use the policy's train_only",
    "GradientAccumulationScheduler": "Use data.updates_per_iteration and data.micro_batch_size",
    "BatchSizeFinder": "An iteration has no batch size. Use data.micro_batch_size=auto",
    "LearningRateFinder": "Compare runs: lightning compare --sweep",
    "StochasticWeightAveraging": "Use lit_vgrpo.callbacks.EMA",
    "WeightAveraging": "Use lit_vgrpo.callbacks.EMA",
    "ModelPruning": "Leave it out",
}
"""Lightning's callbacks that would train wrongly, with replacements; not every version has them all."""


def set_up(module: TrainingModule) -> None:
    """Check a module's settings, and raise ValueError for the first error; make its trainer run whole iterations."""
    trainer, sizes = declared(module.trainer), sizes_of(module.trainer)
    data = trainer.datamodule
    for error in errors_under(module, trainer, sizes, data.has_heldout) or prompt_errors(module, data):
        raise ValueError(error)
    if iterations := int(trainer.fast_dev_run):  # it counts batches and optimizer steps, not epochs
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = iterations, -1
        images = sizes.plan(image_ranks(trainer)[1]).images_per_iteration
        rank_zero_info(f"fast_dev_run: {iterations} whole iteration(s) of {images} images each.")
    unscorable = [line for found in find_unscorable(module, data) for line in found.lines()]
    others = distillation_warning(module.policy), data.sets.heldout_warning(), crowding_warning(trainer)
    for warning in (*unscorable, *filter(None, others)):
        rank_zero_warn(warning)


HELD_OUT = "held-out prompts"


@dataclass
class UnscorablePrompts:
    """Prompts of a run that its rewards cannot score."""

    what: str = "prompts"  # in messages
    prompts: int = 0  # number that was checked
    weighted: frozenset[str] = frozenset()  # names of the rewards that count
    unknown: list[str] = field(default_factory=list)  # errors of rows that name an unknown reward
    numbers: Counter[str] = field(default_factory=Counter)  # of prompts with an error, by the reward's name
    first: dict[str, str] = field(default_factory=dict)  # error of the first of them

    @classmethod
    def of(cls, reward: Weighted, rows: Iterable[Mapping[str, Any]], what: str = "prompts") -> UnscorablePrompts:
        """Check every prompt with every reward that applies to it."""
        rows = list(rows)
        weighted = frozenset(name for name, weight in reward.weight_of.items() if weight)
        found = cls(what, len(rows), weighted, reward.name_errors(rows))
        for row in rows:
            for name, error in reward.errors_of_prompt(row["prompt"], dict(row)).items():
                found.numbers[name] += 1
                found.first.setdefault(name, error)
        return found

    def lines(self) -> list[str]:
        """Return a line for each reward that cannot score some prompts."""
        return [
            f'Reward "{name}" cannot score {self.numbers[name]} of {self.prompts} {self.what}. The first: {error}'
            for name, error in self.first.items()
        ]

    def refused(self, any_failure: bool) -> list[str]:
        """Return the errors that stop a run: those of a reward that counts and cannot score any prompt.

        With ``any_failure``, one prompt is enough, unless it is held out.
        """
        fewest = 1 if any_failure and self.what != HELD_OUT else self.prompts
        lines = zip(self.first, self.lines(), strict=True)
        return [*self.unknown, *(x for name, x in lines if name in self.weighted and self.numbers[name] >= fewest)]


def find_unscorable(module: TrainingModule, data: PromptDataModule) -> list[UnscorablePrompts]:
    """Return the training and held-out prompts that the rewards cannot score; the module keeps those of its data.

    It also keeps the error of the first row that the method cannot use.
    """
    if module.unscorable is None or module.unscorable[0] is not data.sets:
        found, observed = list[UnscorablePrompts](), module.evaluator.observed
        for name, rows in data.sets.rows_by_source() if module.objective.needs_reward else ():
            source = f" of the source {name} (its option rewards names the rewards that apply)" if name else ""
            found.append(UnscorablePrompts.of(module.reward, rows, f"prompts{source}"))
        if data.has_heldout:
            found.append(UnscorablePrompts.of(observed, data.heldout_rows(), HELD_OUT))
        of_rows = map(module.objective.row_error, map(deepcopy, data.training_rows()))
        module.unscorable = data.sets, found, [*islice(filter(None, of_rows), 1)]
    return module.unscorable[1]


def reward_errors(module: TrainingModule, data: PromptDataModule) -> list[str]:
    """Return one line for each reward that cannot be used with the prompts."""
    stops = module.failed_images == "stop"
    return [error for found in find_unscorable(module, data) for error in found.refused(stops)]


def prompt_errors(module: TrainingModule, data: PromptDataModule) -> list[str]:
    """Return one line for each reward or method that cannot be used with the prompts."""
    of_rewards = reward_errors(module, data)
    assert module.unscorable is not None
    return [*of_rewards, *module.unscorable[2]]


def crowding_warning(trainer: Trainer) -> str | None:
    """Return a line about more processes than CPU cores, or ``None``."""
    count, cores = trainer.num_devices, os.cpu_count() or trainer.num_devices
    if trainer.strategy.root_device.type != "cpu" or count <= cores:
        return None
    return f"{count} processes share {counted(cores, 'CPU core')}. Lower trainer.devices."


def errors_under(module: TrainingModule, trainer: Trainer, sizes: Sizes, has_heldout: bool) -> list[str]:
    """Return the module's errors and those that depend on the trainer or on held-out prompts."""
    if (dtype := torch.get_default_dtype()) != torch.float32:
        return [f"torch's default type is {dtype}. Training needs torch.set_default_dtype(torch.float32)."]
    ranks, optimization = image_ranks(trainer)[1], module.optimization
    launcher, algorithm = launcher_error(trainer.num_devices * trainer.num_nodes), module.gradient_clip_algorithm
    errors = [
        *([] if launcher is None else [launcher]),
        *strategy_errors(trainer.strategy, module.policy, optimization.optimizer, sizes, algorithm),
        *module_errors(module, sizes),
    ]
    if module.reward.compares and has_heldout and module.evaluator.observed.compares:
        errors.append(
            "model.reward compares images of a group and scores no held-out images. Set the model's untrained_reward "
            f"to one that does, such as PickScore, or train without evaluations: {setting('data', heldout=None)}."
        )
    fits = not sizes.errors(ranks)  # their errors are the data module's
    if module.reward.compares and fits and sizes.plan(ranks).ranks_per_group > 1:
        errors.append(
            f"model.reward compares whole groups, but {ranks} ranks split each group. "
            f"Use at most {sizes.prompts_per_iteration} ranks."
        )
    late = [limit_error(module, trainer, sizes, has_heldout), graph_error(module, trainer, sizes)] if fits else []
    return [*errors, *teacher_errors(module.objective, module.policy), *filter(None, late)]


def graph_error(module: TrainingModule, trainer: Trainer, sizes: Sizes) -> str | None:
    """Return why the rollout's graph cannot be kept until the update, or ``None``."""
    if not module.objective.trains_on_rollout_passes:
        return None
    plan, where = sizes.plan(image_ranks(trainer)[1]), "model.objective.reuse_rollout=true"
    images, batch = plan.images_per_rank, module.rollout_batch_size
    if isinstance(trainer.strategy, FSDP2 | ZeRO):
        name = type(trainer.strategy).__name__
        return f"{where} keeps a graph from the rollout to the update, untested under {name}. Use trainer.strategy=ddp."
    if (plan.micro_batch_size, at_most(plan.images_per_iteration, batch) or images) == (images, images):
        return None
    return (
        f"{where} needs the {images} images of a rank in one batch, but data.micro_batch_size={sizes.micro_batch_size} "
        f"and model.rollout_batch_size={batch}. Set them to {images} and null, or reuse_rollout=false."
    )


def module_errors(module: TrainingModule, sizes: Sizes) -> list[str]:
    """Return one line for each error in a module's settings that does not depend on the trainer."""
    policy, objective, evaluator = module.policy, module.objective, module.evaluator
    errors = policy_errors(policy, [objective.rollout_spec(0), evaluator.spec])  # makes the draft
    draft = policy.draft
    return [
        *errors,
        *dict.fromkeys((*module.reward.check(), *evaluator.observed.check())),
        *module.optimization.check(trainable_parameters(draft).values() if isinstance(draft, Policy) else ()),
        *objective.policy_errors(policy),
        *objective.check(sizes),
        *_misfits(module),
    ]


def _misfits(module: TrainingModule) -> Iterator[str]:
    """Yield one line for each part that does not fit another: policy, objective, rewards, evaluation."""
    policy, objective, spec, name = module.policy, module.objective, module.evaluation, type(module.policy).__name__
    if spec is not None and spec.solver not in (None, *policy.solvers):
        solvers = " or ".join(policy.solvers)
        yield f"model.evaluation.solver={spec.solver} is not an ODE solver of {name}. Use {solvers}."
    elif spec is not None:
        if spec.shared_noise:
            yield "model.evaluation.shared_noise has no effect: held-out images form no groups. Leave it out."
        yield from _size_errors(policy, module.evaluator.sides)
    scales = {
        "model.objective.rollout.guidance": objective.rollout_spec(0).guidance,
        "model.objective.training_guidance": objective.guidance_in("training", None),
        "model.objective.reference_guidance": objective.guidance_in("reference", None),
        "model.evaluation.guidance": 1.0 if spec is None else spec.guidance,
    }
    if (error := policy.guidance_error()) is not None:
        yield from [f"{key}={scale:g}: {error}" for key, scale in scales.items() if scale != 1.0][:1]
    if objective.takes_reward_gradient and not module.reward.differentiable:
        method, names = type(objective).__name__, ", ".join(module.reward.part_names)
        yield (
            f"model.objective={method} trains on the reward's gradient, but model.reward ({names}) has none. Use one "
            "such as PickScore, HPSv2, ImageReward or SmoothShapesReward, or a function with differentiable: true."
        )
    videos = [part.name for part in module.evaluator.observed.parts if part.reward.takes_videos]
    if videos and policy.num_frames is None:
        yield f"The reward {videos[0]} scores videos, but {name} makes images. Use another reward, such as PickScore."


def _size_errors(policy: Policy, sides: tuple[int | None, int | None]) -> list[str]:
    """Return why a policy cannot sample held-out images of a size, if its configuration files are on this machine."""
    if sides == (None, None):
        return []
    try:
        twin = policy if policy.loaded else policy_on_meta(policy)
    except Exception:  # files that are not here yet, or an error that loading reports
        return []
    try:
        with twin.sized(*sides):
            return []
    except LoadError as error:
        return [str(error)]


def gradient_note(module: TrainingModule) -> list[str]:
    """Return a line that names the rewards without gradient, if the method trains on the others' gradients."""
    trained = [part.name for part in module.reward.differentiable_parts]
    logged = [part.name for part in module.reward.parts if part.weight and part.name not in trained]
    if not (module.objective.takes_reward_gradient and trained and logged):
        return []
    return [f"Trained on the gradient of {', '.join(trained)}; {', '.join(logged)} has none and is only logged."]


def hide_expected_warnings() -> None:
    """Hide warnings of Lightning that do not apply to this module, in any Trainer."""
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


_format_warning = warnings.formatwarning


def format_warning(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Format a warning of this package without the line of code that gave it, as Lightning formats its warnings."""
    if filename.startswith(OWN_FOLDERS):
        return f"Warning: {one_line(message)}\n"
    return _format_warning(message, category, filename, lineno, line)


warnings.formatwarning = format_warning


def sizes_of(trainer: Trainer) -> Sizes:
    """Return the sizes of an iteration from the trainer's data module; raise RuntimeError without one."""
    sizes: Sizes | None = getattr(getattr(trainer, "datamodule", None), "sizes", None)
    if sizes is None:
        raise RuntimeError(
            "VGRPOModule takes its sizes from the data module. "
            "Call trainer.fit(module, datamodule=PromptDataModule(...)), or a subclass of it."
        )
    return sizes


def fitting_callbacks(trainer: Trainer, *needed: type[Callback]) -> list[Callback]:
    """Return those of the needed callbacks that the trainer lacks.

    Raises:
        TypeError: ``datamodule`` is not a data module.
        ValueError: A callback or an option of the trainer does not fit an iteration.
    """
    data = declared(trainer).datamodule
    if data is not None and not isinstance(data, LightningDataModule):
        trainer.datamodule = None  # else fit calls its hooks after the error
        kind = data if isinstance(data, type) else type(data)
        raise TypeError(f"datamodule={kind.__name__} is not a data module. Pass datamodule=PromptDataModule(...).")
    moved = moved_option(trainer) if trainer.state.fn == "fit" else None  # before Lightning refuses it
    for error in [*filter(None, [moved]), *unfit_callbacks(declared(trainer).callbacks)]:
        raise ValueError(error)
    return [cls() for cls in needed if not callbacks_of(trainer, cls)]


def unfit_callbacks(callbacks: Iterable[Callback]) -> list[str]:
    """Return an error for each of Lightning's callbacks that an iteration cannot be trained with."""
    callbacks = list(callbacks)
    errors = [
        f"trainer.callbacks: {type(callback).__name__} does not work with iterations. {UNFIT_CALLBACKS[cls.__name__]}."
        for callback in callbacks
        for cls in type(callback).__mro__
        if cls.__module__.startswith("lightning.") and cls.__name__ in UNFIT_CALLBACKS
    ]
    if any(map(saves_by_time, callbacks)):
        which = "ModelCheckpoint.train_time_interval"
        errors.append(f"trainer.callbacks: {which} would never save. Use every_n_epochs, which counts iterations.")
    return errors


def moved_option(trainer: Trainer) -> str | None:
    """Return why what the trainer was given, an option or a compiled module, must be set elsewhere, or ``None``."""
    clipping = {name: getattr(trainer, name) for name in ("gradient_clip_val", "gradient_clip_algorithm")}
    given = {name: getattr(value, "value", value) for name, value in clipping.items() if value is not None}
    if given:
        return f"trainer.{next(iter(given))} is now an option of the model. Replace it by {setting('model', **given)}."
    if getattr(trainer.lightning_module, "_compiler_ctx", None) is not None:
        return "torch.compile(module) would compile the iteration. Pass the module, and set model.policy.compile=true."
    if (asked := trainer.accumulate_grad_batches) != 1:
        return f"trainer.accumulate_grad_batches={asked} is set by the sizes. Leave it out; use micro_batch_size."
    return None


def limit_error(module: TrainingModule, trainer: Trainer, sizes: Sizes, has_heldout: bool) -> str | None:
    """Return why a limit of the trainer cannot be kept or has no effect, or ``None``."""
    trainer = declared(trainer)
    if has_heldout and trainer.limit_val_batches == 0:
        return f"trainer.limit_val_batches=0 disables data.heldout. Set {setting('data', heldout=None)} instead."
    for least, most in (("min_epochs", "max_epochs"), ("min_steps", "max_steps")):
        low, high = getattr(trainer, least), getattr(trainer, most)
        if not trainer.fast_dev_run and low and high and 0 < high < low:
            return f"trainer.{least}={low} has no effect with {most}={high}. Set {most} to at least {low}."
    fewer = "Leave it out; use fewer prompts_per_iteration, or the trainer's fast_dev_run for a trial run."
    if trainer.overfit_batches:
        return f"trainer.overfit_batches={trainer.overfit_batches} would drop images already made. {fewer}"
    if (moved := moved_option(trainer)) is not None:
        return moved
    if (limit := trainer.limit_train_batches) < 1:
        return f"trainer.limit_train_batches={limit} is less than an iteration. {fewer}"
    if limit > 1 and not trainer.fast_dev_run:  # which sets it
        number = f"For {limit} iterations, set trainer.max_epochs={limit}."
        return f"trainer.limit_train_batches={limit} has no effect: an epoch is an iteration of one batch. {number}"
    updates, steps = sizes.updates_per_iteration, trainer.max_steps
    if steps > 0 and steps % updates and not trainer.fast_dev_run:
        return (
            f"trainer.max_steps={steps} ends within an iteration and would drop images already made. "
            f"Use a multiple of {updates}, such as {-(-steps // updates) * updates}."
        )
    limits = [limit for limit in (steps, (trainer.max_epochs or 0) * updates) if limit > 0]
    error: str | None = module.optimization.schedule_error(min(limits, default=1))
    return error
