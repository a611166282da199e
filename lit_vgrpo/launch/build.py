"""Builds module, data and trainer of a recipe, and trains it."""

from __future__ import annotations

import logging
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_vgrpo.config.recipe import Command, read_recipe
from lit_vgrpo.config.schema import CONSTRUCTOR_ERRORS, early_errors, recipe_errors
from lit_vgrpo.config.trainer_options import trainer_errors
from lit_vgrpo.errors import UserError, error_in_own_code, from_parser, say
from lit_vgrpo.launch.recipe_cli import LINKED, TOP_LEVEL, RecipeCLI
from lit_vgrpo.launch.train import train
from lit_vgrpo.system.paths import import_from_here
from lit_vgrpo.system.process import is_first_process, report_on_first


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
            report_on_first(
                f"{cli.folder} is finished: {cli.resumption.progress}. To continue, add trainer.max_epochs=N."
            )
            return 0
        cli.save_recipe()
        if is_first_process():
            say("\n".join(cli.opening()))
        with company:
            return train(cli)
    finally:
        cli.give_back()
