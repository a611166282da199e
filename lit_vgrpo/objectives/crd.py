"""CRD (arXiv 2603.14128): centred reward distillation, which fits the policy's implicit reward to the advantage."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.ranges import NonNegativeFloat, PositiveFloat, Range, checked
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.core.surrogate import denoising_error, surrogate
from lit_vgrpo.core.types import Experience
from lit_vgrpo.objectives.forward import nft_decay
from lit_vgrpo.objectives.groups import GroupObjective
from lit_vgrpo.objectives.pairs import distance_to
from lit_vgrpo.policies.base import Policy

def group_centres(implied: Tensor, targets: Tensor, group_ids: Tensor, temperature: float | None) -> Tensor:
    """Return the means of the implied rewards and of the targets over each image's group.

    Args:
        implied: ``r``, ``(B, N)``; whole groups, in any order.
        targets: ``(B,)``.
        group_ids: ``(B,)``, int64.
        temperature: Weight the images with ``softmax(targets / T)`` for one pair of means, and with
            ``softmax(-targets / T)`` for another; ``None`` for equal weights and one pair.

    Returns:
        Shape ``(B, D, 2, N)``, with D pairs of means; detached.
    """
    same = (group_ids[:, None] == group_ids).to(implied.dtype)
    signs = (0.0,) if temperature is None else (1 / temperature, -1 / temperature)
    values = torch.stack([implied.detach(), targets[:, None].expand_as(implied)], dim=1)  # (B, 2, N)
    pairs = []
    for sign in signs:
        weights = torch.softmax(sign * targets + same.log(), dim=1)
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
    of_implied, of_targets = centres.unbind(dim=2)
    difference = beta * (implied[:, None] - of_implied) - (targets[:, None, None] - of_targets)
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
        sampler_decay_type: Schedule of the copy that samples, see :func:`~lit_vgrpo.objectives.forward.nft_decay`; 0
            samples with the policy.

    The other options are those of :class:`~lit_vgrpo.objectives.groups.GroupObjective` and
    :class:`~lit_vgrpo.objectives.forward.ForwardObjective`. The advantages are divided by twice ``advantage_clip``, and
    the loss by ``beta / advantage_clip``, so that its first gradient is AWM's.

    Source:
        The abstract, and a third-party implementation (X-GenGroup/Flow-Factory, ``trainers/crd.py``). The defaults
        are this third party's, unverified, except ``num_times``; the decays are those it states for the authors' code.
    """

    old_decay_start: ClassVar[float] = 0.25
    acting_copy: ClassVar[str] = "sampler"

    _: KW_ONLY
    beta: PositiveFloat = 1.0
    temperature: PositiveFloat | None = None
    self_normalise: bool = True
    kl_weight: NonNegativeFloat = 0.1
    sampler_decay_type: Literal[0, 1, 2] = 1
    old_decay_max: Annotated[float, Range(least=0, below=1)] = 0.5
    advantage_clip: PositiveFloat = 5.0

    def setup(self, policy: Policy) -> None:
        super().setup(policy)
        if self.sampler_decay_type > 0:
            self.copies["sampler"] = Snapshot(policy)

    def pair_losses(self, error: Tensor) -> Tensor:
        return denoising_error(error, self.self_normalise)

    def group_values(
        self, losses: Tensor, compared: Tensor, advantages: Tensor, group_ids: Tensor, group_size: Tensor
    ) -> Tensor:
        return group_centres(compared - losses, advantages / (2 * self.advantage_clip), group_ids, self.temperature)

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        prediction, error, _ = predicted = self.predict(policy, micro, policy.path.prediction)
        losses, clip = self.pair_losses(error), self.advantage_clip
        implied = micro.extras["old_losses"] - losses
        centres = self.values_of(micro, losses)
        per_pair = centred_reward_loss(implied, micro.advantages / (2 * clip), centres, self.beta)
        loss = surrogate(per_pair).mean() * clip / self.beta
        metrics = {
            "surrogate": surrogate(losses.detach()),
            "ratio_deviation": surrogate((implied.detach().exp() - 1).abs()),
        }
        if self.kl_weight > 0:
            distance = distance_to(micro, "reference", prediction)
            loss = loss + self.kl_weight * distance.mean()
            metrics["kl"] = distance.detach()
        return self.with_pulls(loss, metrics, micro, predicted)

    def after_iteration(self, policy: Policy) -> None:
        super().after_iteration(policy)
        if self.sampler_decay_type > 0:
            self.copies["sampler"].move_towards(policy, nft_decay(self.sampler_decay_type, self.num_updates))
