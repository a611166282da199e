"""Goes on within an iteration that a checkpoint was saved in the middle of."""

from __future__ import annotations

import warnings
from typing import Any

from lit_vgrpo.data.module import PromptDataModule


def rewind(progress: dict[str, Any], datamodule: PromptDataModule, world_size: int, updates_done: int) -> None:
    """Let an iteration that was cut short go on after its last whole update, on this number of ranks.

    Args:
        progress: the trainer's ``epoch_loop.batch_progress`` in the checkpoint, before the trainer takes it over.
        datamodule: whose sampler is to start there; its micro-batch size must be settled.
        updates_done: whole updates of that iteration.
    """
    if progress["is_last_batch"]:
        return
    steps = updates_done * datamodule.sizes.plan(world_size).micro_batches_per_update
    # Lightning cannot know that the sampler starts at the right step.
    warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
    progress["current"] = dict.fromkeys(progress["current"], steps)
    progress["total"] = dict.fromkeys(progress["total"], progress["total"]["completed"])
    datamodule.first_step = steps
