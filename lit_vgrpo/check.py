"""``lightning check``: find every fault of a recipe, or of all stages of a curriculum, without training it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lit_vgrpo.cli import LINKED, TOP_LEVEL, RecipeCLI, build, guarded
from lit_vgrpo.curriculum import Curriculum, Stage, is_curriculum, merged_faults
from lit_vgrpo.data.prompts import prompt_faults
from lit_vgrpo.errors import UserError
from lit_vgrpo.estimate.room import memory_report
from lit_vgrpo.paths import resolve_path
from lit_vgrpo.recipe import parse_command, read_recipe
from lit_vgrpo.schema import sound_parts

SMALLEST_NEED = 100 * 2**20
CHECKPOINTS_AT_ONCE = 4
"""The last one, the one before it, the best one, and the one that is being written."""
COPIES_OF_WEIGHTS = 4
"""Weights, Adam's two moments and the average: what a checkpoint of a fully trained network holds."""


def check(args: Sequence[str]) -> int:
    """Validate ``RECIPE.yaml [key=value ...]``: keys, types, values, sizes, files, weights, free disk, memory.

    Returns:
        0, or 2 with every fault that was found, a line each on stderr.
    """
    return guarded(_check, args)


def _check(args: Sequence[str]) -> int:
    command = parse_command(args)
    return _check_stages(Curriculum.of(command)) if is_curriculum(command.recipe) else _check_recipe(args)


def _check_stages(curriculum: Curriculum) -> int:
    found: list[tuple[Stage, list[str]]] = []
    for stage in curriculum.stages:
        print(f"Stage {stage.number} of {len(curriculum.stages)}: {stage.name}")
        try:
            _check_recipe(curriculum.check_words(stage))
        except UserError as error:
            found.append((stage, error.faults))
    if found:
        raise UserError(*merged_faults(found))
    return 0


def _check_recipe(args: Sequence[str]) -> int:
    try:
        cli = build(args, make_folder=False)
    except UserError as error:
        raise UserError(*error.faults, *further_faults(args)) from error
    faults = [*cli.faults(), *disk_faults(cli)]
    if not cli.datamodule.sizes.faults(cli.trainer.world_size):
        print(cli.plan())
        if not faults:
            text, faults = memory_report(cli)
            print(text)
    if faults:
        raise UserError(*faults)
    print("\n".join(cli.about_prompts()))
    print(f"{cli.command.recipe}: no fault found for world size {cli.trainer.world_size}.")
    return 0


def further_faults(args: Sequence[str]) -> list[str]:
    """What is wrong besides the faults that keep the recipe from being built: files, checkpoints, rewards."""
    try:
        recipe = read_recipe(parse_command(args))
    except UserError:
        return []
    parts = sound_parts(recipe, TOP_LEVEL, LINKED)
    faults = [fault for key in ("model.policy", "model.reward") if key in parts for fault in parts[key].check()]
    data = recipe.get("data")
    return faults + (prompt_faults(data.get("train"), data.get("heldout")) if isinstance(data, dict) else [])


def disk_faults(cli: RecipeCLI) -> list[str]:
    """Faults of the place of the run folder: not writable, or less room than its checkpoints need, at a guess."""
    place = next(parent for parent in cli.folder.absolute().parents if parent.is_dir())
    if not os.access(place, os.W_OK):
        return [f"Cannot create the run folder {cli.folder}: {place} is not writable. Set run_dir=/another/folder."]
    need, free = CHECKPOINTS_AT_ONCE * checkpoint_bytes(cli), shutil.disk_usage(place).free
    if free >= need:
        return []
    room = f"{free / 2**30:.1f} GiB free, {CHECKPOINTS_AT_ONCE} checkpoints need about {need / 2**30:.1f}"
    return [f"{place} has {room}. Set run_dir=/another/disk."]


def checkpoint_bytes(cli: RecipeCLI) -> int:
    """About how large one checkpoint gets: known for a local pipeline folder, a floor otherwise."""
    policy = cli.model.policy
    network = resolve_path(policy.checkpoint) / policy.network_name
    if policy.lora_rank is not None or not network.is_dir():
        return SMALLEST_NEED
    return max(SMALLEST_NEED, COPIES_OF_WEIGHTS * _size(network))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
