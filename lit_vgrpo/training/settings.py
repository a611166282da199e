"""Checks of a module's settings against each other, without loading weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import Weighted
from lit_vgrpo.training.optimization import Optimization
from lit_vgrpo.training.start import policy_errors
from lit_vgrpo.training.strategies import strategy_errors


@dataclass(frozen=True)
class ModuleSettings:
    """The parts of a module whose settings must fit each other.

    Args:
        observed: the trained reward and the untrained one.
        evaluation: sampling of the held-out images, if it is not the objective's.
    """

    policy: Policy
    objective: Objective
    reward: Weighted
    observed: Weighted
    optimization: Optimization
    evaluation: RolloutSpec | None

    def errors(self, sizes: Sizes) -> list[str]:
        """Return one line for each error that does not depend on the trainer."""
        return [
            *policy_errors(self.policy),
            *dict.fromkeys((*self.reward.check(), *self.observed.check())),
            *self.optimization.check(),
            *self.objective.policy_errors(type(self.policy)),
            *self.objective.check(sizes),
            *self.evaluation_errors(),
            *self.guidance_errors(),
            *self.quantisation_errors(),
        ]

    def errors_under(self, strategy: Any, sizes: Sizes, ranks: int, has_heldout: bool) -> list[str]:
        """Return those errors too that depend on the trainer's strategy, the number of ranks or held-out prompts."""
        optimizer, spec = self.optimization.optimizer, self.objective.rollout_spec(0)
        of_strategy = strategy_errors(strategy, self.policy, optimizer, sizes, spec)
        return [*of_strategy, *self.errors(sizes), *self.people_errors(sizes, ranks, has_heldout)]

    def people_errors(self, sizes: Sizes, ranks: int, has_heldout: bool) -> list[str]:
        """Return one line for each setting that a reward from people cannot be used with."""
        if not self.reward.asks_people:
            return []
        errors = []
        if has_heldout and self.observed.asks_people:
            errors.append(
                "model.reward asks people, who do not score held-out images. Set model.heldout_reward to a reward that "
                "does, such as PickScore, or data.heldout=null to train without evaluations."
            )
        if not sizes.errors(ranks) and sizes.plan(ranks).ranks_per_group > 1:
            errors.append(
                f"model.reward asks people, who compare whole groups, but {ranks} ranks split each group. "
                f"Use at most {sizes.prompts_per_iteration} ranks."
            )
        if self.objective.rollout_spec(0).scouts is not None:
            errors.append(
                "model.objective.rollout.scouts would ask people about images that are drawn again. Leave it out."
            )
        return errors

    def evaluation_errors(self) -> list[str]:
        """Return one line for each error in ``evaluation``."""
        if self.evaluation is None:
            return []
        if self.evaluation.scouts is not None:
            return ["model.evaluation.scouts has no effect: held-out images are not chosen. Leave it out."]
        if self.evaluation.solver in self.policy.solvers:
            errors = self.policy.accelerator_errors(self.evaluation, "model.evaluation")
            return errors or self.evaluation.accelerator_errors("model.evaluation")
        return [
            f"model.evaluation.solver={self.evaluation.solver} is not an ODE solver of "
            f"{type(self.policy).__name__}. Use {' or '.join(self.policy.solvers)}."
        ]

    def quantisation_errors(self) -> list[str]:
        """Return one line if images are to be sampled in 8 bits by a network that is quantised already."""
        if self.policy.quantisation is None:
            return []
        specs = {"model.objective.rollout": self.objective.rollout_spec(0), "model.evaluation": self.evaluation}
        return [
            f"{key}.quantise={spec.quantise} needs whole weights, and model.policy.quantisation="
            f"{self.policy.quantisation} keeps none. Leave out one of them."
            for key, spec in specs.items()
            if spec is not None and spec.quantise is not None
        ][:1]

    def guidance_errors(self) -> list[str]:
        """Return one line if the policy refuses guidance and a setting asks for it."""
        error = self.policy.guidance_error()
        if error is None:
            return []
        scales = {
            "model.objective.rollout.guidance": self.objective.rollout_spec(0).guidance,
            "model.objective.training_guidance": self.objective.guidance_in("training", None),
            "model.objective.reference_guidance": self.objective.guidance_in("reference", None),
            "model.evaluation.guidance": 1.0 if self.evaluation is None else self.evaluation.guidance,
        }
        return [f"{key}={scale:g}: {error}" for key, scale in scales.items() if scale != 1.0][:1]
