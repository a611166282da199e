"""DGPO (arXiv 2510.08425): preference between the good and the bad part of a group, without a policy gradient."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.probability_paths import expand
from lit_vgrpo.core.ranges import NonNegativeFloat, NonNegativeInt, Range, checked
from lit_vgrpo.core.surrogate import denoising_error, surrogate
from lit_vgrpo.core.types import Experience
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.groups import GroupObjective
from lit_vgrpo.objectives.pairs import distance_to, store_predictions
from lit_vgrpo.policies.base import Policy


def has_left_trust_region(losses: Tensor, old_losses: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return a mask of ``q = exp(l_old - l)`` outside ``[1 - c, 1 + c]`` on the side that the advantage pushes to.

    Args:
        losses: ``(B, ...)``, and ``old_losses`` alike.
        advantages: ``(B,)``.
        clip: ``c``.

    Returns:
        Shape of ``losses``, bool.
    """
    ratio = (old_losses - losses.detach()).exp()
    return torch.where(expand(advantages, losses) > 0, ratio > 1 + clip, ratio < 1 - clip)


def group_weights(
    losses: Tensor, reference_losses: Tensor, advantages: Tensor, group_ids: Tensor, group_size: Tensor, beta: float
) -> Tensor:
    """Return ``sigmoid(z_g)`` of each image's group, detached.

    ``z_g = (beta / G) sum_{i in g} A_i (l_i - l_ref_i)``, separately for each time if there are several.

    Args:
        losses: ``l_i``, ``(B,)`` or ``(B, N)``; whole groups, in any order. So are the others.
        reference_losses: ``l_ref_i``, shaped like them.
        advantages: ``A_i``, ``(B,)``.
        group_ids: ``(B,)``, int64.
        group_size: ``G`` of each image's group, ``(B,)``, int64.

    Returns:
        Shape of ``losses``, in (0, 1).
    """
    gains = expand(advantages, losses) * (losses.detach() - reference_losses) / expand(group_size, losses)
    same = group_ids[:, None] == group_ids
    # Not by unique and index_add, which wait for a GPU and are not deterministic there, nor by a matrix product, which
    # autocast would round.
    sums = (same.reshape(*same.shape, *[1] * (gains.ndim - 1)) * gains).sum(dim=1)
    return torch.sigmoid(beta * sums)


@checked
@dataclass(eq=False)
class DGPO(GroupObjective):
    """DGPO: the group's images as one preference, weighted by how far it is from being satisfied.

    ``l_it = m((target - prediction)^2)`` is an image's loss at one time, in the network's prediction: the velocity on a
    rectified flow, as in the paper; on a variance-preserving path, our extension, the noise of an eps-network (as in
    Diffusion-DPO) or the velocity of a v-network. As in the authors' code, a group's stop and weight are computed per
    time, and the loss is the mean over times.

    Args:
        noisiest: Number of the sampler's noisiest times to draw from, without repetition; null for all.
        beta: How soon a satisfied group stops pulling: 100 (OCR, GenEval) or 10 (PickScore).
        kl_weight: Weight of the squared distance to the reference's predictions: 0.02, or 0.001.
        clip: Maximum change of an image's likelihood from the old policy before its gradient is dropped: 1e-2, or 5e-2.
        reference: The preference's reference: the start, or the slowly moving old policy. The KL's is the start in
            both cases (the public code's ``use_ema_ref``, ``scripts/train_sd3_dgpo.py``).
        behaviour_from_step: Gradient step from which the old policy rolls out: 200 (500 for GenEval).

    The other options are those of :class:`~lit_vgrpo.objectives.groups.GroupObjective` and
    :class:`~lit_vgrpo.objectives.forward.ForwardObjective`. The paper samples with
    DPM-Solver++ in 10 steps.
    """

    acting_copy: ClassVar[str] = "old"
    _: KW_ONLY
    noisiest: Annotated[int, Range(1, 1000)] | None = 7
    beta: Annotated[float, Range(above=0)] = 100.0
    kl_weight: NonNegativeFloat = 0.02
    clip: Annotated[float, Range(above=0, below=1)] = 1e-2
    reference: Literal["frozen", "moving"] = "frozen"
    behaviour_from_step: NonNegativeInt = 200

    @property
    def needs_reference(self) -> bool:
        return super().needs_reference or self.reference == "frozen"

    def acting(self, policy: Policy) -> AbstractContextManager[Any]:
        return super().acting(policy) if self.num_updates >= self.behaviour_from_step else nullcontext()

    @property
    def compared_losses(self) -> str:
        return "reference_losses" if self.reference == "frozen" else "old_losses"

    def store_pulls(self, context: PrepareContext, experience: Experience) -> None:
        if "reference" in self.copies:
            micros = experience.micro_batches(context.micro_batch_size)
            with self.with_copy(context.policy, "reference", context.ledger):
                start = [self.losses(context.policy, micro, "reference") for micro in micros]
            if self.reference == "frozen":
                experience.extras["reference_losses"] = torch.cat([losses for _, losses in start])
            if super().needs_reference:
                store_predictions(experience, "reference_prediction", micros, [prediction for prediction, _ in start])
        if self.anchor is not None:
            self.store_copy(context, experience, "anchor")

    def pair_losses(self, error: Tensor) -> Tensor:
        return denoising_error(error, self_normalised=False)

    def group_values(
        self, losses: Tensor, compared: Tensor, advantages: Tensor, group_ids: Tensor, group_size: Tensor
    ) -> Tensor:
        return group_weights(losses, compared, advantages, group_ids, group_size, self.beta)

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        prediction, error, _ = predicted = self.predict(policy, micro, policy.path.prediction)
        losses = self.pair_losses(error)
        weights = self.values_of(micro, losses)
        stop = has_left_trust_region(losses, micro.extras["old_losses"], micro.advantages, self.clip)
        preference = surrogate(weights * micro.advantages[:, None] * torch.where(stop, losses.detach(), losses))
        distance = distance_to(micro, "reference", prediction)
        loss = (preference + self.kl_weight * distance).mean()
        metrics = {
            "surrogate": surrogate(losses.detach()),
            "ratio_deviation": surrogate(((micro.extras["old_losses"] - losses.detach()).exp() - 1).abs()),
            "clip_fraction": surrogate(stop.float()),
            "kl": distance.detach(),
        }
        return self.with_pulls(loss, metrics, micro, predicted)
