"""``lightning score``: score image files with a reward."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lit_vgrpo.cli.score.images import batches_of, find_images, image_errors, read_image
from lit_vgrpo.cli.score.report import image_scores, score_table, write_scores
from lit_vgrpo.config.recipe import shipped_overlays
from lit_vgrpo.data import read_prompts
from lit_vgrpo.errors import UserError, counted, say
from lit_vgrpo.launch.build import NO_REWARD, build_reward
from lit_vgrpo.launch.checks import UnscorablePrompts
from lit_vgrpo.rewards import Weighted
from lit_vgrpo.system.hub import LoadError

OUT_KINDS = (".json", ".csv")


@dataclass(kw_only=True)
class ScoreOptions:
    """Options of ``lightning score``, whose help describes the first ones.

    Attributes:
        words: A reward, its options and images, as typed.
        reward: The words that name the reward, with its options.
        images: Files and folders of images.
    """

    words: Sequence[str]
    prompt: str | None = None
    prompts: str | None = None
    out: Path | None = None
    batch_size: int = 1
    reward: list[str] = field(init=False)
    images: list[str] = field(init=False)

    def __post_init__(self) -> None:
        if not self.words or "=" in self.words[0].partition(":")[0]:
            raise UserError(NO_REWARD)
        overlays = shipped_overlays()
        self.reward, self.images = [self.words[0]], []
        for word in self.words[1:]:
            is_path = Path(word).expanduser().exists()
            is_overlay = word.endswith((".yaml", ".yml")) or (word in overlays and not is_path)
            (self.reward if is_overlay or ("=" in word and not is_path) else self.images).append(word)
        errors = []
        if self.prompt is not None and self.prompts is not None:
            errors.append("--prompt and --prompts are both given. Use --prompt TEXT for all images, or --prompts FILE.")
        if self.out is not None and (self.out.suffix not in OUT_KINDS or self.out.is_dir()):
            errors.append(f"--out {self.out} is not a .json or .csv file. Use --out {self.out.with_suffix('.json')}.")
        if errors:
            raise UserError(*errors)

    def rows_for(self, files: Sequence[Path]) -> list[dict[str, Any]]:
        """Return the prompt's row of each image; the prompt is empty if none was given.

        Raises:
            UserError: The prompt file cannot be read, or does not have one prompt per image.
        """
        if self.prompts is None:
            return [{"prompt": self.prompt or ""} for _ in files]
        try:
            rows = read_prompts(self.prompts)
        except ValueError as error:
            raise UserError(str(error)) from error
        if len(rows) != len(files):
            raise UserError(
                f"{self.prompts} has {counted(len(rows), 'prompt')} for {counted(len(files), 'image')}. "
                f"Give one per image, from {files[0]} to {files[-1]}."
            )
        return rows


def score(options: ScoreOptions) -> int:
    """Score images: ``REWARD IMAGES... [--prompt TEXT | --prompts FILE] [key=value ...]``.

    Returns:
        0; 1 if an image has no score; 2 for an error in the arguments, found before weights are loaded; 130 after
        Ctrl-C.
    """
    reward = build_reward(options.reward)
    files = find_images(options.images)
    rows = options.rows_for(files)
    has_no_prompt = options.prompt is None and options.prompts is None
    of_prompts = UnscorablePrompts.of(reward, rows).refused(any_failure=True)
    errors = [*reward.check(), *image_errors(files), *of_prompts]
    if of_prompts and has_no_prompt:
        errors.append("No prompt was given. Add --prompt TEXT, or --prompts FILE with one prompt per image.")
    if errors:
        raise UserError(*errors)
    scores: list[dict[str, Any]] = []
    with loaded(reward):
        start = time.perf_counter()
        bar = tqdm(total=len(files), leave=False, disable=not sys.stderr.isatty())
        for images, prompts, of_images in batches_of(map(read_image, files), rows, options.batch_size):
            found = reward.score(images, prompts, of_images)
            for index, prompt in enumerate(prompts):
                scores.append(image_scores(found, index, files[len(scores)], prompt))
            bar.update(len(prompts))
        bar.close()
        seconds = time.perf_counter() - start
    say(score_table(scores, reward.part_names))
    if has_no_prompt:
        say("No prompt was given: rewards that use it saw an empty one.", error=True)
    if options.out is not None:
        described = {"reward": options.reward, "weights": reward.weight_of, "seconds": round(seconds, 3)}
        write_scores(options.out, scores, reward.part_names, described)
        say(f"Written: {options.out}")
    return int(any(own["failures"] for own in scores))


@contextmanager
def loaded(reward: Weighted) -> Iterator[None]:
    """Load a reward for the block and close it at the end; raise UserError if it cannot be loaded."""
    try:
        reward.load()
        yield
    except (LoadError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from error
    finally:
        reward.close()
