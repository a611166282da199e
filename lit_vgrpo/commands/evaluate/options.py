"""What was typed after ``lightning eval``, and the run it names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_vgrpo.config.arguments import split_words
from lit_vgrpo.errors import UserError
from lit_vgrpo.runs.saved_run import take_run
from lit_vgrpo.runs.saved_weights import AVERAGE, REFERENCE, TRAINED

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
    run, checkpoint = take_run(rest, "eval", given.get("checkpoint"))
    for key in (word.partition("=")[0] for word in rest):
        if key in INSTEAD:
            raise UserError(f"{key} has no effect on an evaluation. Use {INSTEAD[key]}.")
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
