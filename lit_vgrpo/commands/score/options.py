"""What was typed after ``lightning score``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_vgrpo.config.arguments import split_words, whole_number
from lit_vgrpo.config.recipe import shipped_overlays
from lit_vgrpo.data import read_prompts
from lit_vgrpo.errors import UserError

VALUES = ("prompt", "prompts", "out", "batch-size")
OUT_KINDS = (".json", ".csv")


@dataclass
class ScoreOptions:
    """The parsed command line.

    Attributes:
        reward: the words that name the reward, with its options.
        pictures: files and folders of images.
        prompt: one prompt for all of them.
        prompts: file with a prompt for each.
        out: file to write besides.
        batch_size: most images that a reward gets at once.
    """

    reward: list[str]
    pictures: list[str]
    prompt: str | None
    prompts: str | None
    out: Path | None
    batch_size: int


def parse_score(args: Sequence[str]) -> ScoreOptions:
    """Split ``REWARD IMAGES... [key=value ...]`` and the options.

    Raises:
        UserError: an unknown option, a value that does not fit, or no reward.
    """
    given, words = split_words(args, "score", VALUES, ())
    if not words or "=" in words[0].partition(":")[0]:
        raise UserError("No reward given. Name a class such as PickScore, python:my_module:my_function, or a recipe.")
    reward, overlays = [words[0]], shipped_overlays()
    pictures: list[str] = []
    for word in words[1:]:
        is_path = Path(word).expanduser().exists()
        is_overlay = word.endswith((".yaml", ".yml")) or (word in overlays and not is_path)
        (reward if is_overlay or ("=" in word and not is_path) else pictures).append(word)
    if "prompt" in given and "prompts" in given:
        raise UserError("--prompt and --prompts are both given. Use --prompt TEXT for all images, or --prompts FILE.")
    out = Path(given["out"]).expanduser() if "out" in given else None
    if out is not None and (out.suffix not in OUT_KINDS or out.is_dir()):
        raise UserError(f"--out {out} is not the name of a table. Write --out {out.with_suffix('.json')} or .csv.")
    return ScoreOptions(
        reward, pictures, given.get("prompt"), given.get("prompts"), out, count_of(given, "batch-size", 1)
    )


def count_of(given: dict[str, str], name: str, default: int) -> int:
    """An option's number, 1 or more.

    Raises:
        UserError: it is something else.
    """
    faults: list[str] = []
    number = whole_number(name, given.get(name, str(default)), 1, default, faults)
    for fault in faults:
        raise UserError(fault)
    return number


def rows_for(options: ScoreOptions, pictures: Sequence[Path]) -> list[dict[str, Any]]:
    """The prompt's row of each image; an empty prompt where none was given.

    Raises:
        UserError: the file of prompts is wrong, or does not hold one for each image.
    """
    if options.prompts is None:
        return [{"prompt": options.prompt or ""} for _ in pictures]
    try:
        rows = read_prompts(options.prompts)
    except ValueError as error:
        raise UserError(str(error)) from error
    if len(rows) != len(pictures):
        raise UserError(
            f"{options.prompts} holds {len(rows)} prompts for {len(pictures)} images. Give one for each, the first for "
            f"{pictures[0]}, the last for {pictures[-1]}."
        )
    return rows
