"""Policy of a run with its saved weights, without rewards, data and trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_vgrpo import objectives, options, policies  # noqa: F401  registers the short names of their classes
from lit_vgrpo.config.parts import built_part
from lit_vgrpo.config.recipe import Command, read_recipe
from lit_vgrpo.errors import UserError
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.paths import import_from_here
from lit_vgrpo.system.process import report_on_first
from lit_vgrpo.training.folder import CONFIG_NAME, find_checkpoint, find_run
from lit_vgrpo.training.resume import last_good
from lit_vgrpo.training.saved_weights import AVERAGE, REFERENCE, TRAINED, SavedWeights, load_policy


@dataclass(kw_only=True)
class RunOptions(options.SavedRun):
    """A run and its checkpoint, from the options of a subcommand that reads them.

    Attributes:
        words: Overrides of the run's recipe; ``__post_init__`` removes the run's name.
        run: The run folder.
        checkpoint: Checkpoint to read; ``None`` takes the last good one.
    """

    run: Path = field(init=False)
    checkpoint: Path | None = field(init=False)

    def __post_init__(self) -> None:
        self.run, self.checkpoint = find_run(self.words.pop(0))
        if self.named is not None:
            self.checkpoint = find_checkpoint(self.named, self.run)

    def read_weights(self) -> tuple[SavedWeights, str]:
        """Read the checkpoint, and return the variant to use: the average if it has one and ``--no-ema`` is not given.

        Raises:
            UserError: There is no valid checkpoint.
        """
        saved = SavedWeights.read(self.checkpoint or last_good(self.run, report_on_first))
        return saved, AVERAGE if AVERAGE in saved.tensors and not self.no_ema else TRAINED


def recipe_of(run: Path, words: Sequence[str], used: Sequence[str], what: str) -> dict[str, Any]:
    """Return the recipe of a run as plain values, with overrides of the used parts applied.

    Raises:
        UserError: An override is outside of these parts, or the recipe cannot be read.
    """
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
    """Load a policy and its saved weights; the reference has none.

    Raises:
        UserError: Something cannot be loaded, or the checkpoint belongs to another policy.
    """
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
