"""A saved run, by its name on the command line or in a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lit_vgrpo.errors import UserError, nearest, suggestion
from lit_vgrpo.training.folder import CHECKPOINTS, CONFIG_NAME
from lit_vgrpo.training.resume import last_good_checkpoint


def find_run(text: str) -> tuple[Path, Path | None]:
    """Return the run folder that a path belongs to, and the checkpoint if the path is one.

    Args:
        text: a run folder, its config.yaml, or one of its checkpoints.

    Raises:
        UserError: it is none of these.
    """
    path = Path(text).expanduser()
    if (path / CONFIG_NAME).is_file():
        return path, None
    if path.is_file() and path.name == CONFIG_NAME:
        return path.parent, None
    if path.is_file() and path.suffix == ".ckpt":
        for folder in path.parents:
            if (folder / CONFIG_NAME).is_file():
                return folder, path
    if path.is_dir():
        error = f"is not a run folder: it has no {CONFIG_NAME}"
    else:
        error = (
            f"is not part of a run: it is not a run's {CONFIG_NAME} or checkpoint" if path.is_file() else "is not a run"
        )
    raise UserError(f"{text} {error}. {_runs_near(path)}")


def find_checkpoint(text: str, run: Path) -> Path:
    """Return a checkpoint by its path, or by its name in a run's checkpoint folder.

    Raises:
        UserError: there is none.
    """
    named = Path(text).expanduser()
    for path in (named, run / named, run / CHECKPOINTS / named):
        if path.is_file():
            return path
    known = sorted(path.name for path in (run / CHECKPOINTS).glob("*.ckpt"))
    raise UserError(f"--checkpoint {text} does not exist. {suggestion(text, known) if known else no_checkpoint(run)}")


def last_good(run: Path, say: Callable[[str], None]) -> Path:
    """Return the checkpoint that :func:`~lit_vgrpo.training.resume.last_good_checkpoint` finds.

    Raises:
        UserError: there is none, or none is sound.
    """
    found = last_good_checkpoint(run, say)
    if found.checkpoint is None:
        raise UserError(no_checkpoint(run))
    return found.checkpoint


def no_checkpoint(run: Path) -> str:
    """Return the message for a run that has not saved anything."""
    return f"{run} holds no checkpoint yet. Train it: lightning run {run / CONFIG_NAME} --resume"


def _runs_near(path: Path) -> str:
    places = (path, path.parent, Path("runs"))
    runs = {file.parent.name: file.parent for place in places for file in sorted(place.glob(f"*/{CONFIG_NAME}"))}
    if not runs:
        return "Train one first: lightning run tiny_shapes"
    guess = nearest(path.name, runs)
    return f"Did you mean {runs[guess]}?" if guess else suggestion("", map(str, runs.values()))
