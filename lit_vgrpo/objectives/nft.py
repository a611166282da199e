"""DiffusionNFT (arXiv 2509.16117): contrasts good and bad images on the forward process, without a likelihood."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.surrogate import denoising_error, mean_over_pixels, surrogate
from lit_vgrpo.core.types import Experience
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.forward import LaggedObjective
from lit_vgrpo.objectives.pairs import distance_to, stored_errors
from lit_vgrpo.policies.base import Policy

ABSOLUTE_FLOOR = 1e-5


def optimality(advantages: Tensor, clip: float = 5.0) -> Tensor:
    """Return ``r = clip(1/2 + clip(A, -c, c) / (2 c), 0, 1)``, the weight of an image's positive side in its loss."""
    return (0.5 + advantages.clamp(-clip, clip) / (2 * clip)).clamp(0, 1)


def contrastive_error(error: Tensor, old_error: Tensor, share: Tensor, beta: float) -> Tensor:
    """Return ``(r l+ + (1 - r) l-) / beta`` for each pair, to be minimised.

    Args:
        error: ``x_hat_theta - x`` (up to its sign), ``(B, N, ...)``; carries grad.
        old_error: The same of the old policy.
        share: ``r``, ``(B,)`` in [0, 1].
        beta: Position of the implicit positive policy between the old policy (0) and the new (1).

    Returns:
        Shape ``(B, N)``.
    """
    positive = beta * error + (1 - beta) * old_error
    negative = (1 + beta) * old_error - beta * error
    good, bad = (_self_normalised(e) for e in (positive, negative))
    r = share[:, None]
    return (r * good + (1 - r) * bad) / beta


def _self_normalised(error: Tensor) -> Tensor:
    weight = mean_over_pixels(error.detach().abs(), 2).clamp(min=ABSOLUTE_FLOOR)
    return mean_over_pixels(error.square(), 2) / weight


@checked
@dataclass(eq=False)
class DiffusionNFT(LaggedObjective):
    """DiffusionNFT: images come from a slowly moving copy, and each trains at nearly all of the sampler's times.

    On a rectified flow this is the paper's method. On a variance-preserving path, our extension, the
    network's predictions (noise or velocity) are combined where the paper combines velocities, and the error of the
    combination is measured in x as there. At a fixed ``z_t`` that is the prediction's error times a factor: ``t``
    on a flow, ``b`` for a v-network, ``b / a`` bounded by ``scale_cap`` for an eps-network.

    The old policy's errors and the reference's predictions are kept for a whole iteration; each is as large as the
    latents times the number of times.

    Args:
        beta: The paper uses 1.0 for GenEval, PickScore and HPS, and 0.1 for OCR and for several rewards.
        advantage_clip: Bound of the advantages, and weight of the loss; an image's weight is thus its advantage.

    The other options are those of :class:`~lit_vgrpo.objectives.forward.LaggedObjective` and
    :class:`~lit_vgrpo.objectives.forward.ForwardObjective`. The paper samples 10 steps without guidance.
    """

    beta: Annotated[float, Range(above=0)] = 1.0
    advantage_clip: Annotated[float, Range(above=0)] = 5.0

    def store_old(self, context: PrepareContext, experience: Experience) -> None:
        guidance = self.guidance_in("training", context.policy)
        experience.extras["old_error"] = stored_errors(context, experience, "x", self.scale_cap, guidance)

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        prediction, error, _ = predicted = self.predict(policy, micro, "x", self.scale_cap)
        share = optimality(micro.advantages, self.advantage_clip)
        old_error = micro.extras.get("old_error", error.detach())
        contrast = surrogate(contrastive_error(error, old_error, share, self.beta))
        distance = distance_to(micro, "reference", prediction)
        loss = (self.advantage_clip * contrast + self.kl_weight * distance).mean()
        metrics = {
            "surrogate": surrogate(denoising_error(error.detach(), self_normalised=True)),
            "kl": distance.detach(),
        }
        return self.with_pulls(loss, metrics, micro, predicted)
