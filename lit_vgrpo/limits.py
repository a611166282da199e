"""The trainer's limits: an iteration is run whole, since all of its images are paid for in its first step."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_vgrpo.sizes import Sizes


def keep_iterations_whole(trainer: Trainer, sizes: Sizes) -> None:
    """Refuse limits that end an iteration before its last step; let ``fast_dev_run`` count iterations, not batches.

    Args:
        sizes: of one iteration, already the small ones of ``fast_dev_run``.

    Raises:
        ValueError: such a limit is set.
    """
    fault = limit_fault(trainer, sizes)
    if fault is not None:
        raise ValueError(fault)
    if trainer.fast_dev_run:
        iterations = int(trainer.fast_dev_run)
        trainer.limit_train_batches = 1.0
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = iterations, -1
        images = sizes.plan(trainer.world_size).images_per_iteration
        rank_zero_info(f"fast_dev_run: {iterations} whole iteration(s) of {images} images each.")


def limit_fault(trainer: Trainer, sizes: Sizes) -> str | None:
    """Why a limit of the trainer cannot be kept, in a line; ``None`` where all can."""
    fewer = "Leave it out; use data.prompts_per_iteration for less work, or trainer.fast_dev_run=true for a try."
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
