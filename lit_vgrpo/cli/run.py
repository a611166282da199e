"""``lightning run``: train a recipe in a run folder of its own."""

from __future__ import annotations

from lit_vgrpo.apps.curriculum.curriculum import is_curriculum, run_curriculum
from lit_vgrpo.config.arguments import subcommand
from lit_vgrpo.config.recipe import Command
from lit_vgrpo.launch.build import train_recipe


@subcommand(Command)
def run(command: Command) -> int:
    """Train a recipe: ``RECIPE.yaml [OVERLAY.yaml ...] [key=value ...] [--resume]``.

    Returns:
        Exit status: 0, 1 when training failed, 2 for a mistake in the recipe, 130 after Ctrl-C, 143 after SIGTERM.
    """
    return run_curriculum(command) if is_curriculum(command.recipe) else train_recipe(command)
