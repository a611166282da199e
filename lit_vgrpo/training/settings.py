"""Checks of a module's settings against each other and the trainer's, before weights are loaded."""

from __future__ import annotations

from typing import Any

from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.training.limits import keep_iterations_whole, sizes_of
from lit_vgrpo.training.micro_batch import accumulate
from lit_vgrpo.training.start import policy_errors
from lit_vgrpo.training.strategies import strategy_errors


def set_up(module: Any) -> None:
    """Check the settings of a :class:`~lit_vgrpo.module.VGRPOModule` and let its trainer take whole iterations.

    Raises:
        ValueError: two settings do not fit each other.
    """
    trainer, sizes = module.trainer, sizes_of(module.trainer)
    has_heldout = trainer.datamodule.has_heldout
    for error in errors_under(module, trainer.strategy, sizes, trainer.world_size, has_heldout):
        raise ValueError(error)
    keep_iterations_whole(trainer, sizes)
    accumulate(trainer, sizes)


def module_errors(module: Any, sizes: Sizes) -> list[str]:
    """Return one line for each error in a module's settings that does not depend on the trainer."""
    return [
        *policy_errors(module.policy),
        *dict.fromkeys((*module.reward.check(), *module.evaluator.observed.check())),
        *module.optimization.check(),
        *module.objective.policy_errors(type(module.policy)),
        *module.objective.check(sizes),
        *_evaluation_errors(module),
        *_guidance_errors(module),
        *_quantisation_errors(module),
    ]


def errors_under(module: Any, strategy: Any, sizes: Sizes, ranks: int, has_heldout: bool) -> list[str]:
    """Return those errors too that depend on the trainer's strategy, the number of ranks or held-out prompts."""
    optimizer, spec = module.optimization.optimizer, module.objective.rollout_spec(0)
    return [
        *strategy_errors(strategy, module.policy, optimizer, sizes, spec),
        *module_errors(module, sizes),
        *_people_errors(module, sizes, ranks, has_heldout),
    ]


def _people_errors(module: Any, sizes: Sizes, ranks: int, has_heldout: bool) -> list[str]:
    """Return one line for each setting that a reward from people cannot be used with."""
    if not module.reward.asks_people:
        return []
    errors = []
    if has_heldout and module.evaluator.observed.asks_people:
        errors.append(
            "model.reward asks people, who do not score held-out images. Set model.heldout_reward to a reward that "
            "does, such as PickScore, or data.heldout=null to train without evaluations."
        )
    if not sizes.errors(ranks) and sizes.plan(ranks).ranks_per_group > 1:
        errors.append(
            f"model.reward asks people, who compare whole groups, but {ranks} ranks split each group. "
            f"Use at most {sizes.prompts_per_iteration} ranks."
        )
    if module.objective.rollout_spec(0).scouts is not None:
        errors.append("model.objective.rollout.scouts would ask people about discarded images. Leave it out.")
    return errors


def _evaluation_errors(module: Any) -> list[str]:
    spec, policy = module.evaluation, module.policy
    if spec is None:
        return []
    if spec.scouts is not None:
        return ["model.evaluation.scouts has no effect: held-out images are not chosen. Leave it out."]
    if spec.solver in policy.solvers:
        where = "model.evaluation"
        return policy.accelerator_errors(spec, where) or spec.accelerator_errors(where)
    return [
        f"model.evaluation.solver={spec.solver} is not an ODE solver of {type(policy).__name__}. "
        f"Use {' or '.join(policy.solvers)}."
    ]


def _quantisation_errors(module: Any) -> list[str]:
    """Return one line if images are to be sampled in 8 bits by a network that is quantised already."""
    if module.policy.quantisation is None:
        return []
    specs = {"model.objective.rollout": module.objective.rollout_spec(0), "model.evaluation": module.evaluation}
    return [
        f"{key}.quantise={spec.quantise} needs whole weights, and model.policy.quantisation="
        f"{module.policy.quantisation} keeps none. Leave out one of them."
        for key, spec in specs.items()
        if spec is not None and spec.quantise is not None
    ][:1]


def _guidance_errors(module: Any) -> list[str]:
    """Return one line if the policy refuses guidance and a setting asks for it."""
    error = module.policy.guidance_error()
    if error is None:
        return []
    objective = module.objective
    scales = {
        "model.objective.rollout.guidance": objective.rollout_spec(0).guidance,
        "model.objective.training_guidance": objective.guidance_in("training", None),
        "model.objective.reference_guidance": objective.guidance_in("reference", None),
        "model.evaluation.guidance": 1.0 if module.evaluation is None else module.evaluation.guidance,
    }
    return [f"{key}={scale:g}: {error}" for key, scale in scales.items() if scale != 1.0][:1]
