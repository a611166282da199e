"""``lightning check-reward``: the rewards of a recipe on a few images, before a long run."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_vgrpo.cli.score.command import loaded
from lit_vgrpo.cli.score.images import device, find_images, image_errors, read_image
from lit_vgrpo.cli.score.trial import PartTrial, findings, trial_table, trials
from lit_vgrpo.core.pictures import references_of
from lit_vgrpo.data.rows import Rows
from lit_vgrpo.errors import UserError, counted, report, say
from lit_vgrpo.launch.build import build
from lit_vgrpo.launch.recipe_cli import RecipeCLI
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.training.start import load_policy

OVERRIDES = ("trainer.logger=false", "ckpt_path=null")


def check_reward(words: Sequence[str], folder: str | None = None, num_prompts: int = 4, each: int = 2) -> int:
    """Try a recipe's rewards on a few images.

    Args:
        words: A recipe, overlays and overrides.
        folder: File or folder of images to score; ``None`` takes images of the recipe's policy.
        num_prompts: Training prompts to score images of.
        each: Images per prompt.

    Returns:
        0; 1 where a reward is constant or failed; 2 for a mistake in the recipe; 130 after Ctrl-C.
    """
    cli = build([*words, *OVERRIDES], make_folder=False)
    files = find_images([folder])[: num_prompts * each] if folder is not None else []
    reward = cli.model.observed
    errors = [*reward.check(), *cli.datamodule.check(), *image_errors(files)]
    errors += [] if files else cli.model.policy.check()
    if errors:
        raise UserError(*errors)
    unscorable, strict = cli.find_unscorable(), cli.model.failed_images == "stop"
    refused = [error for found in unscorable for error in found.refused(any_failure=strict)]
    if refused:
        raise UserError(*refused)
    rows = [row for row in training_rows(cli, num_prompts) for _ in range(each)]
    if files:
        rows, images = rows[: len(files)], [read_image(file) for file in files]
        say(f"{counted(len(images), 'image')} of {folder}, {each} for each of the first training prompts")
    else:
        start = time.perf_counter()
        images = made_images(cli, rows)
        say(f"{counted(len(images), 'image')} made by the recipe's policy in {time.perf_counter() - start:.1f} s")
    groups = torch.arange(len(images)) // each
    with loaded(reward):
        parts = trials(reward, images, rows, groups[: len(images)], cli.model.policy.decode_batch_size)
    say(trial_table(parts))
    say(estimate(cli, parts))
    found = [*(line for of in unscorable for line in of.lines()), *findings(parts)]
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
    """Generate an image ``(1, 3, H, W)`` per prompt with the recipe's policy and evaluation settings.

    Raises:
        UserError: The policy cannot be loaded.
    """
    module, size = cli.model, cli.model.policy.decode_batch_size
    try:
        load_policy(module.policy)
    except LoadError as error:
        raise UserError(str(error)) from error
    module.to(device())
    images: list[Tensor] = []
    for start in range(0, len(rows), size):
        own = rows[start : start + size]
        numbers, prompts = list(range(start, start + len(own))), [row["prompt"] for row in own]
        images += module.generate(prompts, numbers, references=references_of(own)).cpu().split(1)
    return images


def estimate(cli: RecipeCLI, parts: Sequence[PartTrial]) -> str:
    """Return a line on the time that the rewards of an iteration take on one rank."""
    plan = cli.datamodule.sizes.plan(cli.trainer.world_size)
    trained = {part.name: part.reward for part in cli.model.reward.parts}
    seconds = {part.name: part.seconds_per_image * plan.images_per_rank for part in parts if part.name in trained}
    beside = sum(seconds[name] for name, reward in trained.items() if reward.concurrent)
    overlap = f", of which {beside:.2g} s run beside the rollout" if beside else ""
    images = f"{counted(plan.images_per_rank, 'image')} per rank"
    return f"Rewards of an iteration, {images}: about {sum(seconds.values()):.2g} s{overlap}."
