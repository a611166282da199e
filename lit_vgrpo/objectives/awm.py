"""AWM (arXiv 2509.25050): advantage weighted matching, a policy gradient on the flow-matching loss."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import clamped
from lit_vgrpo.core.noise import STREAM_TIMES, seeded_generator
from lit_vgrpo.core.ranges import NonNegativeFloat, OnlyWith, Range, checked
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.core.surrogate import clipped_surrogate, mean_over_pixels, ratio_metrics, surrogate
from lit_vgrpo.core.types import Experience, Rollout, RolloutSpec
from lit_vgrpo.objectives.base import PrepareContext
from lit_vgrpo.objectives.forward import DrawnTimesObjective
from lit_vgrpo.objectives.pairs import (
    distance_to,
    old_values,
    pairs_at,
    stored_errors,
    with_negatives,
)
from lit_vgrpo.policies.base import Policy

Weighting = Literal["power", "huber", "uniform", "time", "time_squared"]
ERROR_OFFSET = 1e-10


def log_likelihood(errors: Tensor, times: Tensor, weighting: Weighting = "power", power: float = 0.25) -> Tensor:
    """Return ``log q``, the surrogate of the log-likelihood of one image at one time.

    Args:
        errors: ``e = m((v_theta - (eps - x))^2)``, shape ``(B, N)``.
        times: ``t``, shape ``(B, N)``, in (0, 1].
        weighting: ``-t ((e + 1e-10)^p - (1e-10)^p) / p``; ``-t (sqrt(e + 1e-10) - 1e-5)``, which is half of it with
            ``p = 1/2``; ``-e``, ``-t e`` or ``-t^2 e``.
        power: ``p`` of the first.

    Returns:
        Shape ``(B, N)``, at most 0.
    """
    if weighting == "huber":
        return log_likelihood(errors, times, "power", 0.5) / 2
    if weighting == "power":
        return -times * ((errors + ERROR_OFFSET) ** power - ERROR_OFFSET**power) / power
    return -errors * {"uniform": torch.ones_like(times), "time": times, "time_squared": times.square()}[weighting]


@checked
@dataclass(eq=False)
class AWM(DrawnTimesObjective):
    """AWM: the clipped ratio of every (image, time), and a pull to the start and to a slowly moving copy.

    Defined on a rectified flow only. With one update per iteration the policy is the behaviour policy, so the old
    likelihoods need no passes. The predictions of the start and of the copy are kept for a whole iteration; each is as
    large as the latents times ``num_times``.

    Args:
        num_times: Times per image, one in each equal part of the schedule, shared by the images of a micro-batch.
        weighting: See :func:`log_likelihood`.
        power: Exponent of the power weighting; the others do not use it.
        clip: Half-width of the ratio's trust region; null for none. The public code sets 1.0, nearly no bound.
        advantage_clip: Bound on the advantages, before they are divided; null for none.
        advantage_scale: Divisor of the advantages.
        kl_weight: Weight of the squared distance to the start's velocity: 3e-3 in the public code's OCR run, 1e-3 for
            GenEval (3e-3 in its first version), 1e-4 for PickScore; 0 saves the reference's passes.
        ema_weight: Weight of the squared distance to the moving copy's velocity; 0 saves its passes.
        ema_decay_rate: ``copy <- d copy + (1 - d) theta`` after each iteration, with n gradient steps done and
            ``d = min(max, rate n)``.
        ema_decay_max: Upper bound of ``d``.

    The other options are those of :class:`~lit_vgrpo.objectives.forward.ForwardObjective` and
    :class:`~lit_vgrpo.objectives.forward.DrawnTimesObjective`. The defaults are those of the public code's OCR run,
    except that it samples with SA-Solver without noise, and trains at the noisiest 0.9 of the sampler's times:
    ``noisiest: 12`` of 14 (time type ``discrete``, PickScore), without the first, ``noisiest: 11`` and
    ``time_range: [0, 0.99]`` (``discrete_wo_init``, OCR and GenEval).
    """

    path_kinds: ClassVar[tuple[str, ...]] = ("flow",)
    pairs_option: ClassVar[str] = "num_times"
    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("unipc", steps=14)

    num_times: Annotated[int, Range(1, 1000)] = 6
    weighting: Weighting = "power"
    power: Annotated[float, Range(above=0, most=1), OnlyWith("weighting", "power")] = 0.25
    clip: Annotated[float, Range(above=0, most=1)] | None = 1.0
    advantage_scale: Annotated[float, Range(above=0)] = 5.0
    kl_weight: NonNegativeFloat = 3e-3
    ema_weight: NonNegativeFloat = 1.0
    ema_decay_rate: Annotated[NonNegativeFloat, OnlyWith("ema_weight"), OnlyWith("ema_decay_max")] = 0.001
    ema_decay_max: Annotated[float, Range(least=0, below=1), OnlyWith("ema_weight")] = 0.3
    advantage_clip: Annotated[float, Range(above=0)] | None = 5.0

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        passes: dict[str, float] = {"update": sizes.uses_per_image * self.num_times}
        if sizes.updates_per_iteration > 1:
            passes["old"] = self.num_times * sizes.later_share
        if self.ema_weight > 0:
            passes["ema"] = self.num_times
        return passes | self.pull_passes(self.num_times)

    def setup(self, policy: Policy) -> None:
        super().setup(policy)
        if self.ema_weight > 0:
            self.copies["ema"] = Snapshot(policy)

    def prepare(self, context: PrepareContext) -> Experience:
        policy = context.policy
        times = self._draw_times(context.rollout, context.micro_batch_size)
        pairs = pairs_at(context, times, shared=False)
        if self.antithetic:
            pairs = with_negatives(pairs)
        advantages = clamped(context.advantages, self.advantage_clip) / self.advantage_scale
        experience = context.experience(pairs, advantages=advantages)
        if context.updates > 1:
            later = context.later_of(experience)
            with context.ledger.phase("old"):
                errors = stored_errors(context, later, "v", None, self.guidance_in("training", policy))
            experience.extras["old_log_likelihood"] = context.placed(self._log_likelihood(later, errors))
        if "ema" in self.copies:
            self.store_copy(context, experience, "ema")
        self.store_pulls(context, experience)
        return experience

    def _draw_times(self, rollout: Rollout, micro_batch_size: int) -> Tensor:
        """Return the images' times ``(B, N)``, one draw per micro-batch.

        Micro-batches are numbered over all ranks, so that the number of ranks does not matter.
        """
        pool = self.time_pool(rollout)
        drawn, rows = torch.unique(rollout.image_ids // micro_batch_size, return_inverse=True)
        generators = [seeded_generator(rollout.seed, STREAM_TIMES, rollout.iteration, k) for k in drawn.tolist()]
        return torch.stack([pool.draw(self.num_drawn, True, generator) for generator in generators])[rows]

    def _log_likelihood(self, micro: Experience, error: Tensor) -> Tensor:
        assert micro.pairs is not None
        times, _ = micro.pairs.of_images()
        return log_likelihood(mean_over_pixels(error.square(), 2), times, self.weighting, self.power)

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        prediction, error, _ = predicted = self.predict(policy, micro, "v")
        log_q = self._log_likelihood(micro, error)
        log_ratio = log_q - old_values(micro, "old_log_likelihood", log_q)
        gain = surrogate(clipped_surrogate(log_ratio, micro.advantages[:, None], self.clip))
        distance, to_ema = (distance_to(micro, name, prediction) for name in ("reference", "ema"))
        loss = (self.kl_weight * distance + self.ema_weight * to_ema - gain).mean()
        metrics = {
            "surrogate": -log_q.detach().mean(dim=1),
            "kl": distance.detach(),
            **ratio_metrics(log_ratio, self.clip),
        }
        return self.with_pulls(loss, metrics, micro, predicted)

    def after_iteration(self, policy: Policy) -> None:
        super().after_iteration(policy)
        if "ema" in self.copies:
            decay = min(self.ema_decay_max, self.ema_decay_rate * self.num_updates)
            self.copies["ema"].move_towards(policy, decay)
