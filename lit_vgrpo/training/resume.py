"""``--resume``: the checkpoint of a run folder to continue from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from lightning.pytorch import Trainer
from pydantic import TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from lit_vgrpo.config.recipe import FOUND_IN
from lit_vgrpo.core.ranges import Range
from lit_vgrpo.core.records import Evaluation
from lit_vgrpo.errors import UserError, counted, shell_line
from lit_vgrpo.system.paths import read_regular
from lit_vgrpo.training.checkpoint_file import CheckpointDamage, read, read_sound
from lit_vgrpo.training.folder import BEST, CHECKPOINTS, CONFIG_NAME, EXPORT, INTERRUPTED, LAST, WRITTEN, no_checkpoint

SUMMARY_NAME, HELDOUT_PROMPTS = "summary.json", "heldout_prompts"
PREFERRED = (BEST, LAST, INTERRUPTED)
"""Checkpoints of equal progress, the preferred one last; others come before them."""
ENDED = ("finished", "diverged")
"""Outcomes of a run that reached its last iteration."""
UNDONE = (None, "failed", "interrupted")
"""Outcomes after which a run may continue; ``None`` if it wrote none."""
Whole = Annotated[int, Range(0, 2**53)]
Number = Annotated[float, Range(-1e50, 1e50)]  # also a sum of many float32 scores
OF_SUMMARY: dict[str, Any] = {
    **dict.fromkeys(("outcome", "weights", "device", "date", HELDOUT_PROMPTS), str),
    **dict.fromkeys(("iterations", "images", "peak_memory_bytes", "world_size"), Whole),
    **dict.fromkeys(("train_seconds", "cpu_seconds"), Number),
    **dict.fromkeys(("reward_parts_end", "heldout_metrics_start", "heldout_metrics_end"), dict[str, Number | None]),
    "heldout_reward_end": Number | None,
    "peak_memory_bytes_by_phase": dict[str, Whole],
    "evaluations": list[Evaluation],
    "versions": dict[str, str],
    **dict.fromkeys(("alarms", "rewards"), list[str]),
}
"""Types of the entries of ``summary.json`` that are read again."""
SUMMARY: Any = TypeAdapter(with_config(extra="allow")(TypedDict("Summary", OF_SUMMARY, total=False)))  # type: ignore[operator]


@dataclass(frozen=True, order=True)
class Progress:
    """Progress of a run at a checkpoint."""

    iterations: int
    optimizer_steps: int
    images: int  # over all ranks
    logged: int  # iterations with a row in the loggers: one more than finished ones if only the end is missing

    @classmethod
    def of(cls, checkpoint: dict[str, Any]) -> Progress:
        loop = checkpoint["loops"]["fit_loop"]
        epochs, is_last = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]["is_last_batch"]
        return cls(
            # At the end of an iteration the loop has counted it as processed; as completed only after the checkpoint.
            iterations=epochs["processed"],
            optimizer_steps=checkpoint["global_step"],
            images=checkpoint["lit_vgrpo"]["ledger"]["images"],
            logged=epochs["ready"] if is_last else epochs["processed"],
        )

    def __str__(self) -> str:
        return f"{counted(self.iterations, 'iteration')}, {counted(self.optimizer_steps, 'optimizer step')}"

    def is_finished(self, max_epochs: int | None, max_steps: int) -> bool:
        """Return ``True`` if these limits of the trainer are reached."""
        epochs_done = max_epochs is not None and 0 <= max_epochs <= self.iterations
        return epochs_done or 0 <= max_steps <= self.optimizer_steps


@dataclass(frozen=True)
class Resumption:
    """A run that continues in its folder from a checkpoint, or starts from the beginning without one."""

    folder: Path
    checkpoint: Path | None = None
    progress: Progress | None = None

    @property
    def opening(self) -> str:
        """The line to print when the run continues."""
        continues = f"Continuing from {self.checkpoint} ({self.progress})."
        return continues if self.checkpoint is not None else "No checkpoint yet: starting from the beginning."

    def check(self, typed: str | None) -> None:
        """Refuse a ``ckpt_path`` in addition to --resume, and starting over in the folder of an ended run."""
        if typed not in (None, "null"):
            raise UserError(f"ckpt_path={typed} and --resume name two checkpoints. Leave one of them out.")
        config = self.folder / CONFIG_NAME
        is_run = config.is_file() and f"\n{FOUND_IN}:" in config.read_text(errors="replace")
        taken = [name for name in (CONFIG_NAME, *WRITTEN) if (self.folder / name).exists()]
        if self.checkpoint is None and taken and not is_run:
            what = f"{self.folder} is not a run folder, and a run would replace its {', '.join(taken)}."
            raise UserError(f"{what} Set run_dir=/another/folder.")
        outcome = (read_summary(self.folder) or {}).get("outcome")
        if self.checkpoint is None and outcome not in UNDONE:  # before the first one
            raise UserError(
                f"{self.folder} is {outcome}, but its checkpoints are gone, or a full disk took none. Starting "
                f"over would replace its results. Restore {self.folder / CHECKPOINTS}, or leave out --resume to start "
                "a new run."
            )

    def is_at_end(self, trainer: Trainer) -> bool:
        """Return ``True`` if the last iteration is done."""
        return self.progress is not None and self.progress.is_finished(trainer.max_epochs, trainer.max_steps)

    def is_over(self, trainer: Trainer) -> bool:
        """Return ``True`` if the run has ended: the summary is written last."""
        if not self.is_at_end(trainer):
            return False
        summary = read_summary(self.folder) or {}
        assert self.progress is not None
        return summary.get("outcome") in ENDED and summary.get("iterations") == self.progress.iterations


def checked_json(content: bytes, shape: TypeAdapter[Any], what: str) -> Any:
    """Return the content of a JSON file or line; raise UserError, which names it as ``what``, for another shape."""
    try:
        return shape.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{what} is damaged: {': '.join([*map(str, first['loc']), first['msg']])}.") from error


def read_summary(folder: Path, say: Callable[[str], None] = lambda line: None) -> dict[str, Any] | None:
    """Return a run's ``summary.json``, or ``None`` if it is missing, or damaged, which ``say`` is told in a line."""
    file = folder / SUMMARY_NAME
    try:
        return checked_json(read_regular(file), SUMMARY, f"{file}") if file.exists() else None
    except (OSError, UserError) as error:
        say(str(error))
        return None


def resumed_folder(recipe: Path, run_dir: str | None) -> Path:
    """Return the run folder that ``--resume`` continues: ``run_dir`` if given, else the recipe's."""
    if run_dir is not None:
        return Path(run_dir).expanduser()
    if recipe.name == CONFIG_NAME:
        return recipe.parent
    raise UserError(
        f"--resume continues a run folder, and {recipe} is not the {CONFIG_NAME} of one. "
        f"Try: lightning run RUN_DIR/{CONFIG_NAME} --resume, or add run_dir=RUN_DIR."
    )


def last_good_checkpoint(folder: Path, say: Callable[[str], None]) -> Resumption:
    """Find the most advanced sound checkpoint of a run folder; every rank finds the same one.

    A sound checkpoint agrees with its checksums and has no weight that is NaN or infinite.

    Args:
        say: Called with a line for every skipped file.

    Raises:
        UserError: There are checkpoints, but none is sound: starting from the beginning would overwrite them.
    """
    files = _files(folder)
    for progress, path in _by_progress(files, say):
        try:
            read_sound(path)
            return Resumption(folder, path, progress)
        except CheckpointDamage as damage:
            say(f"Skipped {path}: it {damage.reason}.")
    if files:
        raise UserError(
            f"None of the {len(files)} checkpoints of {folder} can be loaded. Copy an intact one to "
            f"{folder / CHECKPOINTS}. To start from the beginning, move the damaged ones away."
        )
    return Resumption(folder)


def last_good(run: Path, say: Callable[[str], None]) -> Path:
    """Return the checkpoint that :func:`last_good_checkpoint` finds; raise UserError if there is none."""
    if (checkpoint := last_good_checkpoint(run, say).checkpoint) is None:
        raise UserError(no_checkpoint(run))
    return checkpoint


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the last written checkpoint, sound or not."""
    files = [path for path in _files(folder) if path.is_file()]
    return max(files, key=lambda path: path.stat().st_mtime, default=None)


def _by_progress(files: Iterable[Path], say: Callable[[str], None]) -> list[tuple[Progress, Path]]:
    """Return readable checkpoints with their progress, the most advanced first, and report the others."""
    readable: list[tuple[Progress, int, float, Path]] = []
    for path in files:
        try:
            rank = PREFERRED.index(path.name) if path.name in PREFERRED else -1
            readable.append((Progress.of(read(path)), rank, path.stat().st_mtime, path))
        except CheckpointDamage as damage:
            say(f"Skipped {path}: it {damage.reason}.")
    return [(progress, path) for progress, _, _, path in sorted(readable, reverse=True)]


def how_to_resume(folder: Path, edited: Sequence[str] = ()) -> str:
    """Return the command that continues a run, also after edits of files that it compares.

    >>> how_to_resume(Path("runs/demo"))
    'Continue: lightning run runs/demo/config.yaml --resume'
    >>> how_to_resume(Path("my runs/demo"))
    "Continue: lightning run 'my runs/demo/config.yaml' --resume"
    >>> how_to_resume(Path("demo"), ["reward.py"])
    'Continue, also after an edit of reward.py: lightning run demo/config.yaml --resume allow_changes=true'
    """
    when, allows = (f", also after an edit of {' or '.join(edited)}", ["allow_changes=true"]) if edited else ("", [])
    return f"Continue{when}: {shell_line('lightning', _trained_by[-1], folder / CONFIG_NAME, '--resume', *allows)}"


_trained_by = ["run"]


@contextmanager
def trained_by(command: str) -> Iterator[None]:
    """Within the context, name this subcommand in :func:`how_to_resume`."""
    _trained_by.append(command)
    try:
        yield
    finally:
        _trained_by.pop()


def next_commands(
    folder: Path, prompt: str | None, has_heldout: bool, is_undone: bool, is_unchecked: bool
) -> dict[str, str]:
    """Return the commands that continue a run or use its weights, by their purpose.

    Args:
        prompt: ``None`` leaves out drawing a prompt.
        is_undone: The run can continue.
        is_unchecked: No reward that was not trained on has scored the held-out images.
    """
    name, use = folder.resolve().name, dict[str, str]()
    if is_undone:
        use["Continue the run"] = how_to_resume(folder).partition(": ")[2]
    if has_heldout:
        what = "Score before and after, with confidence intervals"
        use[what] = shell_line("lightning", "eval", folder, "--reference")
        if is_unchecked:
            what = "Check for cheating with another reward (needs its weights)"
            use[what] = shell_line("lightning", "eval", folder, "--reference", "model.untrained_reward=CLIPScore")
    if prompt is not None:
        use["Draw a prompt"] = shell_line("lightning", "sample", folder, "--prompt", prompt)
    what, to = "Write the weights for diffusers", f"{name}_export"
    if (folder / EXPORT).is_dir():
        what, to = "Publish the weights on the hub", "hub:OWNER/" + re.sub(r"[^\w.-]+", "-", name)
    return use | {what: shell_line("lightning", "export", folder, "--to", to)}


def last_words(folder: Path, edited: Sequence[str] = ()) -> str:
    """Return a line on the last checkpoint of a run that has ended, and how to continue, see :func:`how_to_resume`."""
    if not (files := _files(folder)):
        return f"Nothing was saved yet. {how_to_resume(folder).replace('Continue', 'Start again')}"
    skipped: list[str] = []
    found = [f"The last checkpoint is {path} ({progress})." for progress, path in _by_progress(files, skipped.append)]
    return " ".join([*skipped, *found[:1], how_to_resume(folder, edited)])


def _files(folder: Path) -> list[Path]:
    """Return the checkpoints, including those that Lightning writes before SLURM requeues a job."""
    files: list[Path] = []
    for place, prefix in ((folder / CHECKPOINTS, ""), (folder, "hpc_ckpt_")):
        try:
            files += [path for path in place.iterdir() if path.suffix == ".ckpt" and path.name.startswith(prefix)]
        except FileNotFoundError:
            continue
        except OSError as error:  # glob() would return nothing, and the run would start from the beginning
            raise UserError(f"Cannot look for checkpoints in {place}: {error.strerror}.") from error
    return sorted(files)
