"""``lightning check-reward``: the rewards of a recipe on a few images, before a long run."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from PIL import ImageOps
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from lit_vgrpo.callbacks.report import SIDE
from lit_vgrpo.callbacks.samples import draw_grid
from lit_vgrpo.cli.image_files import batches_of, device, find_images, loaded, read_image
from lit_vgrpo.core.advantages import no_spread_share, small_spread_warning
from lit_vgrpo.core.gather import image_ranks
from lit_vgrpo.core.pictures import references_of
from lit_vgrpo.core.pixels import strips, to_pil
from lit_vgrpo.data.prompts import Rows
from lit_vgrpo.errors import UserError, counted, report, say, score_text, shell_line
from lit_vgrpo.launch.build import build
from lit_vgrpo.launch.recipe_cli import RecipeCLI
from lit_vgrpo.options import CheckReward
from lit_vgrpo.rewards import Scores, Weighted
from lit_vgrpo.rewards.base import ImageBatch
from lit_vgrpo.rewards.combine import Part
from lit_vgrpo.rewards.function import is_custom
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.memory import measured_memory
from lit_vgrpo.system.paths import check_writable, typed_path
from lit_vgrpo.training.saved_weights import load_policy
from lit_vgrpo.training.settings import find_unscorable, reward_errors

OVERRIDES = ("trainer.logger=false", "ckpt_path=null")
NOISE, ROUNDING = 0.1, 1e-3  # shares of the scores' std and size by which a score may change from call to call
BLACK = 0.02  # share of the scores' size by which some score of an image must differ from that of a black one
HEADER = ("weight", "mean", "std", "min", "max", "failed", "no spread", "s/image")


def check_reward(options: CheckReward) -> int:
    """Try a recipe's rewards on a few images; return 1 if a reward is constant or failed."""
    folder, num_prompts, each, out = options.images, options.num_prompts, options.images_per_prompt, options.out
    if out.suffix != ".png" or out.is_dir():
        raise UserError(f"--out {out} is not a .png file. Use {shell_line('--out', out.with_suffix('.png'))}.")
    check_writable(out)
    files = [] if folder is None else find_images([folder], num_prompts * each, ignored=re.escape(out.name))
    cli = build([*options.words, *OVERRIDES], make_folder=False)
    reward = cli.model.evaluator.observed
    if errors := [*reward.check(), *cli.datamodule.check(), *([] if files else cli.model.policy.check())]:
        raise UserError(*errors)
    if refused := reward_errors(cli.model, cli.datamodule):
        raise UserError(*refused)
    unscorable = find_unscorable(cli.model, cli.datamodule)
    rows = [row for row in training_rows(cli, num_prompts) for _ in range(each)]
    if files:
        rows, images = rows[: len(files)], [read_image(file) for file in files]
        say(f"{counted(len(images), 'image')} of {folder}, {each} for each of the first training prompts")
    else:
        start = time.perf_counter()
        images = made_images(cli, rows)
        say(f"{counted(len(images), 'image')} made by the recipe's policy in {time.perf_counter() - start:.1f} s")
    groups = torch.arange(len(images)) // each
    with measured_memory() as memory, loaded(reward):
        parts = trials(reward, images, rows, groups[: len(images)], cli.model.policy.decode_batch_size)
    found = [*(line for of in unscorable for line in of.lines()), *findings(parts, cli.model.objective.uses_advantages)]
    if not any(len(part.finite) for part in parts):
        report(found)
        return 1
    columns = pd.Index(HEADER, name="reward")
    say(pd.DataFrame([part.row() for part in parts], [part.name for part in parts], columns).to_string())
    save_scored(images, rows, parts, each, out)
    say(f"The images with their scores: {out}")
    per_rank = cli.datamodule.sizes.plan(image_ranks(cli.trainer)[1]).images_per_rank
    trained = {part.name for part in cli.model.reward.parts}
    seconds = sum(part.seconds_per_image * per_rank for part in parts if part.name in trained)
    say(f"Rewards of an iteration, {counted(per_rank, 'image')} per rank: about {seconds:.2g} s. Memory: {memory}.")
    report(found)
    return int(bool(found))


def training_rows(cli: RecipeCLI, count: int) -> Rows:
    """Return the rows that the run would draw first."""
    dataset = cli.datamodule.train_dataloader().dataset
    rows: Rows = []
    while len(rows) < count:
        iteration = len(rows) // cli.datamodule.sizes.prompts_per_iteration
        rows += dataset[iteration * len(dataset)].rows
    return rows[:count]


def made_images(cli: RecipeCLI, rows: Rows) -> list[Tensor]:
    """Generate an image ``(1, 3, H, W)`` per prompt as the evaluation does; raise UserError without weights."""
    module, size = cli.model, cli.model.policy.decode_batch_size
    try:
        load_policy(module.policy)
    except LoadError as error:
        raise UserError(str(error)) from error
    module.to(device())
    images: list[Tensor] = []
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        numbers, prompts = list(range(start, start + len(batch))), [row["prompt"] for row in batch]
        images += module.evaluator.generate(prompts, numbers, references=references_of(batch)).cpu().split(1)
    return images


def save_scored(images: Sequence[Tensor], rows: Rows, parts: Sequence[PartTrial], each: int, path: Path) -> None:
    """Write a picture of the images ``(1, 3, H, W)``, ``each`` per prompt, and their scores."""
    below: list[list[str]] = [[] for _ in range(-(-len(images) // each) * each)]
    for part in parts[:1] if len(parts) == 2 else [parts[-1], *parts[:-1]]:  # the total of one reward is that reward
        for place, score in zip(part.places.tolist(), part.scores.tolist(), strict=True):
            below[place].append(f"{part.name} {'failed' if math.isnan(score) else f'{score:.4g}'}")
    pictures = [to_pil(strips(image))[0] for image in images]
    size = tuple(min(SIDE, max(sides)) for sides in zip(*(picture.size for picture in pictures), strict=True))
    cells = [pil_to_tensor(ImageOps.pad(picture, size, color="white")) / 255 for picture in pictures]
    cells += [torch.ones_like(cells[0])] * (len(below) - len(cells))
    prompts, texts = [row["prompt"] for row in rows[::each]], ["\n".join(lines) for lines in below]
    typed_path(path).parent.mkdir(parents=True, exist_ok=True)
    draw_grid(torch.stack(cells).unflatten(0, (-1, each)), prompts, [], texts).save(typed_path(path))


@dataclass
class PartTrial:
    """Result of one reward, or of the weighted sum, whose weight is ``None``.

    Attributes:
        scores: ``(n,)``, of the images that the reward applies to; NaN if it failed.
        groups: ``(n,)``, index of each image's prompt.
        places: ``(n,)``, index of each image.
        seconds: Wall time for all images, after a warm-up.
        error: The last failure, if any.
        change: Largest difference between two calls with the same images, the first batch.
        from_black: Largest difference of a score of the first batch from that of a black image.
    """

    name: str
    weight: float | None
    scores: Tensor
    groups: Tensor
    places: Tensor
    seconds: float
    error: str | None = None
    change: float = 0.0
    from_black: float = math.inf

    def __post_init__(self) -> None:
        is_finite = self.scores.isfinite()
        self.finite = self.scores[is_finite].double()
        self.failed = len(self.scores) - len(self.finite)
        self.seconds_per_image = self.seconds / max(1, len(self.scores))
        self.is_constant = len(self.finite) > 1 and len(self.finite.unique()) == 1
        # share of the prompts whose images all score the same; None if no prompt has two scored images
        prompts, counts = self.groups[is_finite].unique(return_counts=True)
        kept = is_finite & torch.isin(self.groups, prompts[counts > 1])
        self.flat_share = no_spread_share(self.scores[kept], self.groups[kept]) if kept.any() else None

    def row(self) -> list[str]:
        """Return the cells of :data:`HEADER`."""
        values = self.finite
        numbers = [values.mean(), values.std(correction=0), values.min(), values.max()] if len(values) else []
        return [
            "" if self.weight is None else f"{self.weight:.3g}",
            *([score_text(float(number), decimals=4) for number in numbers] or ["-"] * 4),
            str(self.failed),
            "-" if self.flat_share is None else f"{self.flat_share:.0%}",
            f"{self.seconds_per_image:.4f}",
        ]


def trials(
    reward: Weighted, images: Iterable[Tensor], rows: Sequence[Mapping[str, Any]], groups: Tensor, batch_size: int
) -> list[PartTrial]:
    """Score images, and return the result of each reward and, last, of the sum.

    Args:
        images: Each ``(1, 3, H, W)``.
        groups: ``(N,)``, index of each image's prompt.
        batch_size: Images per call of a reward, at most; one that compares gets all.
    """
    batches = list(batches_of(images, rows, len(rows) if reward.compares else batch_size))
    first = reward.score(*batches[0])  # the first call of a model takes longer
    joined = Scores.joined([reward.score(*batch) for batch in batches])
    parts, places = [], torch.arange(len(rows))
    for part in reward.parts:
        name, scores = part.name, joined.parts[part.name]
        applies, of_first = joined.applies_to(name), first.parts[name].cpu()
        weight, seconds, error = reward.weight_of[name], joined.seconds[name], joined.errors.get(name)
        change = float((scores[: len(first)] - of_first).abs().nan_to_num().max())
        from_black = change_to_black(reward, part, of_first, *batches[0]) if is_custom(part.reward) else math.inf
        of_images = scores[applies], groups[applies], places[applies]
        parts.append(PartTrial(name, weight, *of_images, seconds, error, change, from_black))
    return [*parts, PartTrial("total", None, joined.total, groups, places, sum(joined.seconds.values()))]


def change_to_black(
    reward: Weighted, part: Part, scores: Tensor, images: Tensor, prompts: list[str], rows: list[dict[str, Any]]
) -> float:
    """Return the largest change of a part's scores ``(B,)`` if its images turn black; infinity if there is none."""
    if not images.any():
        return math.inf
    black = ImageBatch.rounded(torch.zeros_like(images), prompts, rows)
    changes = (scores - reward.score_part(part, black).total).abs()
    return max(changes[changes.isfinite()].tolist(), default=math.inf)


def findings(parts: Sequence[PartTrial], uses_advantages: bool = True) -> list[str]:
    """Return the warnings before a long run; ``parts`` are those of :func:`trials`."""
    *single, total = parts
    failed = [part for part in single if part.failed]
    warnings = [f"{part.name} failed for {part.failed} of {len(part.scores)} images: {part.error}" for part in failed]
    for part in (part for part in single if part.change):
        if part.change > NOISE * part.finite.std(correction=0) + ROUNDING * part.finite.abs().max():
            other = f"{part.name} gave other scores for the same images, by up to {part.change:.4g}"
            warnings.append(f"{other}. Switch its model to eval() if dropout is on, and seed what it draws.")
    for part in (part for part in single if len(part.finite) and not part.is_constant):
        if part.from_black < BLACK * part.finite.abs().max():
            blind = f"{part.name} scores a black image like these: the difference is at most {part.from_black:.4g}"
            warnings.append(f"{blind}. A transformers image processor divides by 255: pass it do_rescale=False.")
    constant = [part for part in single if part.is_constant] or [total] * total.is_constant
    for part in constant:
        value = f"{part.name} is constant ({float(part.finite[0]):.4g}) on {len(part.finite)} images"
        warnings.append(f"{value}, so nothing is learned from it. Check the prompts, or try more with --num-prompts.")
    if uses_advantages and not constant and total.flat_share == 1.0:
        no_spread = "No prompt has images that differ in reward, so there is no gradient."
        warnings.append(f"{no_spread} Try --images-per-prompt 8.")
    small = small_spread_warning("The rewards of these images", total.finite) if len(total.finite) > 1 else None
    if uses_advantages and not constant and small is not None:
        warnings.append(small)
    return warnings
