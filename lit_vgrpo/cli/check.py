"""``lightning check``: find all errors of a recipe, or of all stages of a curriculum, without training."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import Self, override

from lit_vgrpo.apps.curriculum.curriculum import Curriculum, Stage, is_curriculum, merged_errors
from lit_vgrpo.apps.memory.room import NotEstimated, gpu_memory_of, memory_report
from lit_vgrpo.cli.untrusted import list_untrusted
from lit_vgrpo.config.arguments import flag, option, subcommand
from lit_vgrpo.config.header import Header
from lit_vgrpo.config.recipe import Command, read_recipe
from lit_vgrpo.config.schema import sound_parts
from lit_vgrpo.data.prompts import prompt_errors
from lit_vgrpo.errors import UserError, say
from lit_vgrpo.launch.build import build_recipe
from lit_vgrpo.launch.recipe_cli import LINKED, TOP_LEVEL, RecipeCLI
from lit_vgrpo.policies.loading import distillation_warning, weight_files
from lit_vgrpo.system.paths import resolve_path

SMALLEST_NEED = 100 * 2**20
CHECKPOINTS_AT_ONCE = 4
"""The last one, the one before it, the best one, and the one being written."""
COPIES_OF_WEIGHTS = 4
"""Weights, Adam's two moments and the average, in the checkpoint of a fully trained network."""


@dataclass(kw_only=True)
class CheckOptions(Command):
    """Options of ``lightning check``.

    Attributes:
        memory: Size of the GPU to compare with, in bytes; ``None`` takes this machine's.
        untrusted: List what the recipe names instead of checking it.
    """

    subcommand: ClassVar[str] = "check"

    memory: int | None = option(read=gpu_memory_of)
    untrusted: bool = flag()

    @classmethod
    @override
    def parse(cls, args: Sequence[str]) -> Self:
        # Without a value, the error shows how to write a size.
        return super().parse([*args, ""] if args and args[-1] == "--memory" else args)


@subcommand(CheckOptions)
def check(options: CheckOptions) -> int:
    """Check a recipe's keys, types, values, sizes, files, weights, free disk and memory.

    ``--memory 80GiB`` compares the memory it needs with a GPU of that size, on any machine. ``--untrusted`` lists the
    code, variables and hosts that an untrusted recipe names, and checks nothing.
    """
    if options.untrusted:
        return list_untrusted(options)
    if is_curriculum(options.recipe):
        return _check_stages(Curriculum.of(options), options.memory)
    return _check_recipe(options, options.memory)


def _check_stages(curriculum: Curriculum, gpu_memory: int | None) -> int:
    found: list[tuple[Stage, list[str]]] = []
    for stage in curriculum.stages:
        say(f"Stage {stage.number} of {len(curriculum.stages)}: {stage.name}")
        try:
            _check_recipe(Command.parse(curriculum.check_words(stage)), gpu_memory)
        except UserError as error:
            found.append((stage, error.errors))
    if found:
        raise UserError(*merged_errors(found))
    return 0


def _check_recipe(command: Command, gpu_memory: int | None) -> int:
    try:
        cli = build_recipe(command, make_folder=False)
    except UserError as error:
        raise UserError(*error.errors, *further_errors(command)) from error
    errors = [*cli.errors(), *disk_errors(cli)]
    if not cli.datamodule.sizes.errors(cli.trainer.world_size):
        say(cli.plan())
        try:
            text, too_large = memory_report(cli, gpu_memory)
            say(text)
            errors += too_large
        except UserError as error:
            errors += [message for message in error.errors if message not in errors]
        except NotEstimated as reason:
            if not errors:  # of which one may well be the reason
                say(f"memory: not estimated, {reason}")
    if errors:
        raise UserError(*errors)
    distilled = distillation_warning(cli.model.policy)
    warned = [f"WARNING: {distilled}"] if distilled else []
    say("\n".join([*cli.about_prompts(), *_evidence(command), *warned]))
    say(f"{cli.command.recipe}: no errors found for world size {cli.trainer.world_size}.")
    return 0


def _evidence(command: Command) -> list[str]:
    """Return the line on what the recipe's settings rest on, if its header has one."""
    level = Header.of_file(command.recipe).evidence
    changed = " (before your changes)" if command.overlays or command.overrides else ""
    return [f"Evidence{changed}: {level}."] if level else []


def further_errors(command: Command) -> list[str]:
    """Return the errors in files, checkpoints and rewards of a recipe that cannot be built."""
    try:
        recipe = read_recipe(command)
    except UserError:
        return []
    parts = sound_parts(recipe, TOP_LEVEL, LINKED)
    errors = [error for key in ("model.policy", "model.reward") if key in parts for error in parts[key].check()]
    data = recipe.get("data")
    return errors + (prompt_errors(data.get("train"), data.get("heldout")) if isinstance(data, dict) else [])


def disk_errors(cli: RecipeCLI) -> list[str]:
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
