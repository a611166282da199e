"""``--resume``: which checkpoint of a run folder a run goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lit_vgrpo.distributed.checkpoint_file import CheckpointDamage, read, read_sound
from lit_vgrpo.errors import UserError
from lit_vgrpo.runs.folder import CHECKPOINTS, CONFIG_NAME
from lit_vgrpo.system.atomic_folder import DRAFT_PREFIX

SUMMARY_NAME = "summary.json"


@dataclass(frozen=True)
class Progress:
    """How far a checkpoint is.

    Attributes:
        iterations: iterations whose updates are all done.
        optimizer_steps: updates done.
        images: images made, over all ranks.
        batches: micro-batches, also of an iteration that was cut short.
    """

    iterations: int
    optimizer_steps: int
    images: int
    batches: int

    @classmethod
    def of(cls, checkpoint: dict[str, Any]) -> Progress:
        loop = checkpoint["loops"]["fit_loop"]
        return cls(
            # At an iteration's end the loop counts it as processed; completed only once the checkpoint is written.
            iterations=loop["epoch_progress"]["current"]["processed"],
            optimizer_steps=checkpoint["global_step"],
            images=checkpoint["lit_vgrpo"]["images_seen"],
            batches=loop["epoch_loop.batch_progress"]["total"]["ready"],
        )

    @property
    def order(self) -> tuple[int, ...]:
        return (self.optimizer_steps, self.images, self.batches)

    def is_finished(self, max_epochs: int | None, max_steps: int) -> bool:
        """Whether these limits of the trainer leave nothing to do."""
        epochs_done = max_epochs is not None and 0 <= max_epochs <= self.iterations
        return epochs_done or 0 <= max_steps <= self.optimizer_steps


@dataclass(frozen=True)
class Resumption:
    """A run that goes on in its own folder.

    Attributes:
        folder: the run folder.
        checkpoint: the file to go on from; ``None`` starts from the beginning.
        progress: how far that is.
    """

    folder: Path
    checkpoint: Path | None = None
    progress: Progress | None = None

    @property
    def done(self) -> str:
        """How far it is, in words."""
        assert self.progress is not None
        return f"{self.progress.iterations} iterations, {self.progress.optimizer_steps} optimizer steps"

    @property
    def opening(self) -> str:
        """What to say when the run goes on."""
        if self.checkpoint is None:
            return "No checkpoint yet: starting from the beginning."
        return f"Continuing from {self.checkpoint} ({self.done})."

    def is_at_end(self, trainer: Trainer) -> bool:
        """Whether the last iteration is done."""
        return self.progress is not None and self.progress.is_finished(trainer.max_epochs, trainer.max_steps)

    def is_over(self, trainer: Trainer) -> bool:
        """Whether also what belongs to the end is done: the summary is what is written last."""
        if not self.is_at_end(trainer):
            return False
        summary = read_summary(self.folder) or {}
        assert self.progress is not None
        return (summary.get("outcome"), summary.get("iterations")) == ("finished", self.progress.iterations)


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return a run's ``summary.json``; ``None`` where there is none that can be read."""
    try:
        summary = json.loads((folder / SUMMARY_NAME).read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None


def resumed_folder(recipe: Path, run_dir: str | None) -> Path:
    """Return the run folder that ``--resume`` is about.

    Args:
        recipe: the recipe that was typed.
        run_dir: the folder that was typed, if any; the recipe's own otherwise.

    Raises:
        UserError: the recipe lies in no run folder, and none was named.
    """
    if run_dir is not None:
        return Path(run_dir).expanduser()
    folder = recipe.parent
    if recipe.name == CONFIG_NAME:
        return folder
    raise UserError(
        f"--resume goes on in a run folder, and {recipe} is not the {CONFIG_NAME} of one. "
        f"Try: lightning run RUN_DIR/{CONFIG_NAME} --resume, or add run_dir=RUN_DIR."
    )


def last_good_checkpoint(folder: Path, say: Callable[[str], None]) -> Resumption:
    """Find the checkpoint of a run folder that is furthest, and sound; every rank finds the same one.

    Sound means that every byte agrees with the file's checksums, and that no weight is NaN or infinite.

    Args:
        folder: the run folder.
        say: takes a line for every file that is skipped.

    Raises:
        UserError: there are checkpoints, and none of them is sound: to start from the beginning would overwrite them.
    """
    found: list[tuple[Progress, float, Path]] = []
    files = _files(folder)
    for path in files:
        try:
            progress = Progress.of(read(path))
            found.append((progress, path.stat().st_mtime, path))
        except (CheckpointDamage, FileNotFoundError) as damage:
            if not os.path.lexists(path):  # a run that is still going on has just renamed it
                return last_good_checkpoint(folder, say)
            say(f"Skipped {path}: it {damage}.")
        except (KeyError, TypeError):
            say(f"Skipped {path}: it does not say how far it is.")
    for progress, _, path in sorted(found, key=lambda entry: (entry[0].order, entry[1], entry[2].name), reverse=True):
        try:
            read_sound(path)
        except CheckpointDamage as damage:
            if not os.path.lexists(path):
                return last_good_checkpoint(folder, say)
            say(f"Skipped {path}: it {damage}.")
            continue
        return Resumption(folder, path, progress)
    if files:
        raise UserError(
            f"None of the checkpoints of {folder} is sound ({len(files)} found). Copy a sound one to "
            f"{folder / CHECKPOINTS}; or, to start from the beginning, move the damaged ones away."
        )
    return Resumption(folder)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the file that was written last; nothing is read."""
    files = [path for path in _files(folder) if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def how_to_resume(folder: Path) -> str:
    """Return the command that continues a run.

    >>> how_to_resume(Path("runs/demo"))
    'Continue: lightning run runs/demo/config.yaml --resume'
    """
    return f"Continue: lightning run {folder / CONFIG_NAME} --resume"


def last_words(folder: Path) -> str:
    """Say what an ended run left, and how to continue it."""
    checkpoint = newest_checkpoint(folder)
    left = "Nothing was saved yet." if checkpoint is None else f"The last checkpoint is {checkpoint}."
    return f"{left} {how_to_resume(folder)}"


def _files(folder: Path) -> list[Path]:
    """Whole checkpoints, and those that Lightning writes when SLURM is about to requeue a job.

    Raises:
        UserError: nobody can tell what is there.
    """
    found = [*_listed(folder / CHECKPOINTS, ""), *_listed(folder, "hpc_ckpt_")]
    return sorted(path for path in found if not path.name.startswith(DRAFT_PREFIX))


def _listed(folder: Path, prefix: str) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.suffix == ".ckpt" and path.name.startswith(prefix)]
    except FileNotFoundError:
        return []
    except OSError as error:  # glob() would say that there is nothing
        raise UserError(f"Cannot look for checkpoints in {folder}: {error.strerror}.") from error
