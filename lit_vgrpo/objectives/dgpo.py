"""DGPO (arXiv 2510.08425): preference between the good and the bad part of a group, without a policy gradient."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import clamped
from lit_vgrpo.core.noise import STREAM_TIMES, seeded_generator
from lit_vgrpo.core.probability_paths import expand
from lit_vgrpo.core.ranges import NonNegativeFloat, NonNegativeInt, Range, checked
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.core.surrogate import denoising_error, surrogate
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.forward import ForwardObjective
from lit_vgrpo.objectives.pairs import distance_to, pairs_at, store_predictions
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


def joined(micros: Sequence[Experience], name: str) -> Tensor:
    """Return one of the extras of all images, ``(B, ...)``."""
    return torch.cat([micro.extras[name] for micro in micros])


def groups_of(micros: Sequence[Experience]) -> tuple[Tensor, Tensor]:
    """Return the images' group ids and group sizes, each ``(B,)``, int64."""
    return joined(micros, "group_ids"), joined(micros, "group_size")


def are_whole(ids: Tensor, sizes: Tensor) -> Tensor:
    """Return whether no group is cut, ``()``, bool; without waiting for a GPU."""
    return ((ids[:, None] == ids).sum(dim=1) == sizes).all()


@checked
@dataclass(eq=False)
class DGPO(ForwardObjective):
    """DGPO: the group's images as one preference, weighted by how far it is from being satisfied.

    ``l_it = m((target - prediction)^2)`` is an image's loss at one time, in the network's prediction: the velocity on a
    rectified flow, as in the paper; on a variance-preserving path, our extension, the noise of an eps-network (as in
    Diffusion-DPO) or the velocity of a v-network. As in the authors' code, a group's stop and weight are computed per
    time, and the loss is the mean over times.

    A group must be whole in every update. If micro-batches do not hold whole groups, the update's images pass through
    the network once more without gradient, to compute each group's weight. A ``micro_batch_size`` that is a multiple
    of ``group_size`` saves this pass.

    Args:
        num_times: Times per iteration, the same for all images and ranks.
        noisiest: Number of the sampler's noisiest times to draw from, without repetition; null for all.
        share_passes: ``pure_noise`` sets one of the times to ``t = 1``, where the images of a group share one pass; see
            :class:`~lit_vgrpo.objectives.vgrpo.VGRPO`. Ours, not the paper's.
        beta: How soon a satisfied group stops pulling: 100 (OCR, GenEval) or 10 (PickScore).
        advantage_clip: Bound on the advantages; null for none. Clipped advantages no longer sum to 0 in a group.
        kl_weight: Weight of the squared distance to the reference's predictions: 0.02, or 0.001.
        clip: Maximum change of an image's likelihood from the old policy before its gradient is dropped: 1e-2, or 5e-2.
        reference: The preference's reference: the start, or the slowly moving old policy. The KL's is the start in
            both cases (the public code's ``use_ema_ref``, ``scripts/train_sd3_dgpo.py``).
        old_decay_rate: ``old <- d old + (1 - d) theta`` after each of n gradient steps, ``d = min(max, rate n)``.
        old_decay_max: Upper bound of ``d``.
        behaviour_from_step: Gradient step from which the old policy rolls out: 200 (500 for GenEval).

    The other options are those of :class:`~lit_vgrpo.objectives.forward.ForwardObjective`. The paper samples with
    DPM-Solver++ in 10 steps.
    """

    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("dpm++", steps=10)

    num_times: Annotated[int, Range(1, 1000)] = 4
    noisiest: Annotated[int, Range(1, 1000)] | None = field(default=7, kw_only=True)
    beta: Annotated[float, Range(above=0)] = 100.0
    share_passes: Literal["none", "pure_noise"] = "none"
    kl_weight: NonNegativeFloat = 0.02
    clip: Annotated[float, Range(above=0, below=1)] = 1e-2
    reference: Literal["frozen", "moving"] = "frozen"
    old_decay_rate: NonNegativeFloat = 0.001
    old_decay_max: Annotated[float, Range(least=0, below=1)] = 0.3
    behaviour_from_step: NonNegativeInt = 200
    advantage_clip: Annotated[float, Range(above=0)] | None = 5.0

    def check(self, sizes: Sizes) -> list[str]:
        errors = super().check(sizes)
        prompts, updates = sizes.prompts_per_iteration, sizes.updates_per_iteration
        if sizes.splits_groups:
            errors.append(
                f"DGPO compares whole groups, but updates_per_iteration={updates} splits the {prompts} groups of "
                f"{sizes.group_size}. Use a divisor of {prompts}, or data.split_updates=false."
            )
        return errors

    @property
    def times_per_image(self) -> int:
        return self.num_times

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        predictions = self.predictions_per_image(self.num_times, sizes)
        trained = sizes.uses_per_image * predictions
        passes: dict[str, float] = {"update": trained, "old": trained}
        if not sizes.holds_whole_groups:
            passes["group"] = trained
        return passes | self.pull_passes(predictions)

    @property
    def needs_reference(self) -> bool:
        return super().needs_reference or self.reference == "frozen"

    def setup(self, policy: Policy) -> None:
        super().setup(policy)
        self.copies["old"] = Snapshot(policy)

    def acting(self, policy: Policy) -> AbstractContextManager[Any]:
        return (
            self.copies["old"].swapped_into(policy) if self.num_updates >= self.behaviour_from_step else nullcontext()
        )

    def prepare(self, context: PrepareContext) -> Experience:
        rollout, device = context.rollout, context.rollout.latents.device
        generator = seeded_generator(rollout.seed, STREAM_TIMES, rollout.iteration)
        shares = self.share_passes != "none"
        times = self.sampler_times(rollout, below_one=shares).pick(self.num_times - shares, generator)
        pairs = pairs_at(context, torch.cat([torch.ones(int(shares)), times]), shared=True)
        pairs.shared = int(shares)
        group_size = torch.full((len(rollout),), rollout.group_size, device=device)
        experience = context.experience(
            advantages=clamped(context.advantages, self.advantage_clip),
            pairs=pairs,
            extras={"group_ids": rollout.group_ids.to(device), "group_size": group_size},
        )
        if "reference" in self.copies:
            micros = experience.micro_batches(context.micro_batch_size)
            with self.with_copy(context.policy, "reference", context.ledger):
                start = [self._losses(context.policy, micro, "reference") for micro in micros]
            if self.reference == "frozen":
                experience.extras["reference_losses"] = torch.cat([losses for _, losses in start])
            if super().needs_reference:
                store_predictions(experience, "reference_prediction", micros, [prediction for prediction, _ in start])
        if self.anchor is not None:
            self.store_copy(context, experience, "anchor")
        return experience

    def _losses(
        self, policy: Policy, micro: Experience, use: Literal["training", "reference"] = "training"
    ) -> tuple[Tensor, Tensor]:
        """Return the network's predictions ``(M, N, ...)`` and ``l_it``, ``(M, N)``."""
        prediction, error, _ = self.predict(policy, micro, policy.path.prediction, use=use)
        return prediction, denoising_error(error, self_normalised=False)

    def before_update(self, policy: Policy, micros: Sequence[Experience], ledger: PassLedger | None = None) -> None:
        """Store the old policy's losses, which move with every update, and the weights of spread groups."""
        with self.with_copy(policy, "old", ledger):
            for micro in micros:
                micro.extras["old_losses"] = self._losses(policy, micro)[1]
                if self.reference == "moving":
                    micro.extras["reference_losses"] = micro.extras["old_losses"]
        if torch.stack([are_whole(*groups_of([micro])) for micro in micros]).all():
            return
        with (ledger or PassLedger()).phase("group"), torch.no_grad():
            losses = torch.cat([self._losses(policy, micro)[1] for micro in micros])
        weights = self._weights_of_spread_groups(micros, losses)
        for micro, weight in zip(micros, weights.split([len(m) for m in micros]), strict=True):
            micro.extras["group_weights"] = weight

    def _weights_of_spread_groups(self, micros: Sequence[Experience], losses: Tensor) -> Tensor:
        """Return the weights of each image's group ``(B, N)``, for groups spread over micro-batches or ranks."""
        own, _ = ids, sizes = groups_of(micros)
        reference = joined(micros, "reference_losses")
        advantages = torch.cat([micro.advantages for micro in micros])
        if not are_whole(ids, sizes):
            # All ranks get here or none, since all hold equal parts.
            ids, sizes, losses, reference, advantages = (
                self.all_ranks(values).to(own.device) for values in (ids, sizes, losses, reference, advantages)
            )
            if not are_whole(ids, sizes):
                raise ValueError(
                    "An update splits a group, but DGPO compares whole groups. Use data.split_updates=false."
                )
        weights = group_weights(losses, reference, advantages, ids, sizes, self.beta)
        first = (ids == own[:, None]).int().argmax(dim=1)  # an image of the same group, wherever it is
        return weights[first]

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        prediction, error, _ = predicted = self.predict(policy, micro, policy.path.prediction)
        losses = denoising_error(error, self_normalised=False)
        weights = micro.extras.get("group_weights")
        if weights is None:
            weights = group_weights(
                losses, micro.extras["reference_losses"], micro.advantages, *groups_of([micro]), self.beta
            )
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

    def after_update(self, policy: Policy) -> None:
        super().after_update(policy)
        decay = min(self.old_decay_max, self.old_decay_rate * self.num_updates)
        self.copies["old"].move_towards(policy, decay)
