"""Checks of Trainer settings that would cut an iteration short or train nothing, and callbacks that do not fit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_vgrpo.core.sharding import shape_of
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import trainable_parameters
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

AVERAGES = "keeps weights that a resumed run and an export would not find. Use lit_vgrpo.callbacks.EMA"
UNFIT_CALLBACKS = {
    "GradientAccumulationScheduler": "changes how many micro-batches make an update, which the sizes say. "
    "Use data.updates_per_iteration and data.micro_batch_size",
    "BatchSizeFinder": "looks for a batch_size, which an iteration has not. Use data.micro_batch_size=auto",
    "LearningRateFinder": "would train on one iteration's images. Compare runs: lightning compare --sweep",
    "StochasticWeightAveraging": AVERAGES,
    "WeightAveraging": AVERAGES,
    "ModelPruning": "replaces weights that the method keeps copies of. Leave it out",
}
"""Lightning's callbacks that an iteration cannot be trained with: what they do, and what to use. By name, since not
every version has them all."""


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
        f"trainer.callbacks: {type(callback).__name__} {UNFIT_CALLBACKS[cls.__name__]}."
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
    error = limit_error(trainer, sizes)
    if error is not None:
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
        whole = [number for number in (steps // updates * updates, -(-steps // updates) * updates) if number]
        return (
            f"trainer.max_steps={steps} ends within an iteration of {updates} updates and would drop images already "
            f"made. Use {' or '.join(map(str, whole))}."
        )
    return None


def training_warnings(trainer: Trainer, policy: Policy) -> list[str]:
    """Return one line for a distilled model and for each trainer setting without effect; needs the optimizers."""
    distilled = distillation_warning(policy)
    found = [] if distilled is None else [distilled]
    precision, name = trainer.precision, str(policy.dtype).removeprefix("torch.")
    if precision == "bf16-mixed" or (precision == "16-mixed" and policy.dtype != torch.float16):
        found.append(
            f"trainer.precision={precision} does not change how the policy computes: in {name}, as model.policy.dtype "
            "says. Leave it out, and set model.policy.dtype=bfloat16 to compute in half precision."
        )
    clip = trainer.gradient_clip_val
    group = trainer.optimizers[0].param_groups[0]
    if not clip or not isinstance(group.get("eps"), float):
        return found
    # Adam divides a gradient by its own size plus eps: far below eps almost no step is left.
    weights = sum(
        shape_of(p).numel() for p in trainable_parameters(policy).values()
    )  # under ZeRO-3 the group's own are empty
    by_norm = trainer.gradient_clip_algorithm in (None, "norm")
    size = clip / math.sqrt(weights) if by_norm else clip
    if size < group["eps"]:
        found.append(
            f"trainer.gradient_clip_val={clip:g} leaves gradients of {size:.0e} a weight, less than the optimizer's "
            f"eps={group['eps']:g}: almost nothing is trained. Use 1.0."
        )
    return found
