"""DGPO (arXiv 2510.08425): preference between the good and the bad part of a group, without a policy gradient."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.probability_paths import expand
from lit_vgrpo.core.ranges import HalfOpenUnitInterval, NonNegativeFloat, NonNegativeInt, Range, checked
from lit_vgrpo.core.snapshots import Decay
from lit_vgrpo.core.surrogate import denoising_error, surrogate
from lit_vgrpo.core.types import Experience
from lit_vgrpo.objectives.base import Copy, Metrics
from lit_vgrpo.objectives.groups import GroupObjective
from lit_vgrpo.objectives.pairs import PairPass, prediction


def has_left_trust_region(losses: Tensor, old_losses: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return where ``q = exp(l_old - l)`` is outside ``[1 - c, 1 + c]`` on the side that the advantage pushes to.

    Losses, and the result, are ``(B, ...)``; advantages ``(B,)``.
    """
    ratio = (old_losses - losses.detach()).exp()
    return torch.where(expand(advantages, losses) > 0, ratio > 1 + clip, ratio < 1 - clip)


def group_weights(
    losses: Tensor, reference_losses: Tensor, advantages: Tensor, group_ids: Tensor, group_size: int, beta: float
) -> Tensor:
    """Return ``sigmoid(z_g)`` of each image's group, of the shape of ``losses``, detached.

    ``z_g = (beta / G) sum_{i in g} A_i (l_i - l_ref_i)``, separately for each time if there are several.

    Args:
        losses: ``l_i``, ``(B,)`` or ``(B, N)``; whole groups, in any order. So are the others.
        reference_losses: ``l_ref_i``, shaped like them.
        advantages: ``A_i``, ``(B,)``.
        group_ids: ``(B,)``, int64.
        group_size: ``G``.
    """
    gains = expand(advantages, losses) * (losses.detach() - reference_losses) / group_size
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
        old_decay: Decay of the old policy, moved after every gradient step.

    The other options are those of :class:`~lit_vgrpo.objectives.groups.GroupObjective` and
    :class:`~lit_vgrpo.objectives.pairs.PairObjective`. The paper samples with DPM-Solver++ in 10 steps.
    """

    _: KW_ONLY
    noisiest: Annotated[int, Range(1, 1000)] | None = 7
    beta: Annotated[float, Range(above=0)] = 100.0
    kl_weight: NonNegativeFloat = 0.02
    clip: Annotated[float, Range(above=0, below=1)] = 1e-2
    reference: Literal["frozen", "moving"] = "frozen"
    behaviour_from_step: NonNegativeInt = 200
    old_decay: HalfOpenUnitInterval | Decay = Decay(rate=0.001, max=0.3)

    def pair_losses(self, now: PairPass) -> Tensor:
        return denoising_error(now.error, self_normalised=False)

    @property
    def compared(self) -> str:
        return "reference_losses" if self.reference == "frozen" else "old"

    def copies_needed(self) -> dict[str, Copy]:
        copies, keeps = super().copies_needed(), {}
        if self.needs_reference:
            keeps["reference"] = prediction
        if self.reference == "frozen":
            keeps["reference_losses"] = self.pair_losses
        if keeps:
            copies["reference"] = Copy(keeps)
        samples_from = self.behaviour_from_step
        old = Copy({"old": self.pair_losses}, self.old_decay, "update", asked="update", samples_from=samples_from)
        return copies | {"old": old}

    def group_values(
        self, losses: Tensor, compared: Tensor, advantages: Tensor, counts: Tensor, group_ids: Tensor, group_size: int
    ) -> Tensor:
        return group_weights(losses, compared, advantages, group_ids, group_size, self.beta)

    def losses(self, now: PairPass, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        losses, old, advantages = self.pair_losses(now), kept["old"], micro.advantages
        weights = self.values_of_groups(micro, losses, kept)
        stop = has_left_trust_region(losses, old, advantages, self.clip)
        preference = surrogate(weights * advantages[:, None] * torch.where(stop, losses.detach(), losses))
        metrics = {
            "surrogate": surrogate(losses.detach()),
            "ratio_deviation": surrogate(((old - losses.detach()).exp() - 1).abs()),
            "clip_fraction": surrogate(stop.float()),
        }
        return preference, metrics
