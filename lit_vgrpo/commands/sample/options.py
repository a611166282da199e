"""What was typed after ``lightning sample``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_vgrpo.config.arguments import split_words, take_every, whole_number
from lit_vgrpo.data import read_prompts
from lit_vgrpo.errors import UserError
from lit_vgrpo.runs.folder import candidates
from lit_vgrpo.runs.saved_run import take_run
from lit_vgrpo.runs.saved_weights import AVERAGE, REFERENCE, TRAINED
from lit_vgrpo.system.atomic_folder import vacant_folder

VALUES, FLAGS = ("prompts", "seed", "count", "checkpoint", "steps", "guidance", "out"), ("ema", "reference")
LARGEST_SEED = 2**63 - 1


@dataclass
class Options:
    """The parsed command line.

    Attributes:
        run: the run folder.
        checkpoint: the file that was asked for; ``None`` takes the last good one.
        variant: the set of weights.
        prompts: what to draw.
        seeds: one for each image of a prompt.
        steps: sampling steps; ``None`` takes the recipe's.
        guidance: guidance scale; ``None`` takes the recipe's.
        out: folder to write to, which is not there yet or is empty.
        settings: ``key=value`` words for the run's recipe.
    """

    run: Path
    checkpoint: Path | None
    variant: str
    prompts: list[str]
    seeds: range
    steps: int | None
    guidance: float | None
    out: Path
    settings: list[str]


def parse_options(args: Sequence[str]) -> Options:
    """Take our options out of the words; the rest are the run and settings of its recipe.

    Raises:
        UserError: an unknown option, a value that does not fit, or what was named is not there.
    """
    prompts, words = take_every(args, "prompt")
    given, rest = split_words(words, "sample", ("prompt", *VALUES), FLAGS)
    run, checkpoint = take_run(rest, "sample", given.get("checkpoint"))
    if "ema" in given and "reference" in given:
        raise UserError("--ema and --reference are both given. Sample once with each, with the same --seed.")
    faults: list[str] = []
    seed = whole_number("seed", given.get("seed", "0"), 0, 0, faults)
    count = whole_number("count", given.get("count", "1"), 1, 4, faults)
    steps = whole_number("steps", given["steps"], 1, 28, faults) if "steps" in given else None
    if seed + count - 1 > LARGEST_SEED:
        faults.append(f"--seed {seed} is too large. Use {LARGEST_SEED - count + 1} or less.")
    guidance = _guidance(given["guidance"], faults) if "guidance" in given else None
    if faults:
        raise UserError(*faults)
    return Options(
        run=run,
        checkpoint=checkpoint,
        variant=AVERAGE if "ema" in given else REFERENCE if "reference" in given else TRAINED,
        prompts=_prompts(prompts, given.get("prompts")),
        seeds=range(seed, seed + count),
        steps=steps,
        guidance=guidance,
        out=vacant_folder(given["out"], "--out") if "out" in given else _next_free(run / "sample"),
        settings=rest,
    )


def _prompts(typed: list[str], file: str | None) -> list[str]:
    if file is None:
        if not typed:
            raise UserError('No prompt given. Add --prompt "a red circle", or --prompts FILE.')
        return typed
    if typed:
        raise UserError("--prompt and --prompts are both given. Use one of them.")
    try:
        return [row["prompt"] for row in read_prompts(file)]
    except (ValueError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from error


def _guidance(text: str, faults: list[str]) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 1.0 <= scale < float("inf"):
        faults.append(f"--guidance {text} is no guidance scale. Use 1.0 (no guidance) or more.")
    return scale


def _next_free(base: Path) -> Path:
    return next(folder for folder in candidates(base) if not folder.exists())
