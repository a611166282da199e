"""CRD (arXiv 2603.14128): centred reward distillation, which fits the policy's implicit reward to the advantage."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from lit_vgrpo.core.ranges import HalfOpenUnitInterval, NonNegativeFloat, PositiveFloat, checked
from lit_vgrpo.core.snapshots import Decay
from lit_vgrpo.core.surrogate import denoising_error, surrogate
from lit_vgrpo.core.types import Experience
from lit_vgrpo.objectives.base import Copy, Metrics
from lit_vgrpo.objectives.groups import GroupObjective
from lit_vgrpo.objectives.pairs import PairPass


def group_centres(
    implied: Tensor, targets: Tensor, group_ids: Tensor, temperature: float | None, counts: Tensor | None = None
) -> Tensor:
    """Return D pairs of means of the implied rewards and targets over each image's group, ``(B, D, 2, N)``, detached.

    Args:
        implied: ``r``, ``(B, N)``; whole groups, in any order.
        targets: ``(B,)``.
        group_ids: ``(B,)``, int64.
        temperature: Weight the images with ``softmax(targets / T)`` for one pair of means, and with
            ``softmax(-targets / T)`` for another; ``None`` for equal weights and one pair.
        counts: ``(B,)``, bool: the images that count, in the means of others; ``None`` for all.
    """
    same = group_ids[:, None] == group_ids
    if counts is not None:
        same = same & (counts | torch.eye(len(counts), dtype=torch.bool, device=same.device))
    signs = (0.0,) if temperature is None else (1 / temperature, -1 / temperature)
    values = torch.stack([implied.detach(), targets[:, None].expand_as(implied)], dim=1)  # (B, 2, N)
    pairs = []
    for sign in signs:
        weights = torch.softmax(sign * targets + same.to(implied.dtype).log(), dim=1)
        # Not a matrix product, which autocast would round.
        pairs.append((weights[:, :, None, None] * values).sum(dim=1))
    return torch.stack(pairs, dim=1)


def centred_reward_loss(implied: Tensor, targets: Tensor, centres: Tensor, beta: float) -> Tensor:
    """Return ``(beta (r - mean r) - (A - mean A))^2``, averaged over the pairs of means; ``(B, N)``.

    Args:
        implied: ``r``, ``(B, N)``; carries grad.
        targets: ``A``, ``(B,)``.
        centres: Return value of :func:`group_centres`.
    """
    mean_implied, mean_target = centres.unbind(dim=2)
    difference = beta * (implied[:, None] - mean_implied) - (targets[:, None, None] - mean_target)
    return difference.square().mean(dim=1)


@checked
@dataclass(eq=False)
class CRD(GroupObjective):
    """CRD: regression of the centred implied reward ``r = l_old - l`` on the centred advantage.

    ``l_it`` is the denoising error of the network's prediction, so that ``r`` is the log-ratio to a moving copy, up to
    a constant that centring over the group removes. Another copy samples the images. On a rectified flow the prediction
    is the velocity, as in the paper; variance-preserving paths are our extension, as for DGPO. Sharing noise within a
    group and times between all images is ours.

    Args:
        beta: Weight of the implied reward.
        temperature: Temperature of the weights of a group's means, separate for good and bad images; null for plain
            means.
        self_normalise: Divide each squared error by its detached absolute error.
        kl_weight: Weight of the squared distance to the start's predictions; the third party's guidance for these is
            4.5 (``reference_guidance``).
        sampler_decay: Decay of the copy that samples, moved after each iteration; 0 samples with the policy.
        old_decay: Decay of the copy that the implied reward compares with, moved after every gradient step.

    The other options are those of :class:`~lit_vgrpo.objectives.groups.GroupObjective` and
    :class:`~lit_vgrpo.objectives.pairs.PairObjective`. The advantages are divided by twice ``advantage_clip``, and the
    loss by ``beta / advantage_clip``, so that its first gradient is AWM's.

    Source:
        The abstract, and a third-party implementation (X-GenGroup/Flow-Factory, ``trainers/crd.py``). The defaults
        are this third party's, unverified, except ``num_times``; the decays are those it states for the authors' code.
    """

    _: KW_ONLY
    beta: PositiveFloat = 1.0
    temperature: PositiveFloat | None = None
    self_normalise: bool = True
    kl_weight: NonNegativeFloat = 0.1
    sampler_decay: HalfOpenUnitInterval | Decay = Decay(rate=0.001, max=0.5)
    old_decay: HalfOpenUnitInterval | Decay = Decay(rate=0.001, max=0.5, start=0.25)
    advantage_clip: PositiveFloat = 5.0

    def pair_losses(self, now: PairPass) -> Tensor:
        return denoising_error(now.error, self.self_normalise)

    def copies_needed(self) -> dict[str, Copy]:
        copies = super().copies_needed()
        copies["old"] = Copy({"old": self.pair_losses}, self.old_decay, "update", asked="update")
        return copies | {"sampler": Copy(decay=self.sampler_decay, samples_from=0)}

    def group_values(
        self, losses: Tensor, compared: Tensor, advantages: Tensor, counts: Tensor, group_ids: Tensor, group_size: int
    ) -> Tensor:
        targets = advantages / (2 * self.advantage_clip)
        return group_centres(compared - losses, targets, group_ids, self.temperature, counts)

    def losses(self, now: PairPass, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        losses, clip = self.pair_losses(now), self.advantage_clip
        implied = kept["old"] - losses
        centres = self.values_of_groups(micro, losses, kept)
        per_pair = centred_reward_loss(implied, micro.advantages / (2 * clip), centres, self.beta)
        metrics = {
            "surrogate": surrogate(losses.detach()),
            "ratio_deviation": surrogate((implied.detach().exp() - 1).abs()),
        }
        return surrogate(per_pair) * clip / self.beta, metrics
