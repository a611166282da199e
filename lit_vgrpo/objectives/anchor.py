"""The anchor: a slowly moving copy of the weights that any method's policy can be pulled to."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from torch import Tensor

from lit_vgrpo.core.ranges import NonNegativeFloat, Range
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.core.surrogate import absolute_error, mean_over_pixels
from lit_vgrpo.objectives.base import Objective
from lit_vgrpo.policies.base import Policy


def distance_to_copy(prediction: Tensor, stored: Tensor, error: Tensor, scale: Tensor) -> Tensor:
    """Return ``m((s (v_theta - v_copy))^2) / sg(m(|e|))`` of each pair; ``(B, N, ...) -> (B, N)``.

    Both predictions start from the same noisy latent, so their errors differ by ``s (v_theta - v_copy)``. Divided by
    the absolute error, the distance has the unit of the self-normalised surrogate, so that one weight fits every time.

    Args:
        prediction: the network's own; carries grad.
        stored: that of the copy.
        error: the policy's error in the space of the method's loss.
        scale: factor ``s`` from an error of the prediction to one in that space, ``(B, N, 1...)``.
    """
    return mean_over_pixels((scale * (prediction - stored)).square(), 2) / absolute_error(error)


@dataclass(eq=False)
class AnchoredObjective(Objective):
    """Base of the methods that can be pulled to an anchor; holds the options that all of them have.

    The anchor is ours, and in none of the papers. A subclass that overrides :meth:`setup`, :meth:`check` or
    :meth:`after_iteration` must call those of this class.

    Args:
        anchor_weight: weight of the pull to the anchor; 0 saves its passes.
        anchor_decay: ``anchor <- d anchor + (1 - d) weights`` after each iteration; null for no anchor.
    """

    _: KW_ONLY
    anchor_weight: NonNegativeFloat = 0.0
    anchor_decay: Annotated[float, Range(least=0, below=1, example=0.3)] | None = None

    @property
    def keeps_anchor(self) -> bool:
        """True if there is an anchor."""
        return self.anchor_weight > 0 and self.anchor_decay is not None

    @property
    def anchor(self) -> Snapshot | None:
        """The slowly moving copy, where there is one."""
        return self.copies.get("anchor")

    def check(self, sizes: Sizes) -> list[str]:
        return super().check(sizes) + self.anchor_errors(sizes)

    def anchor_errors(self, sizes: Sizes) -> list[str]:
        """Return the settings of the anchor that have no effect, a line each."""
        weight, decay = self.anchor_weight, self.anchor_decay
        if weight > 0 and decay is None:
            return [f"model.objective.anchor_weight={weight} needs an anchor: anchor_decay=null. Set anchor_decay=0.3."]
        if weight == 0 and decay is not None:
            return [
                f"model.objective.anchor_decay={decay} has no effect with anchor_weight=0. Set anchor_weight=1.0, or "
                "anchor_decay=null."
            ]
        if decay == 0 and sizes.updates_per_iteration == 1:
            return [
                "model.objective.anchor_decay=0 has no effect with updates_per_iteration=1: the anchor is the policy "
                "itself. Set anchor_decay=0.3."
            ]
        return []

    def anchor_passes(self, predictions: float) -> dict[str, float]:
        """Return the anchor's predictions per image by phase, as many as the method trains at."""
        return {"anchor": predictions} if self.keeps_anchor else {}

    def setup(self, policy: Policy) -> None:
        if self.keeps_anchor:
            self.copies["anchor"] = Snapshot(policy)

    def after_iteration(self, policy: Policy) -> None:
        if self.anchor is not None and self.anchor_decay is not None:
            self.anchor.move_towards(policy, self.anchor_decay)
