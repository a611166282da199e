"""Rewards named on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_vgrpo import rewards  # noqa: F401  imported so that its classes go by short names
from lit_vgrpo.config.parts import built_part
from lit_vgrpo.config.recipe import Command, apply_override, read_recipe, shipped_recipes
from lit_vgrpo.config.shorthand import REWARD_KEYS, expanded
from lit_vgrpo.errors import UserError
from lit_vgrpo.rewards import Reward, Weighted, as_weighted
from lit_vgrpo.system.paths import import_from_here

NO_REWARD = "No reward given. Name a class such as PickScore, python:my_module:my_function, or a recipe."


def build_reward(words: Sequence[str]) -> Weighted:
    """Build a reward without loading it.

    Args:
        words: ``PickScore checkpoint=/a/folder``, ``package.MyReward``, ``python:my_module:my_function``, or a recipe
            with overlays and overrides. A recipe's held-out reward becomes a part of weight 0.

    Raises:
        UserError: With every error in the words.
    """
    if not words:
        raise UserError(NO_REWARD)
    import_from_here()
    if _is_recipe(words[0]):
        return of_recipe(read_recipe(Command.parse(words)))
    tree: dict[str, Any] = {"reward": expanded(words[0])}
    if isinstance(tree["reward"], str):
        tree["reward"] = {"class_path": tree["reward"]}
    for word in words[1:]:
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            raise UserError(f"{word} is no option of a reward. Options are written key=value.")
        apply_override(tree, f"reward.{key}", text)
    reward: Reward = built_part(tree, "reward", Reward)
    return as_weighted(reward.found_at(""))


def of_recipe(recipe: dict[str, Any]) -> Weighted:
    """Build the rewards of a recipe, which is given as plain values; raise UserError with every error in them."""
    model = recipe.get("model")
    if not isinstance(model, dict) or model.get("reward") is None:
        raise UserError("The recipe has no model.reward. Add one, for example model.reward=PickScore.")
    found = [as_weighted(built_part(recipe, f"model.{key}", Reward)) for key in REWARD_KEYS if model.get(key)]
    try:
        return found[0].observing(found[1] if len(found) > 1 else None)
    except ValueError as error:
        raise UserError(f"model.{error}") from error


def _is_recipe(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or text in shipped_recipes() or Path(text).expanduser().exists()
