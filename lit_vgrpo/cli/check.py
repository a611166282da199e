"""``lightning check``: find all errors of a recipe, or of all stages of a curriculum, without training."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path

import torch

from lit_vgrpo.config.header import Header
from lit_vgrpo.config.parts import built_part, with_full_key
from lit_vgrpo.config.recipe import STAGES, Command, Recipe, loaded, read_recipe
from lit_vgrpo.data.prompts import prompt_errors
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.launch.build import build_recipe, part_errors
from lit_vgrpo.launch.recipe_cli import RecipeCLI
from lit_vgrpo.launch.train import rehearse
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.options import Check
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.policies.loading import weight_files
from lit_vgrpo.policies.meta import NotEstimated
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.paths import resolve_path
from lit_vgrpo.training.settings import module_errors

SMALLEST_NEED = 100 * 2**20
CHECKPOINTS_AT_ONCE = 4
"""The last, previous and best checkpoint, and the one being written."""
WEIGHT_OPTIONS = ("lora_rank", "lora_alpha", "lora_targets", "train_only")
"""Options of a policy that decide which weights it trains."""
COPIES_OF_WEIGHTS = 4
"""Weights, Adam's two moments and the average, in the checkpoint of a fully trained network."""


def check_command(options: Check) -> int:
    """Check a recipe, or a curriculum's stages, for this machine or a GPU; raise UserError with all errors."""
    command = Command.parse(options.words)
    if options.scale is not None:
        return _show_scale(command, options)
    if STAGES in loaded(command.recipe):
        return _check_stages(command, options.memory)
    _check_recipe(command, options.memory)
    return 0


def _show_scale(command: Command, options: Check) -> int:
    from lit_vgrpo.apps.scale.report import scale_report

    if STAGES in loaded(command.recipe):
        raise UserError(f"{command.recipe} has several stages. Give --scale the recipe of one of them.")
    say(scale_report(build_recipe(read_recipe(command), make_folder=False, elsewhere=True), options))
    return 0


def _check_stages(command: Command, gpu_bytes: int | None) -> int:
    from lit_vgrpo.apps.curriculum.curriculum import Curriculum

    curriculum, weights = Curriculum.of(command), list[dict[str, object]]()
    stages_with: dict[str, list[str]] = {}
    for stage in curriculum.stages:
        say(f"Stage {stage.number} of {len(curriculum.stages)}: {stage.name}")
        try:
            policy = _check_recipe(Command.parse(curriculum.check_words(stage)), gpu_bytes)
            options = {f"model.policy.{name}": getattr(policy, name) for name in WEIGHT_OPTIONS}
            weights.append({"model.policy": type(policy).__name__, **options})
        except UserError as error:
            for line in error.errors:
                stages_with.setdefault(line, []).append(str(stage.number))
    if stages_with:
        raise UserError(*(f"Stage{'s' * (len(n) > 1)} {', '.join(n)}: {line}" for line, n in stages_with.items()))
    for number, (before, after) in enumerate(pairwise(weights), start=2):
        for key in (key for key in after if before[key] != after[key]):
            raise UserError(
                f"Stage {number}: {key} is {after[key]}, but {before[key]} in stage {number - 1}, whose weights it "
                "starts from. Use the same value in all stages."
            )
    return 0


def _check_recipe(command: Command, gpu_bytes: int | None) -> Policy:
    """Check a recipe and return its policy without loading it."""
    from lit_vgrpo.apps.memory.estimate import memory_report

    recipe, level = read_recipe(command), Header.of_file(command.recipe).evidence  # before code changes the folder
    try:
        cli = build_recipe(recipe, make_folder=False, elsewhere=True)
    except UserError as error:
        raise UserError(*dict.fromkeys([*error.errors, *further_errors(recipe)])) from error
    if errors := [*cli.errors(), *disk_errors(cli)]:
        if gpu_bytes is not None:  # asked before one rents a GPU, and downloads weights
            with suppress(NotEstimated, LoadError, ValueError):
                estimate, too_large = memory_report(cli, gpu_bytes, is_complete=False)
                say(estimate)
                errors = [*too_large, *errors]
        raise UserError(*errors)
    rehearse(cli)
    errors, learned = reward_errors(cli), cli.model.policy.description()
    try:
        estimate, too_large = memory_report(cli, gpu_bytes)
        errors += too_large
    except NotEstimated as reason:
        estimate = f"memory: not estimated, {reason}"
    if errors:
        raise UserError(*errors)
    changed = " (before your changes)" if command.overlays or command.overrides else ""
    evidence = [f"Evidence{changed}: {level}."] if level else []
    shown = [f"{cli.model.policy.pipeline_class}, learned from watched calls:", *learned] if learned else []
    say("\n".join([*recipe.notes, cli.plan(), estimate, *shown, *cli.about_prompts(), *evidence]))
    number = cli.trainer.world_size
    say(f"{command.recipe}: no errors found for {number} process{'es' * (number != 1)}.")
    return cli.model.policy


def further_errors(recipe: Recipe) -> list[str]:
    """Return the errors in the parts of a recipe that cannot be built, and in their files."""
    errors, parts = part_errors(recipe.values)
    try:
        problems = module_errors(built_part(recipe.values, "model", VGRPOModule), parts["data"].sizes)
    except (UserError, KeyError, AttributeError):
        problems = [error for key in ("model.policy", "model.reward") if parts.get(key) for error in parts[key].check()]
    data = recipe.values.get("data")
    if isinstance(data, dict):
        problems += prompt_errors(data.get("train"), data.get("heldout"))
    return [*errors, *(with_full_key(error, recipe.values) for error in problems)]


def reward_errors(cli: RecipeCLI) -> list[str]:
    """Score random images or videos with the rewards that load nothing, and return their errors."""
    frames = [] if cli.model.policy.num_frames is None else [cli.model.policy.num_frames]
    images = torch.rand(2, *frames, 3, *(cli.model.policy.image_size or (64, 64)))
    images = images.to(cli.trainer.strategy.root_device)  # where a run decodes them
    return cli.model.evaluator.observed.errors_on(images, list(islice(cli.datamodule.training_rows(), 64)))


def disk_errors(cli: RecipeCLI) -> list[str]:
    """Return an error if a folder cannot be created, or the run's disk has less room than checkpoints need."""
    place = next(parent for parent in cli.folder.absolute().parents if parent.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        why = "is not writable" if place.is_dir() else "is a file"
        return [f"Cannot create the run folder {cli.folder}: {place} {why}. Set run_dir=/another/folder."]
    for logger in cli.trainer.loggers:
        folder = Path(logger.save_dir or cli.folder).absolute()
        if not next(parent for parent in (folder, *folder.parents) if parent.exists()).is_dir():
            name = type(logger).__name__
            return [f"trainer.logger={name} cannot write to {logger.save_dir}, which is in a file. Set its save_dir."]
    need, free = CHECKPOINTS_AT_ONCE * checkpoint_bytes(cli), shutil.disk_usage(place).free
    if free >= need:
        return []
    room = f"{free / 2**30:.1f} GiB free, {CHECKPOINTS_AT_ONCE} checkpoints need about {need / 2**30:.1f}"
    return [f"{place} has {room}. Set run_dir=/another/disk."]


def checkpoint_bytes(cli: RecipeCLI) -> int:
    """Estimate the size of a checkpoint from a local pipeline folder; return a lower bound without one."""
    policy = cli.model.policy
    networks = [resolve_path(policy.checkpoint) / name for name in policy.network_names]
    if policy.lora_rank is not None or not networks[0].is_dir():
        return SMALLEST_NEED
    size = sum(file.stat().st_size for network in networks for file in weight_files(network).get(policy.variant, []))
    return max(SMALLEST_NEED, COPIES_OF_WEIGHTS * size)
