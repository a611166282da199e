"""Policy of a run with its saved weights, without rewards, data and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_vgrpo import objectives, policies  # noqa: F401  registers the short names of their classes
from lit_vgrpo.config.parts import built_part
from lit_vgrpo.config.recipe import Command, find_run, read_recipe
from lit_vgrpo.errors import UserError
from lit_vgrpo.options import SavedRun
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.paths import import_from_here
from lit_vgrpo.system.process import report_on_first
from lit_vgrpo.training.folder import CONFIG_NAME, find_checkpoint
from lit_vgrpo.training.resume import last_good
from lit_vgrpo.training.saved_weights import AVERAGE, REFERENCE, TRAINED, SavedWeights, load_policy


@dataclass
class ChosenRun:
    """The run that a command names.

    Attributes:
        words: Overrides of the run's recipe.
        checkpoint: Checkpoint to read; ``None`` takes the last good one.
        no_ema: Use the trained weights themselves, not their average.
    """

    folder: Path
    words: list[str]
    checkpoint: Path | None
    no_ema: bool

    @classmethod
    def of(cls, options: SavedRun) -> ChosenRun:
        """Find the run and the checkpoint of the options; raise UserError if there is none."""
        folder, checkpoint = find_run(options.words[0])
        if options.named is not None:
            checkpoint = find_checkpoint(options.named, folder)
        return cls(folder, options.words[1:], checkpoint, options.no_ema)

    def read_weights(self) -> tuple[SavedWeights, str]:
        """Read the checkpoint, and return the variant to use, the average if it has one; UserError if it is invalid."""
        saved = SavedWeights.read(self.checkpoint or last_good(self.folder, report_on_first))
        return saved, AVERAGE if AVERAGE in saved.tensors and not self.no_ema else TRAINED


def recipe_of(run: Path, words: Sequence[str], used: Sequence[str], what: str) -> dict[str, Any]:
    """Return a run's recipe as plain values with overrides of the used parts; raise UserError for other overrides."""
    for word in words:
        if not f"{word.partition('=')[0]}.".startswith(tuple(f"{part}." for part in used)):
            raise UserError(f"{word} has no effect on {what}, which uses only settings of {', '.join(used)}.")
    import_from_here()
    return read_recipe(Command.parse([f"{run / CONFIG_NAME}", *words])).values


def build_policy(recipe: dict[str, Any]) -> Policy:
    """Build a recipe's policy without loading it; raise UserError with all errors found without the weights."""
    policy: Policy = built_part(recipe, "model.policy", Policy)
    return policy


def load_saved_policy(policy: Policy, saved: SavedWeights | None, variant: str) -> Policy:
    """Load a policy and its saved weights, none for the reference; raise UserError if they cannot be loaded."""
    policy.compile_network, policy.attention_backend = False, None  # slow to start, and chosen elsewhere
    if variant != REFERENCE:
        policy.start_from = None
    try:
        load_policy(policy)
    except (LoadError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from error
    if saved is not None and variant != REFERENCE:
        saved.put_into(policy, variant)
    return policy
