"""The trained weights in a checkpoint of a run, and how they are put into a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_vgrpo.core.sharding import shape_of, write
from lit_vgrpo.core.snapshots import trainable_parameters
from lit_vgrpo.errors import UserError, counted
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.training.checkpoint_file import RECIPE_KEY, CheckpointDamage, averages, read_sound
from lit_vgrpo.training.resume import Progress

TRAINED, AVERAGE, REFERENCE = "trained", "EMA", "reference"
_OF_MODULE = "policy."  # in front of the names in a checkpoint, which are those of the Lightning module


@dataclass
class SavedWeights:
    """The trained weights of a policy in a checkpoint.

    Args:
        path: the checkpoint.
        progress: progress of training.
        tensors: trained weights and, if the run had an EMA callback, their average, by variant and by their names in
            the policy.
        policy_options: the policy's options in the checkpoint's recipe.
    """

    path: Path
    progress: Progress
    tensors: dict[str, dict[str, Tensor]]
    policy_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> SavedWeights:
        """Read and verify a checkpoint; its tensors are memory-mapped.

        Raises:
            UserError: it is damaged, holds weights that are not finite, or is no checkpoint of a run.
        """
        try:
            saved = read_sound(path)
        except CheckpointDamage as damage:
            raise UserError(f"{path} {damage}. Give another: --checkpoint FILE.") from damage
        tensors = {TRAINED: _of_policy(saved["state_dict"])}
        for average in averages(saved):
            tensors[AVERAGE] = _of_policy(average)
        recipe = saved.get(RECIPE_KEY) or {}
        options = recipe.get("model", {}).get("policy", {}).get("init_args", {})
        return cls(path, Progress.of(saved), tensors, options)

    def require(self, variant: str) -> None:
        """Raise UserError if the checkpoint has no such variant."""
        if variant == AVERAGE and AVERAGE not in self.tensors:
            raise UserError(f"{self.path} holds no average: the run had no EMA callback. Leave out --ema.")

    def refuse_misfit(self, variant: str, policy: Policy) -> None:
        """Raise UserError if the tensors of a variant are not those that a policy trains."""
        difference = self.difference(variant, policy)
        if difference is not None:
            raise UserError(
                f"{self.path} is a checkpoint of another policy: {difference} Use the recipe that wrote it."
            )

    def difference(self, variant: str, policy: Policy) -> str | None:
        """Return how the tensors of a variant differ from those that a policy trains, or ``None``."""
        saved, current = self.tensors[variant], trainable_parameters(policy)
        odd = sorted(current.keys() ^ saved.keys())
        odd = odd or sorted(name for name in current if saved[name].shape != shape_of(current[name]))
        return f"{counted(len(odd), 'trained tensor')} would not fit, such as {odd[0]}." if odd else None

    def put_into(self, policy: Policy, variant: str) -> None:
        """Replace the policy's trained tensors, which must be whole, by those of a variant.

        Raises:
            UserError: the policy trains other tensors.
        """
        self.refuse_misfit(variant, policy)
        write(trainable_parameters(policy), self.tensors[variant])


def trained_only(policy: Policy, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trained tensors of a module's state; the frozen ones come from the policy's own checkpoint."""
    trained = _names_in_module(policy)
    return {name: tensor for name, tensor in state_dict.items() if name in trained}


def refuse_other_weights(policy: Policy, state_dict: Mapping[str, Any]) -> None:
    """Check that a checkpoint's module state has all trained tensors; raise RuntimeError if some are missing."""
    trained = _names_in_module(policy)
    if missing := trained - state_dict.keys():
        raise RuntimeError(
            f"The checkpoint lacks {len(missing)} of {len(trained)} trained tensors, e.g. {min(missing)}. "
            "Resume with the recipe that wrote it (RUN/config.yaml)."
        )


def _names_in_module(policy: Policy) -> set[str]:
    return {f"{_OF_MODULE}{name}" for name in trainable_parameters(policy)}


def _of_policy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_OF_MODULE): tensor for name, tensor in tensors.items()}
