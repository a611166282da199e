"""The policy of a run with the weights that the run saved, without its rewards, data or trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_vgrpo import objectives, policies  # noqa: F401  imported so that their classes go by short names
from lit_vgrpo.config.arguments import Options, flag, is_override, option
from lit_vgrpo.config.parts import built_part
from lit_vgrpo.config.recipe import Command, read_recipe
from lit_vgrpo.errors import UserError, report
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.runs.folder import CONFIG_NAME
from lit_vgrpo.runs.saved_run import find_checkpoint, find_run, last_good
from lit_vgrpo.runs.saved_weights import AVERAGE, REFERENCE, TRAINED, SavedWeights
from lit_vgrpo.runs.start import load_policy as load_with_start
from lit_vgrpo.system.hub import LoadError
from lit_vgrpo.system.paths import import_from_here


@dataclass(kw_only=True)
class RunOptions(Options):
    """Options of a subcommand that reads a run, which the first word without a ``=`` names.

    Attributes:
        run: The run folder.
        checkpoint: Checkpoint to read; ``None`` takes the last good one.
        ema: Read the averaged weights.
    """

    ema: bool = flag()
    named: str | None = option(name="checkpoint")
    run: Path = field(init=False)
    checkpoint: Path | None = field(init=False)

    def __post_init__(self) -> None:
        named = next((word for word in self.words if not is_override(word)), None)
        if named is None:
            raise UserError(f"No run given. Try: lightning {self.subcommand} runs/tiny_shapes")
        self.words.remove(named)
        self.run, self.checkpoint = find_run(named)
        if self.named is not None:
            self.checkpoint = find_checkpoint(self.named, self.run)

    @property
    def variant(self) -> str:
        """Set of weights to read."""
        return AVERAGE if self.ema else TRAINED


def recipe_of(run: Path, words: Sequence[str], used: Sequence[str], verb: str) -> dict[str, Any]:
    """The recipe of a run as plain values, with what was typed in place of its own settings.

    Args:
        run: the run folder.
        words: ``key=value``.
        used: the parts of a recipe that the verb looks at, such as ``model.policy``.
        verb: what was called.

    Raises:
        UserError: a word is no such setting, or the recipe cannot be read.
    """
    for word in words:
        key, equals, _ = word.partition("=")
        if not equals:
            raise UserError(f"{word} is one word too many: {verb} takes one run. A setting is written key=value.")
        if not key.startswith(tuple(f"{part}." for part in used)) and key not in used:
            raise UserError(f"{key} has no effect on {verb}. Settings of {' and '.join(used)} have.")
    import_from_here()
    return read_recipe(Command.parse([str(run / CONFIG_NAME), *words]))


def saved_weights(run: Path, checkpoint: Path | None, variant: str) -> SavedWeights:
    """What a checkpoint of a run holds; the last good one where none is named.

    Raises:
        UserError: there is none, or it does not hold the variant.
    """
    saved = SavedWeights.read(checkpoint or last_good(run, lambda line: report([line])))
    saved.require(variant)
    return saved


def build_policy(recipe: dict[str, Any]) -> Policy:
    """The policy of a recipe, nothing loaded yet.

    Raises:
        UserError: with every fault that can be found without loading.
    """
    policy = built_part(recipe, "model.policy", Policy)
    if policy is None:
        raise UserError("The run's recipe has no model.policy. Is it the config.yaml of a run?")
    return policy


def load_policy(policy: Policy, saved: SavedWeights | None, variant: str) -> Policy:
    """Load a policy and put saved weights in.

    Args:
        saved: may be ``None`` for the reference, which is what a policy is loaded with.

    Raises:
        UserError: something cannot be loaded, or the checkpoint is one of another policy.
    """
    # Made for the machine of the run, and not worth their time for a few images.
    policy.compile_network, policy.attention_backend = False, None
    if variant != REFERENCE:
        policy.start_from = None  # all that was trained comes from the checkpoint
    try:
        load_with_start(policy)
    except (LoadError, ModuleNotFoundError) as error:
        raise UserError(str(error)) from error
    if variant != REFERENCE:
        assert saved is not None
        saved.put_into(policy, variant)
    return policy
