"""``lightning run``: train a recipe in a run folder of its own."""

from __future__ import annotations

import errno
import logging
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_vgrpo.commands.curriculum import is_curriculum
from lit_vgrpo.commands.curriculum_runner import run_curriculum
from lit_vgrpo.commands.recipe_cli import LINKED, TOP_LEVEL, RecipeCLI, say_on_first
from lit_vgrpo.commands.training import train
from lit_vgrpo.config.arguments import Options
from lit_vgrpo.config.recipe import Command, read_recipe
from lit_vgrpo.config.schema import CONSTRUCTOR_ERRORS, early_errors, recipe_errors
from lit_vgrpo.config.trainer_options import trainer_errors
from lit_vgrpo.errors import UserError, error_in_own_code, from_parser, report, say
from lit_vgrpo.rewards import RewardError
from lit_vgrpo.runs.folder import is_first_process
from lit_vgrpo.system.paths import import_from_here

Given = TypeVar("Given", bound=Options)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def build(args: Sequence[str], make_folder: bool = True) -> RecipeCLI:
    """Parse the arguments after a subcommand and build the recipe, see :func:`build_recipe`."""
    return build_recipe(Command.parse(args), make_folder)


def build_recipe(command: Command, make_folder: bool = True) -> RecipeCLI:
    """Build module, data and trainer of a recipe without loading weights.

    Args:
        command: Recipe, overlays and overrides.
        make_folder: Create the run folder.

    Raises:
        UserError: With every error of the recipe.
    """
    # the run folder holds config.yaml before the loggers start
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    import_from_here()
    recipe = read_recipe(command)
    try:
        early = early_errors(command.overrides, recipe, TOP_LEVEL, LINKED)
        if of_trainer := trainer_errors(recipe.get("trainer") or {}):
            early = [*dict.fromkeys((*recipe_errors(recipe, TOP_LEVEL, LINKED), *of_trainer))]
        if early:
            raise UserError(*early)
        try:
            return RecipeCLI(command, make_folder)
        except (ArgumentError, MisconfigurationException, *CONSTRUCTOR_ERRORS) as error:
            errors = recipe_errors(recipe, TOP_LEVEL, LINKED) or [from_parser(error)]
            raise UserError(*errors) from error
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        own = error_in_own_code(error)
        if own is None:
            raise
        raise UserError(own) from error


def run_subcommand(
    body: Callable[[Given], int], options: type[Given], args: Sequence[str], stopped: str | None = None
) -> int:
    """Parse the options of a subcommand and run it; turn errors into lines on stderr and an exit status.

    Args:
        body: The subcommand.
        options: Class of its options.
        args: Arguments after the subcommand's name.
        stopped: Line to report after Ctrl-C, with the status 130; ``None`` raises KeyboardInterrupt.

    Returns:
        The status of ``body``; 2 for an error of the user, 1 for a failed reward or a full disk.
    """
    try:
        return body(options.parse(args))
    except UserError as error:
        if is_first_process():
            report(error.errors)
        return 2
    except RewardError as error:
        report([str(error)])
        return 1
    except KeyboardInterrupt:
        if stopped is None:
            raise
        report([stopped])
        return 130
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        where = f" {error.filename}" if error.filename else ""
        report([f"Cannot write{where}: {error.strerror}. Free some space, or write to another disk (run_dir, TMPDIR)."])
        return 1


def run(args: Sequence[str]) -> int:
    """Train a recipe: ``RECIPE.yaml [OVERLAY.yaml ...] [key=value ...] [--resume]``.

    Returns:
        Exit status: 0, 1 when training failed, 2 for a mistake in the recipe, 130 after Ctrl-C, 143 after SIGTERM.
    """
    return run_subcommand(_run, Command, args)


def _run(command: Command) -> int:
    return run_curriculum(command) if is_curriculum(command.recipe) else train_recipe(command)


def train_recipe(command: Command, beside: Callable[[RecipeCLI], AbstractContextManager[object]] = nullcontext) -> int:
    """Build and train a recipe.

    Args:
        beside: Returns, for the built recipe, a context that lasts as long as the training.

    Returns:
        Exit status.

    Raises:
        UserError: With every error of the recipe.
    """
    cli = build_recipe(command)
    try:
        errors = cli.errors()
        if errors:
            raise UserError(*errors)
        company = beside(cli)
        if cli.resumption is not None and cli.resumption.is_over(cli.trainer):
            say_on_first(f"{cli.folder} is finished: {cli.resumption.done}. To continue, add trainer.max_epochs=N.")
            return 0
        cli.save_recipe()
        if is_first_process():
            say("\n".join(cli.opening()))
        with company:
            return train(cli)
    finally:
        cli.give_back()
