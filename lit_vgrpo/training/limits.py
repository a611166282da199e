"""Checks of Trainer settings that would cut an iteration short or train nothing, and callbacks that do not fit."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.loading import distillation_warning
from lit_vgrpo.training.trainer_internals import count_iterations

EXPECTED_WARNINGS = (
    ".*does not have many workers.*",  # the loader yields prompts: there is nothing to prefetch
    ".*module\\(s\\) in eval mode at the start.*",  # a policy is trained as it samples, without dropout
    ".*smaller than the logging interval.*",  # what is logged is of whole iterations
    ".*across ranks is zero.*",  # no held-out prompts: nothing to evaluate
    ".*sync_dist=True.*",  # what is logged is computed over all ranks already
    ".*all_gather is deprecated.*",
    ".*LeafSpec.*is deprecated.*",
)

UNFIT_CALLBACKS = {
    "GradientAccumulationScheduler": "Use data.updates_per_iteration and data.micro_batch_size",
    "BatchSizeFinder": "An iteration has no batch size. Use data.micro_batch_size=auto",
    "LearningRateFinder": "Compare runs: lightning compare --sweep",
    "StochasticWeightAveraging": "Use lit_vgrpo.callbacks.EMA",
    "WeightAveraging": "Use lit_vgrpo.callbacks.EMA",
    "ModelPruning": "Leave it out",
}
"""Lightning's callbacks that would train wrongly, with what to use instead; not every version has them all."""


def hide_expected_warnings() -> None:
    """Hide warnings of Lightning that do not apply to this module, in any Trainer."""
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def sizes_of(trainer: Any) -> Sizes:
    """Return the sizes of an iteration from the trainer's data module.

    Raises:
        RuntimeError: there is no PromptDataModule.
    """
    sizes: Sizes | None = getattr(getattr(trainer, "datamodule", None), "sizes", None)
    if sizes is None:
        raise RuntimeError(
            "VGRPOModule takes its sizes from the data module. "
            "Call trainer.fit(module, datamodule=PromptDataModule(...))."
        )
    return sizes


def unfit_callbacks(callbacks: Iterable[Callback]) -> list[str]:
    """Return an error for each of Lightning's callbacks that an iteration cannot be trained with."""
    return [
        f"trainer.callbacks: {type(callback).__name__} does not fit an iteration. {UNFIT_CALLBACKS[cls.__name__]}."
        for callback in callbacks
        for cls in type(callback).__mro__
        if cls.__module__.startswith("lightning.") and cls.__name__ in UNFIT_CALLBACKS
    ]


def keep_iterations_whole(trainer: Any, sizes: Sizes) -> None:
    """Refuse limits that end an iteration before its last step; let ``fast_dev_run`` count iterations, not batches.

    Args:
        sizes: sizes of an iteration, reduced under ``fast_dev_run``.

    Raises:
        ValueError: such a limit is set.
    """
    if (error := limit_error(trainer, sizes)) is not None:
        raise ValueError(error)
    if trainer.fast_dev_run:
        iterations = int(trainer.fast_dev_run)
        count_iterations(trainer, iterations)
        images = sizes.plan(trainer.world_size).images_per_iteration
        rank_zero_info(f"fast_dev_run: {iterations} whole iteration(s) of {images} images each.")


def limit_error(trainer: Any, sizes: Sizes) -> str | None:
    """Return why a limit of the trainer cannot be kept, or ``None``."""
    fewer = "Leave it out; use data.prompts_per_iteration for less work, or trainer.fast_dev_run=true for a trial run."
    if trainer.overfit_batches:
        return f"trainer.overfit_batches={trainer.overfit_batches} would drop images already made. {fewer}"
    limit = trainer.limit_train_batches
    is_whole = limit >= sizes.plan(trainer.world_size).steps_per_iteration if isinstance(limit, int) else limit == 1.0
    if not is_whole and not trainer.fast_dev_run:
        return f"trainer.limit_train_batches={limit} would drop images already made. {fewer}"
    updates, steps = sizes.updates_per_iteration, trainer.max_steps
    if steps > 0 and steps % updates and not trainer.fast_dev_run:
        return (
            f"trainer.max_steps={steps} ends within an iteration and would drop images already made. "
            f"Use a multiple of {updates}, such as {-(-steps // updates) * updates}."
        )
    return None


def training_warnings(trainer: Trainer, policy: Policy) -> list[str]:
    """Return one line for a distilled model and for a precision without effect."""
    distilled = distillation_warning(policy)
    found = [] if distilled is None else [distilled]
    precision, name = trainer.precision, str(policy.dtype).removeprefix("torch.")
    if precision == "bf16-mixed" or (precision == "16-mixed" and policy.dtype != torch.float16):
        found.append(
            f"trainer.precision={precision} does not change how the policy computes: in {name}, as model.policy.dtype "
            "says. Leave it out, and set model.policy.dtype=bfloat16 to compute in half precision."
        )
    return found
