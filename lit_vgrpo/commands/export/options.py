"""What was typed after ``lightning export``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lit_vgrpo.config.arguments import split_words
from lit_vgrpo.errors import UserError, suggestion
from lit_vgrpo.policies.contract import DTYPES
from lit_vgrpo.runs.saved_run import take_run
from lit_vgrpo.runs.saved_weights import AVERAGE, TRAINED
from lit_vgrpo.system.atomic_folder import vacant_folder

VALUES, FLAGS = ("to", "format", "checkpoint", "dtype"), ("ema", "merge")
DIFFUSERS, KOHYA = "diffusers", "kohya"


@dataclass
class Options:
    """The parsed command line.

    Attributes:
        run: the run folder.
        checkpoint: the file that was asked for; ``None`` takes the last good one.
        to: the folder to write, which is not there yet or is empty.
        variant: the set of weights.
        merge: add a LoRA adapter to the weights under it.
        format: of an adapter's file, ``DIFFUSERS`` or ``KOHYA``.
        dtype: of everything that is written.
        settings: ``key=value`` words for the run's recipe.
    """

    run: Path
    checkpoint: Path | None
    to: Path
    variant: str
    merge: bool
    format: str
    dtype: torch.dtype
    settings: list[str]

    @property
    def kohya_file(self) -> Path:
        """The file of an adapter in kohya's format, called like the folder: programs list adapters by that name."""
        return self.to / f"{self.to.resolve().name}.safetensors"


def parse_options(args: Sequence[str]) -> Options:
    """Take our options out of the words; the rest are the run and settings of its recipe.

    Raises:
        UserError: an unknown option, or what was named is not there, or the folder is in use.
    """
    given, rest = split_words(args, "export", VALUES, FLAGS)
    run, checkpoint = take_run(rest, "export", given.get("checkpoint"))
    if "to" not in given:
        raise UserError(f"No folder given to write to. Add --to DIR, for example --to exports/{run.resolve().name}")
    named = given.get("format", DIFFUSERS)
    if named not in (DIFFUSERS, KOHYA):
        raise UserError(f"--format {named} is no format of a LoRA. {suggestion(named, (DIFFUSERS, KOHYA))}")
    if named == KOHYA and "merge" in given:
        raise UserError("--format kohya is a format of a LoRA, and --merge leaves none. Leave one of them out.")
    wanted = given.get("dtype", "float32")
    if wanted not in DTYPES:
        raise UserError(f"--dtype {wanted} is not known. Use {', '.join(DTYPES)}.")
    return Options(
        run=run,
        checkpoint=checkpoint,
        to=vacant_folder(given["to"], "--to"),
        variant=AVERAGE if "ema" in given else TRAINED,
        merge="merge" in given,
        format=named,
        dtype=DTYPES[wanted],
        settings=rest,
    )
