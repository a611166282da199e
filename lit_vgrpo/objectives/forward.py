"""What the methods share that train on the forward process: on noisy copies of the final latents."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lit_vgrpo.core.probability_paths import Space
from lit_vgrpo.core.ranges import GuidanceScale
from lit_vgrpo.core.rollout import Experience, RolloutSpec
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.objectives.base import Objective, PrepareContext
from lit_vgrpo.objectives.pairs import predict_pairs, stored_predictions
from lit_vgrpo.policies.base import Policy


@dataclass(eq=False)
class ForwardObjective(Objective):
    """Base of the methods that train on pairs (t, eps); holds the options that all of them have.

    Args:
        rollout: how images are sampled; any ODE solver. Null takes the method's published one.
        training_guidance: guidance scale of the policy during training; null is 1, or the rollout's scale where the
            network embeds it, as FLUX.1-dev's does.
        reference_guidance: guidance scale of the starting weights; null takes the training's.
    """

    needs_ode: ClassVar[bool] = True
    """Whether an SDE is refused, since the method is defined on samples of the ODE."""

    rollout: RolloutSpec | None = None
    _: KW_ONLY
    training_guidance: GuidanceScale | None = None
    reference_guidance: GuidanceScale | None = None

    def check(self, sizes: Sizes) -> list[str]:
        faults, spec = super().check(sizes), self.spec
        if self.needs_ode and spec.is_sde:
            faults.append(
                f"model.objective.rollout.solver={spec.solver} is an SDE, but {type(self).__name__} trains on final "
                f"images alone and samples with an ODE. Use {spec.as_ode().solver}."
            )
        return faults

    def predict(
        self,
        policy: Policy,
        micro: Experience,
        space: Space,
        cap: float | None = None,
        use: Literal["training", "reference"] = "training",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return :func:`~lit_vgrpo.objectives.pairs.predict_pairs` at the guidance of a use."""
        return predict_pairs(policy, micro, space, cap, self.guidance_in(use, policy))

    def copy_predictions(self, context: PrepareContext, experience: Experience, name: str) -> Tensor:
        """Return the predictions ``(B, N, ...)`` of ``copies[name]`` on all pairs."""
        use: Literal["training", "reference"] = "reference" if name == "reference" else "training"
        with self.with_copy(context.policy, name, context.ledger):
            return stored_predictions(context, experience, self.guidance_in(use, context.policy))
