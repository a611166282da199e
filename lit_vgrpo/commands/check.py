"""``lightning check``: find all errors of a recipe, or of all stages of a curriculum, without training."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence

from lit_vgrpo.commands.curriculum import Curriculum, Stage, is_curriculum, merged_faults
from lit_vgrpo.commands.estimate.room import NotEstimated, gpu_memory_of, memory_report
from lit_vgrpo.commands.recipe_cli import RecipeCLI
from lit_vgrpo.commands.run import LINKED, TOP_LEVEL, build, guarded
from lit_vgrpo.commands.untrusted import list_untrusted
from lit_vgrpo.config.recipe import Command, read_recipe
from lit_vgrpo.config.schema import sound_parts
from lit_vgrpo.data.prompts import prompt_faults
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.policies.pipeline_folder import weight_files
from lit_vgrpo.system.paths import resolve_path

MEMORY = "--memory"
UNTRUSTED = "--untrusted"
SMALLEST_NEED = 100 * 2**20
CHECKPOINTS_AT_ONCE = 4
"""The last one, the one before it, the best one, and the one being written."""
COPIES_OF_WEIGHTS = 4
"""Weights, Adam's two moments and the average, in the checkpoint of a fully trained network."""


def check(args: Sequence[str]) -> int:
    """Check a recipe's keys, types, values, sizes, files, weights, free disk and memory.

    ``--memory 80GiB`` compares the memory it needs with a GPU of that size, on any machine. ``--untrusted`` lists the
    code, variables and hosts that an untrusted recipe names, and checks nothing.

    Returns:
        0, or 2 with all errors on stderr, a line each.
    """
    return guarded(_check, args)


def _check(args: Sequence[str]) -> int:
    if UNTRUSTED in args:
        return list_untrusted([word for word in args if word != UNTRUSTED])
    args, gpu_memory = without_memory(args)
    command = Command.parse(args)
    if is_curriculum(command.recipe):
        return _check_stages(Curriculum.of(command), gpu_memory)
    return _check_recipe(args, gpu_memory)


def without_memory(args: Sequence[str]) -> tuple[list[str], int | None]:
    """Take ``--memory SIZE`` out of the arguments; return the others and the size in bytes.

    Raises:
        UserError: The size is missing or not valid.

    >>> without_memory(["tiny_shapes", "--memory", "1GiB", "name=a"])
    (['tiny_shapes', 'name=a'], 1073741824)
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(MEMORY, nargs="?", const="")
    found, rest = parser.parse_known_args(list(args))
    return rest, None if found.memory is None else gpu_memory_of(found.memory)


def _check_stages(curriculum: Curriculum, gpu_memory: int | None) -> int:
    found: list[tuple[Stage, list[str]]] = []
    for stage in curriculum.stages:
        say(f"Stage {stage.number} of {len(curriculum.stages)}: {stage.name}")
        try:
            _check_recipe(curriculum.check_words(stage), gpu_memory)
        except UserError as error:
            found.append((stage, error.faults))
    if found:
        raise UserError(*merged_faults(found))
    return 0


def _check_recipe(args: Sequence[str], gpu_memory: int | None) -> int:
    try:
        cli = build(args, make_folder=False)
    except UserError as error:
        raise UserError(*error.faults, *further_faults(args)) from error
    faults = [*cli.faults(), *disk_faults(cli)]
    if not cli.datamodule.sizes.faults(cli.trainer.world_size):
        say(cli.plan())
        try:
            text, too_large = memory_report(cli, gpu_memory)
            say(text)
            faults += too_large
        except UserError as error:
            faults += [fault for fault in error.faults if fault not in faults]
        except NotEstimated as reason:
            if not faults:  # of which one may well be the reason
                say(f"memory: not estimated, {reason}")
    if faults:
        raise UserError(*faults)
    say("\n".join(cli.about_prompts()))
    say(f"{cli.command.recipe}: no fault found for world size {cli.trainer.world_size}.")
    return 0


def further_faults(args: Sequence[str]) -> list[str]:
    """Return the errors in files, checkpoints and rewards of a recipe that cannot be built."""
    try:
        recipe = read_recipe(Command.parse(args))
    except UserError:
        return []
    parts = sound_parts(recipe, TOP_LEVEL, LINKED)
    faults = [fault for key in ("model.policy", "model.reward") if key in parts for fault in parts[key].check()]
    data = recipe.get("data")
    return faults + (prompt_faults(data.get("train"), data.get("heldout")) if isinstance(data, dict) else [])


def disk_faults(cli: RecipeCLI) -> list[str]:
    """Return an error if the run folder cannot be created, or its disk has less room than checkpoints need."""
    place = next(parent for parent in cli.folder.absolute().parents if parent.is_dir())
    if not os.access(place, os.W_OK):
        return [f"Cannot create the run folder {cli.folder}: {place} is not writable. Set run_dir=/another/folder."]
    need, free = CHECKPOINTS_AT_ONCE * checkpoint_bytes(cli), shutil.disk_usage(place).free
    if free >= need:
        return []
    room = f"{free / 2**30:.1f} GiB free, {CHECKPOINTS_AT_ONCE} checkpoints need about {need / 2**30:.1f}"
    return [f"{place} has {room}. Set run_dir=/another/disk."]


def checkpoint_bytes(cli: RecipeCLI) -> int:
    """Estimate the size of a checkpoint from a local pipeline folder; return a lower bound without one."""
    policy = cli.model.policy
    network = resolve_path(policy.checkpoint) / policy.network_name
    if policy.lora_rank is not None or not network.is_dir():
        return SMALLEST_NEED
    size = sum(file.stat().st_size for file in weight_files(network, policy.variant))
    return max(SMALLEST_NEED, COPIES_OF_WEIGHTS * size)
