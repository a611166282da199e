"""Building of a recipe's parts, and of a reward named on the command line."""

from __future__ import annotations

import logging
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lit_vgrpo.config.parts import CONSTRUCTOR_ERRORS, built_part, part_of_words, recipe_error
from lit_vgrpo.config.recipe import SUFFIXES, Command, Recipe, read_recipe
from lit_vgrpo.config.tree import REWARD_KEYS
from lit_vgrpo.data.module import PromptDataModule
from lit_vgrpo.errors import UserError, error_in_user_code, say
from lit_vgrpo.launch.checks import setting_errors
from lit_vgrpo.launch.recipe_cli import RecipeCLI
from lit_vgrpo.launch.train import train
from lit_vgrpo.module import VGRPOModule
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import Reward, Weighted, as_weighted
from lit_vgrpo.system.paths import import_from_here, shipped
from lit_vgrpo.system.process import bar, is_first_process, report_on_first, shows_bars

ROOTS = {"model": VGRPOModule, "data": PromptDataModule, "trainer": Trainer}
REWARDS = {f"model.{key}": Reward for key in REWARD_KEYS}
PARTS = {"model.policy": Policy, "model.objective": Objective, **REWARDS, "data": PromptDataModule, "trainer": Trainer}
NO_REWARD = "No reward given. Name a class such as PickScore, python:my_module:my_function, or a recipe."


def build(args: Sequence[str], make_folder: bool = True) -> RecipeCLI:
    """Build the recipe that arguments name, see :func:`build_recipe`."""
    return build_recipe(read_recipe(Command.parse(args)), make_folder)


def build_recipe(recipe: Recipe, make_folder: bool = True, elsewhere: bool = False) -> RecipeCLI:
    """Build module, data and trainer of a recipe without loading weights.

    Args:
        make_folder: Create the run folder.
        elsewhere: Accept a GPU that this machine lacks.

    Raises:
        UserError: The recipe has an error; the message is the first one, or those of all parts if a package is missing.
    """
    # The run folder holds config.yaml before the loggers start.
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    import_from_here()
    if errors := setting_errors(recipe.values):
        takes_long = any(" is not installed." in error for error in errors)  # other errors should not wait for it
        raise UserError(*(part_errors(recipe.values)[0] if takes_long else errors))
    shows_bars.set(True)  # a module that was trained in this process without ProgressBar leaves them off
    try:
        with bar("Reading the recipe", total=1):
            return RecipeCLI(recipe, make_folder, elsewhere)
    except (ArgumentError, MisconfigurationException, *CONSTRUCTOR_ERRORS) as error:
        raise UserError(recipe_error(error, recipe.values, ROOTS)) from error
    except (Exception, SystemExit) as error:
        message = None if isinstance(error, UserError) else error_in_user_code(error)
        if message is None:
            raise
        raise UserError(message) from error


def part_errors(values: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Build the parts of a recipe's plain values one by one; return the errors, and the parts that have none."""
    errors, parts = setting_errors(values), {}
    for key, hint in PARTS.items():
        try:
            parts[key] = built_part({**values, "data": values.get("data") or {}}, key, hint, parse_only=hint is Trainer)
        except UserError as error:
            errors += error.errors
    return errors, parts


def train_recipe(command: Command, context: Callable[[RecipeCLI], AbstractContextManager[object]] = nullcontext) -> int:
    """Build and train a recipe, and return the exit status; raise UserError with all errors of the recipe.

    Args:
        context: Returns a context manager for the built recipe, which is entered during training.
    """
    cli = build_recipe(read_recipe(command))
    try:
        if errors := cli.errors():
            raise UserError(*errors)
        surrounding = context(cli)
        if cli.resumption is not None and cli.resumption.is_over(cli.trainer):
            done, epochs = cli.resumption.progress, cli.trainer.max_epochs
            assert done is not None
            limit, number = (
                ("max_epochs", done.iterations) if done.is_finished(epochs, -1) else ("max_steps", done.optimizer_steps)
            )
            now, more = getattr(cli.trainer, limit), f"trainer.{limit}={2 * number}"
            report_on_first(f"{cli.folder} is finished: {done}, and trainer.{limit}={now}. To continue, add {more}.")
            return 0
        cli.save_recipe()
        if is_first_process():
            say("\n".join(cli.opening()))
        with surrounding:
            return train(cli)
    finally:
        cli.give_back()


def build_reward(words: Sequence[str]) -> Weighted:
    """Build a reward without loading it; raise UserError with the first error.

    Args:
        words: ``PickScore checkpoint=/a/folder``, ``package.MyReward``, ``python:my_module:my_function``, or a recipe
            with overlays and overrides. A recipe's untrained reward becomes a part of weight 0.
    """
    if not words:
        raise UserError(NO_REWARD)
    import_from_here()
    first = words[0]
    is_recipe = first.endswith(SUFFIXES) or first in shipped() or Path(first).expanduser().exists()
    if not is_recipe or first.endswith(".py"):
        return as_weighted(part_of_words(words, "reward", Reward), "")
    recipe = read_recipe(Command.parse(words)).values
    model = recipe.get("model") or {}
    if model.get("reward") is None:
        raise UserError("The recipe has no model.reward. Add one, for example model.reward=PickScore.")
    found = [as_weighted(built_part(recipe, f"model.{key}", Reward)) for key in REWARD_KEYS if model.get(key)]
    try:
        return found[0].observing(found[1] if len(found) > 1 else None)
    except ValueError as error:
        raise UserError(f"model.{error}") from error
