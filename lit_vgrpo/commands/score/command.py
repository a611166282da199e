"""``lightning score``: what a reward says of image files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from lit_vgrpo.commands.prompt_checks import UnscorablePrompts
from lit_vgrpo.commands.reward_spec import build_reward
from lit_vgrpo.commands.score.options import parse_score, rows_for
from lit_vgrpo.commands.score.pictures import find_pictures, picture_faults, read_picture
from lit_vgrpo.commands.score.report import PictureScores, score_table, write_scores
from lit_vgrpo.commands.score.scoring import batches_of
from lit_vgrpo.errors import UserError, report, say
from lit_vgrpo.rewards import RewardBatch, RewardError, Weighted
from lit_vgrpo.system.hub import LoadError


def score(args: Sequence[str]) -> int:
    """Score images: ``REWARD IMAGES... [--prompt TEXT | --prompts FILE] [key=value ...]``.

    Returns:
        0; 1 when an image has no score; 2 for a mistake in what was typed, found before any weight is loaded; 130
        after Ctrl-C.
    """
    return answered(_score, args)


def answered(body: Callable[[Sequence[str]], int], args: Sequence[str]) -> int:
    """Run a verb that only looks; what goes wrong becomes lines on stderr and an exit status."""
    try:
        return body(args)
    except UserError as error:
        report(error.faults)
        return 2
    except RewardError as error:
        report([str(error)])
        return 1
    except KeyboardInterrupt:
        say("Stopped: nothing was written.", error=True)
        return 130


def _score(args: Sequence[str]) -> int:
    options = parse_score(args)
    reward = build_reward(options.reward)
    files = find_pictures(options.pictures)
    rows = rows_for(options, files)
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
    """A reward with its weights, closed at the end.

    Raises:
        UserError: they cannot be loaded.
    """
    try:
        reward.load()
        yield
    except (LoadError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from error
    finally:
        reward.close()


class _Pictures:
    """Files that are read when they are asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files

    def __getitem__(self, place: int) -> Tensor:
        return read_picture(self.files[place])


def _of_picture(batch: RewardBatch, index: int, file: Path, prompt: str) -> PictureScores:
    parts = {name: float(part[index]) for name, part in batch.parts.items() if batch.applies_to(name)[index]}
    failures = {name: batch.errors.get(name, "no reason given") for name, value in parts.items() if value != value}
    return PictureScores(str(file), prompt, float(batch.total[index]), parts, failures)
