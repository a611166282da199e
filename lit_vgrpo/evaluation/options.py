"""What was typed after ``lightning eval``, and the run it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_vgrpo.errors import UserError, nearest, suggestion
from lit_vgrpo.evaluation.scores import AVERAGE, REFERENCE, TRAINED
from lit_vgrpo.run_folder import CHECKPOINTS, CONFIG_NAME
from lit_vgrpo.words import split_words

FLAGS = {"ema": AVERAGE, "reference": REFERENCE}
VALUES = ("checkpoint", "fid-reference", "features", "out")
INSTEAD = {"ckpt_path": "--checkpoint FILE", "run_dir": "--out FILE.json", "name": "--out FILE.json"}


@dataclass
class Options:
    """The parsed command line.

    Attributes:
        run: the run folder.
        checkpoint: the file that was asked for; ``None`` takes the last good one.
        variants: the sets of weights to evaluate.
        features: feature network of FID and diversity; ``None`` takes that of the recipe's FID.
        fid_reference: real images, or a file of their statistics; ``None`` takes that of the recipe's FID.
        out: the JSON to write; the first free name like it is taken.
        recipe_words: overlays and ``key=value`` words for the run's recipe.
    """

    run: Path
    checkpoint: Path | None
    variants: list[str]
    features: str | None
    fid_reference: str | None
    out: Path
    recipe_words: list[str]


def parse_options(args: Sequence[str]) -> Options:
    """Take our options out of the words; the rest are the run, overlays and overrides of its recipe.

    Raises:
        UserError: an unknown option, or what was named is not there.
    """
    given, rest = split_words(args, "eval", VALUES, FLAGS)
    named = next((word for word in rest if "=" not in word), None)
    if named is None:
        raise UserError("No run given. Try: lightning eval runs/tiny_shapes")
    rest.remove(named)
    for key in (word.partition("=")[0] for word in rest):
        if key in INSTEAD:
            raise UserError(f"{key} has no effect on an evaluation. Use {INSTEAD[key]}.")
    run, checkpoint = find_run(named)
    if "checkpoint" in given:
        checkpoint = find_checkpoint(given["checkpoint"], run)
    out = Path(given.get("out", run / "eval.json")).expanduser()
    if out.suffix != ".json" or out.is_dir():
        raise UserError(f"--out {out} is not the name of a JSON file. Write --out {out.with_suffix('.json')}.")
    return Options(
        run=run,
        checkpoint=checkpoint,
        variants=[TRAINED, *(variant for flag, variant in FLAGS.items() if flag in given)],
        features=given.get("features"),
        fid_reference=given.get("fid-reference"),
        out=out,
        recipe_words=rest,
    )


def find_run(text: str) -> tuple[Path, Path | None]:
    """The run that a folder, its config.yaml or one of its checkpoints names, and the checkpoint if it was one.

    Raises:
        UserError: it names no run.
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
        fault = f"is no run folder: it has no {CONFIG_NAME}"
    else:
        fault = f"belongs to no run: it is not a run's {CONFIG_NAME} or checkpoint" if path.is_file() else "is no run"
    raise UserError(f"{text} {fault}. {_runs_near(path)}")


def find_checkpoint(text: str, run: Path) -> Path:
    """A checkpoint by its path, or by its name in the run's folder of checkpoints.

    Raises:
        UserError: there is none.
    """
    named = Path(text).expanduser()
    for path in (named, run / named, run / CHECKPOINTS / named):
        if path.is_file():
            return path
    known = sorted(path.name for path in (run / CHECKPOINTS).glob("*.ckpt"))
    raise UserError(f"--checkpoint {text} does not exist. {suggestion(text, known) if known else no_checkpoint(run)}")


def no_checkpoint(run: Path) -> str:
    """What to say of a run that has not saved anything."""
    return f"{run} holds no checkpoint yet. Train it: lightning run {run / CONFIG_NAME} --resume"


def _runs_near(path: Path) -> str:
    places = (path, path.parent, Path("runs"))
    runs = {file.parent.name: file.parent for place in places for file in sorted(place.glob(f"*/{CONFIG_NAME}"))}
    if not runs:
        return "Train one first: lightning run tiny_shapes"
    guess = nearest(path.name, runs)
    return f"Did you mean {runs[guess]}?" if guess else suggestion("", map(str, runs.values()))
