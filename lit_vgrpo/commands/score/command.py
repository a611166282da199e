"""``lightning score``: score image files with a reward."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from tqdm import tqdm

from lit_vgrpo.commands.prompt_checks import UnscorablePrompts
from lit_vgrpo.commands.reward_spec import NO_REWARD, build_reward
from lit_vgrpo.commands.run import guarded
from lit_vgrpo.commands.score.pictures import find_pictures, picture_faults, read_picture
from lit_vgrpo.commands.score.report import PictureScores, score_table, write_scores
from lit_vgrpo.commands.score.scoring import batches_of
from lit_vgrpo.config.arguments import Options, option, read_path, whole
from lit_vgrpo.config.recipe import shipped_overlays
from lit_vgrpo.data import read_prompts
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.rewards import RewardBatch, Weighted
from lit_vgrpo.system.hub import LoadError

OUT_KINDS = (".json", ".csv")


@dataclass(kw_only=True)
class ScoreOptions(Options):
    """Options of ``lightning score``; the words are a reward, its options and images.

    Attributes:
        prompt: One prompt for all images.
        prompts: File with a prompt for each image.
        out: Table to write.
        batch_size: Images per call of the reward, at most.
        reward: The words that name the reward, with its options.
        pictures: Files and folders of images.
    """

    subcommand: ClassVar[str] = "score"

    prompt: str | None = option()
    prompts: str | None = option()
    out: Path | None = option(read=read_path)
    batch_size: int = whole(1)
    reward: list[str] = field(init=False)
    pictures: list[str] = field(init=False)

    def __post_init__(self) -> None:
        if not self.words or "=" in self.words[0].partition(":")[0]:
            raise UserError(NO_REWARD)
        overlays = shipped_overlays()
        self.reward, self.pictures = [self.words[0]], []
        for word in self.words[1:]:
            is_path = Path(word).expanduser().exists()
            is_overlay = word.endswith((".yaml", ".yml")) or (word in overlays and not is_path)
            (self.reward if is_overlay or ("=" in word and not is_path) else self.pictures).append(word)
        faults = []
        if self.prompt is not None and self.prompts is not None:
            faults.append("--prompt and --prompts are both given. Use --prompt TEXT for all images, or --prompts FILE.")
        if self.out is not None and (self.out.suffix not in OUT_KINDS or self.out.is_dir()):
            written = self.out.with_suffix(".json")
            faults.append(f"--out {self.out} is not the name of a table. Write --out {written} or .csv.")
        if faults:
            raise UserError(*faults)

    def rows_for(self, pictures: Sequence[Path]) -> list[dict[str, Any]]:
        """Return the prompt's row of each image; an empty prompt where none was given.

        Raises:
            UserError: The file of prompts cannot be read, or does not hold one for each image.
        """
        if self.prompts is None:
            return [{"prompt": self.prompt or ""} for _ in pictures]
        try:
            rows = read_prompts(self.prompts)
        except ValueError as error:
            raise UserError(str(error)) from error
        if len(rows) != len(pictures):
            raise UserError(
                f"{self.prompts} holds {len(rows)} prompts for {len(pictures)} images. Give one for each, the first "
                f"for {pictures[0]}, the last for {pictures[-1]}."
            )
        return rows


def score(args: Sequence[str]) -> int:
    """Score images: ``REWARD IMAGES... [--prompt TEXT | --prompts FILE] [key=value ...]``.

    Returns:
        0; 1 when an image has no score; 2 for an error in the arguments, found before weights are loaded; 130 after
        Ctrl-C.
    """
    return guarded(_score, ScoreOptions, args, stopped="Stopped: nothing was written.")


def _score(options: ScoreOptions) -> int:
    reward = build_reward(options.reward)
    files = find_pictures(options.pictures)
    rows = options.rows_for(files)
    has_no_prompt = options.prompt is None and options.prompts is None
    of_prompts = UnscorablePrompts.of(reward, rows).refused(any_failure=True)
    faults = [*reward.check(), *picture_faults(files), *of_prompts]
    if of_prompts and has_no_prompt:
        faults.append("No prompt was given. Add --prompt TEXT, or --prompts FILE with one for each image.")
    if faults:
        raise UserError(*faults)
    scores: list[PictureScores] = []
    with loaded(reward):
        start = time.perf_counter()
        bar = tqdm(total=len(files), leave=False, disable=not sys.stderr.isatty())
        for batch in batches_of(_Pictures(files), rows, options.batch_size):
            found = reward.score(batch.images, batch.prompts, batch.rows)
            for index, place in enumerate(batch.places):
                scores.append(_of_picture(found, index, files[place], batch.prompts[index]))
            bar.update(len(batch.places))
        bar.close()
        seconds = time.perf_counter() - start
    say(score_table(scores, reward.part_names))
    if has_no_prompt:
        say("No prompt was given: rewards that look at it saw an empty one.", error=True)
    if options.out is not None:
        described = {"reward": options.reward, "weights": reward.weight_of, "seconds": round(seconds, 3)}
        try:
            write_scores(options.out, scores, reward.part_names, described)
        except OSError as error:
            raise UserError(f"Cannot write {options.out}: {error.strerror}. Set --out /another/file.json.") from error
        say(f"Written: {options.out}")
    return int(any(own.failures for own in scores))


@contextmanager
def loaded(reward: Weighted) -> Iterator[None]:
    """Load a reward for the block and close it at the end.

    Raises:
        UserError: It cannot be loaded.
    """
    try:
        reward.load()
        yield
    except (LoadError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from error
    finally:
        reward.close()


class _Pictures:
    """Images that are read from their files on access."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __getitem__(self, place: int) -> Tensor:
        return read_picture(self.files[place])


def _of_picture(batch: RewardBatch, index: int, file: Path, prompt: str) -> PictureScores:
    parts = {name: float(part[index]) for name, part in batch.parts.items() if batch.applies_to(name)[index]}
    failures = {name: batch.errors.get(name, "no reason given") for name, value in parts.items() if value != value}
    return PictureScores(str(file), prompt, float(batch.total[index]), parts, failures)
