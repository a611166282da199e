"""Methods on the forward process: the network is asked at noisy copies of the final latents, pairs ``(t, eps)``."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.noise import (
    STREAM_BASES,
    STREAM_PAIRS,
    STREAM_TIMES,
    image_generators,
    seeded_generator,
    unit_noise,
)
from lit_vgrpo.core.probability_paths import Space, expand
from lit_vgrpo.core.ranges import (
    ClosedUnitInterval,
    Count,
    GuidanceScale,
    HalfOpenUnitInterval,
    NonNegativeFloat,
    OnlyWith,
    PositiveFloat,
    Range,
)
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.surrogate import (
    ContinuousTimes,
    Pairs,
    SamplerTimes,
    TimeGrid,
    TimePool,
    absolute_error,
    mean_over_pixels,
    surrogate,
)
from lit_vgrpo.core.types import Experience, Rollout, RolloutSpec
from lit_vgrpo.objectives.base import Copy, Metrics, Objective, PrepareContext
from lit_vgrpo.policies.base import Policy

Sharing = Literal["none", "group", "iteration"]
"""Images with the same times and noise: none, those of a group, or all in the iteration, on all ranks."""
TimesPer = Literal["row", "image", "block", "iteration"]
BLOCK = 32
"""Consecutive images, over all ranks, in a block: a micro-batch's size would change the result with the memory."""


# --- drawing pairs --------------------------------------------------------------------------------------------------


def draw_pairs(
    context: PrepareContext,
    times: TimePool | Tensor,
    number: int,
    shared: Sharing,
    *,
    stratified: bool = True,
    antithetic: bool = False,
    pure_noise: bool = False,
) -> Pairs:
    """Draw an iteration's pairs: one row per image, per group, or for all images.

    A row is seeded by its group's (or image's) global number, so that it does not depend on the number of ranks.

    Args:
        times: Schedule to draw each row's times from, or the times ``(number,)`` of all rows or ``(K, number)``.
        number: Times per row, except the one of ``pure_noise``.
        shared: Images that share a row.
        stratified: Draw one time from each of ``number`` parts of the schedule.
        antithetic: Use each drawn pair with the negative noise too.
        pure_noise: Add a first pair at ``t = 1``; the images of a row share its network pass.
    """
    rollout = context.rollout
    owners, rows = pair_owners(rollout, shared)
    generators = image_generators(STREAM_PAIRS, rollout.seed, rollout.iteration, owners.tolist())
    if isinstance(times, Tensor):
        drawn = times.cpu().expand(len(owners), -1)
    else:
        drawn = torch.stack([times.draw(number, generator, stratified) for generator in generators])
    if pure_noise:
        drawn = torch.cat([torch.ones(len(owners), 1), drawn], dim=1)
    noise = unit_noise(generators, (drawn.shape[1], *rollout.latents.shape[1:]))
    if antithetic:  # each pair is followed by the one with the negative noise
        drawn, noise = drawn.repeat_interleave(2, dim=1), torch.stack([noise, -noise], dim=2).flatten(1, 2)
    pairs = Pairs(context.policy.path.snap(drawn), noise, rows, shared=pure_noise * (1 + antithetic))
    return pairs.to(rollout.latents.device)


def share_noisy_latents(context: PrepareContext, pairs: Pairs, all_ranks: Callable[[Tensor], Tensor]) -> Pairs:
    """Replace each group's noise with one noisy latent per pair, made from one of its images, and share its pass.

    Args:
        pairs: One row per group.
        all_ranks: Concatenates every rank's ``(B, ...)`` in rank order; needed where ranks split groups.
    """
    rollout, path, device = context.rollout, context.policy.path, context.rollout.latents.device
    owners, rows = pair_owners(rollout, "group")
    size, num_pairs = rollout.group_size, pairs.times.shape[1]
    generators = image_generators(STREAM_BASES, rollout.seed, rollout.iteration, owners.tolist())
    members = torch.stack([torch.randint(size, (num_pairs,), generator=generator) for generator in generators])
    image, pair = (owners[rows, None] * size + members[rows] == rollout.image_ids[:, None]).nonzero(as_tuple=True)
    bases = rollout.latents.new_zeros(len(owners), num_pairs, *rollout.latents.shape[1:])
    bases[rows[image].to(device), pair.to(device)] = rollout.latents[image.to(device)]
    if len(rollout) < len(owners) * size:  # the image that a noisy latent starts from is on one of the group's ranks
        everywhere, groups = all_ranks(bases), all_ranks(owners)
        bases = torch.stack([everywhere[groups == owner].sum(dim=0) for owner in owners]).to(device)
    noisy = path.interpolate(bases.flatten(0, 1), pairs.noise.flatten(0, 1), pairs.times.flatten())
    return replace(pairs, noise=noisy.unflatten(0, pairs.times.shape), shared=num_pairs)


def pair_owners(rollout: Rollout, shared: Sharing) -> tuple[Tensor, Tensor]:
    """Return the numbers of the groups or images with a row of pairs ``(K,)``, and each image's row ``(B,)``.

    The numbers are global, and 0 for the one row of all images.
    """
    if shared == "iteration":
        return torch.zeros(1, dtype=torch.int64), torch.zeros(len(rollout), dtype=torch.int64)
    if shared == "group":
        owners, rows = torch.unique(rollout.group_ids, return_inverse=True)
        return owners, rows
    return rollout.image_ids, torch.arange(len(rollout))


# --- one pass of the network ----------------------------------------------------------------------------------------


class PairPass:
    """A pass of the network on every pair of a micro-batch: ``M`` images, ``N`` pairs each.

    Attributes:
        prediction: The network's predictions ``(M, N, ...)``.
        times: ``t``, ``(M, N)``.

    Args:
        micro: On the policy's device.
        space: Space of the error.
        cap: Bound on the factor from the prediction's error to that space, where it diverges.
        guidance: Guidance scale of the network.
    """

    def __init__(
        self, policy: Policy, micro: Experience, space: Space, cap: float | None = None, guidance: float = 1.0
    ) -> None:
        assert micro.pairs is not None
        self.path, self.space, self.cap = policy.path, space, cap
        self.latents, self.pairs, self.times = micro.latents, micro.pairs, micro.pairs.times[micro.pairs.rows]
        self.prediction = _predictions(policy, micro, micro.pairs, guidance)

    @cached_property
    def scale(self) -> Tensor:
        """The factor from an error of the prediction to one in the space, ``(M, N, 1...)``."""
        return expand(self.path.error_scale(self.space, self.times, self.cap), self.prediction)

    @cached_property
    def error(self) -> Tensor:
        """The error ``estimate - truth`` in the space, up to its sign, ``(M, N, ...)``."""
        pairs, shared, t = self.pairs, self.pairs.shared, self.times.flatten()
        noise = pairs.noise[pairs.rows]
        if shared:
            a, b = (expand(value, noise) for value in self.path.coefficients(self.times[:, :shared]))
            made = (noise[:, :shared] - a * self.latents[:, None]) / b  # each image's noise to the same noisy latent
            noise = torch.cat([made, noise[:, shared:]], dim=1)
        x = self.latents.repeat_interleave(self.times.shape[1], dim=0)
        target = self.path.target(x, noise.flatten(0, 1), t).unflatten(0, self.times.shape)
        return self.scale * (self.prediction - target)

    def detach(self) -> "PairPass":
        """Return the pass without its graph."""
        other = copy.copy(self)
        other.prediction, other.error = self.prediction.detach(), self.error.detach()
        return other


def prediction(now: PairPass) -> Tensor:
    """Return the predictions ``(M, N, ...)``, for a copy to keep."""
    return now.prediction


def _predictions(policy: Policy, micro: Experience, pairs: Pairs, guidance: float) -> Tensor:
    """Return the network's predictions ``(M, N, ...)``; a pair that a row shares is passed once."""
    shared = pairs.shared
    own = pairs.times.shape[1] - shared
    x = micro.latents.repeat_interleave(own, dim=0)
    t, eps = pairs.times[:, shared:][pairs.rows].flatten(), pairs.noise[:, shared:][pairs.rows].flatten(0, 1)
    z, rows = policy.path.interpolate(x, eps, t), micro.rows.repeat_interleave(own)
    if shared:
        used, place = torch.unique(pairs.rows, return_inverse=True)
        row = micro.rows.new_zeros(len(used)).scatter(0, place, micro.rows)
        z = torch.cat([pairs.noise[used, :shared].flatten(0, 1), z])
        t = torch.cat([pairs.times[used, :shared].flatten(), t])
        rows = torch.cat([row.repeat_interleave(shared), rows])
    everything = policy(z, t, micro.conditioning.select(rows), guidance)
    once, each = everything.split([len(z) - len(x), len(x)])
    each = each.unflatten(0, (len(micro), own))
    return torch.cat([once.unflatten(0, (len(used), shared))[place], each], dim=1) if shared else each


# --- distances ------------------------------------------------------------------------------------------------------


def distance_to(now: PairPass, other: Tensor) -> Tensor:
    """Return ``m((v_theta - v_copy)^2)``, mean over the pairs, ``(M,)``."""
    return surrogate(mean_over_pixels((now.prediction - other).square(), 2))


def normalised_distance(now: PairPass, other: Tensor) -> Tensor:
    """Return ``m((s (v_theta - v_copy))^2) / sg(m(|e|))``, mean over the pairs, ``(M,)``.

    Both predictions start from the same noisy latent, so their errors differ by ``s (v_theta - v_copy)``. Divided by
    the absolute error, the distance has the unit of the self-normalised surrogate, so that one weight fits every time.

    Args:
        now: The policy's pass, with the error ``e`` in the space of the method's loss, and the factor ``s``.
        other: The copy's predictions ``(M, N, ...)``.
    """
    squared = mean_over_pixels((now.scale * (now.prediction - other)).square(), 2)
    return surrogate(squared / absolute_error(now.error))


def norm_excess(prediction: Tensor, other: Tensor) -> Tensor:
    """Return ``relu(|v_theta| - |v_ref|)`` of each pair; ``(B, N, ...) -> (B, N)``.

    Norms are root mean squares, so that a weight does not depend on the latents' size: our choice, as is the use for
    other predictions than velocities. They have a floor, since the gradient of a root of 0 is not finite. Source: the
    abstract of arXiv 2606.27771 (NormGuard) and third-party summaries; its weight and scaling were not read.
    """
    norm, start = (mean_over_pixels(v.square(), 2).clamp(min=1e-37).sqrt() for v in (prediction, other))
    return (norm - start).relu()


# --- the base of the methods ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class PairObjective(Objective):
    """Base of the methods that train on pairs (t, eps); holds their common options.

    Args:
        rollout: Sampling of images; any ODE solver. Null takes the method's default.
        anchor_weight: Weight of the pull to the anchor, :func:`normalised_distance`; 0 saves its passes.
        anchor_decay: ``anchor <- d anchor + (1 - d) weights`` after each iteration; null for no anchor.
        norm_weight: Weight of NormGuard (arXiv 2606.27771): the squared :func:`norm_excess` over the start's
            predictions; 0 saves the reference's passes, if the method has no other use for them.
        times: Train at the sampler's times, on a fixed grid, ``{grid: 10}``, which may have more times than the rollout
            has steps, or at times from the continuous schedule, ``uniform``.
        time_shift: Resolution shift of the continuous schedule.
        time_range: Lowest and highest time to train at, in [0, 1], 1 = pure noise; null for all.
        noisiest: Train only at this number of the noisiest times; null for all. On the continuous schedule
            they are the same share of it.
        antithetic: Draw half as many pairs, and use each with its noise and with the negative noise.
        replay: Also train on the previous iteration's images, with their advantages and new pairs. Their old policy is
            the policy at the start of this iteration. Updates and micro-batches then have twice as many images.
        widen_over: Iterations over which the noisiest times widen linearly to all of them; null keeps them fixed.
        training_guidance: Guidance scale of the policy during training; null is 1, or the rollout's scale if the
            network embeds it, as in FLUX.1-dev.
        reference_guidance: Guidance scale of the starting weights; null takes the training's.
    """

    needs_ode: ClassVar[bool] = True
    """True if SDEs are refused because the method is defined on samples of the ODE."""
    times_per: ClassVar[TimesPer] = "row"
    """What has one draw of times: a row of pairs, drawn with its noise, an image, a :data:`BLOCK` or an iteration."""
    repeats_times: ClassVar[bool] = True
    """False if all pairs of an image are at different times."""
    pairs_option: ClassVar[str] = "num_times"
    """Name of the option for the number of pairs per image."""
    kl_weight = 0.0  # an option of most methods
    share_passes = "none"  # an option of some
    stratify = True  # likewise

    rollout: RolloutSpec | None = None
    _: KW_ONLY
    anchor_weight: NonNegativeFloat = 0.0
    anchor_decay: HalfOpenUnitInterval | None = None
    norm_weight: NonNegativeFloat = 0.0
    times: Literal["sampler", "uniform"] | TimeGrid = "sampler"
    time_shift: Annotated[PositiveFloat, OnlyWith("times", "uniform")] = 1.0
    time_range: tuple[ClosedUnitInterval, ClosedUnitInterval] | None = None
    noisiest: Annotated[int, Range(1, 1000)] | None = None
    widen_over: Annotated[Count, OnlyWith("noisiest")] | None = None
    antithetic: bool = False
    replay: bool = False
    training_guidance: GuidanceScale | None = None
    reference_guidance: GuidanceScale | None = None

    def __post_init__(self) -> None:
        if self.time_range is not None:
            low, high = self.time_range
            if low >= high:
                raise ValueError(f"model.objective.time_range={[low, high]} is empty. Use one such as [0.02, 0.98].")
        if self.antithetic and self.num_pairs % 2:
            option = f"model.objective.{self.pairs_option}={self.num_pairs}"
            raise ValueError(f"{option} is odd, but antithetic=true uses each noise sample twice. Use an even number.")
        super().__post_init__()

    # --- what a method defines -------------------------------------------------------------------------------------

    @property
    def num_pairs(self) -> int:
        """Pairs per image; by default one at each time but one."""
        number = getattr(self, self.pairs_option)
        return (self.noisiest or self.num_times_in_all) - 1 if number is None else int(number)

    @property
    def needs_reference(self) -> bool:
        """True if a loss needs the predictions of the start's weights."""
        return self.kl_weight > 0 or self.norm_weight > 0

    @property
    def sharing(self) -> Sharing:
        """Images that share their pairs."""
        return "group" if self.times_per in ("row", "iteration") else "none"

    def draw(self, context: PrepareContext) -> Pairs:
        """Draw the pairs of an iteration."""
        pool, shares = self.time_pool(context.rollout), self.share_passes != "none"
        number = self.num_drawn - shares
        pairs = draw_pairs(
            context,
            pool if self.times_per == "row" else self.draw_times(context, pool, number),
            number,
            self.sharing,
            stratified=self.stratify,
            antithetic=self.antithetic,
            pure_noise=shares,
        )
        return share_noisy_latents(context, pairs, self.all_ranks) if self.share_passes == "group" else pairs

    def bounded(self, advantages: Tensor) -> Tensor:
        """Return the advantages as the loss uses them."""
        return advantages

    def kl(self, now: PairPass, kept: Mapping[str, Tensor]) -> Tensor | None:
        """Return the distance ``(M,)`` that ``kl_weight`` weighs, or ``None`` if :meth:`losses` contains it."""
        return distance_to(now, kept["reference"])

    def space_of(self, policy: Policy) -> tuple[Space, float | None]:
        """Return the space of the error and the bound on its factor: by default that of the network's prediction."""
        return policy.path.prediction, None

    # --- the driver's hooks ----------------------------------------------------------------------------------------

    def copies_needed(self) -> dict[str, Copy]:
        copies = {}
        if self.needs_reference:
            copies["reference"] = Copy({"reference": prediction})
        if self.anchor_weight > 0 and self.anchor_decay is not None:
            copies["anchor"] = Copy({"anchor": prediction}, decay=self.anchor_decay)
        return copies

    def make_experience(self, context: PrepareContext) -> Experience:
        return context.experience(self.draw(context), advantages=self.bounded(context.advantages))

    def forward(self, policy: Policy, micro: Experience, guidance: float) -> PairPass:
        return PairPass(policy, micro, *self.space_of(policy), guidance)

    def pull(self, losses: Tensor, metrics: Metrics, now: PairPass, kept: Mapping[str, Tensor]) -> Tensor:
        if self.kl_weight > 0 and (distance := self.kl(now, kept)) is not None:
            losses, metrics["kl"] = losses + self.kl_weight * distance, distance.detach()
        if "anchor" in kept:
            distance = normalised_distance(now, kept["anchor"])
            losses, metrics["anchor_distance"] = losses + self.anchor_weight * distance, distance.detach()
        if self.norm_weight > 0:
            excess = norm_excess(now.prediction, kept["reference"])
            losses = losses + self.norm_weight * surrogate(excess.square())
            metrics["norm_excess"] = surrogate(excess.detach())
        return losses

    def predictions_per_image(self, sizes: Sizes) -> float:
        shared = {"none": 0, "pure_noise": 1 + self.antithetic, "group": self.num_pairs}[self.share_passes]
        return shared * sizes.shared_passes + self.num_pairs - shared

    # --- times -----------------------------------------------------------------------------------------------------

    @property
    def num_times_in_all(self) -> int:
        """Number of the sampler's times, or of the grid's."""
        return self.times.grid if isinstance(self.times, TimeGrid) else self.spec.network_calls

    def time_pool(self, rollout: Rollout) -> TimePool:
        """Return the times that an iteration is trained at; without ``t = 1`` if its pass is shared."""
        # The noisiest times widen by a pure function of the iteration, so that resume is exact.
        progress = 0.0 if self.widen_over is None else min(rollout.iteration, self.widen_over) / self.widen_over
        if self.times == "uniform":
            pool = ContinuousTimes(self.time_shift).within(self.time_range)  # contains 1 with probability 0
            return pool if self.noisiest is None else pool.noisiest(self.noisiest / len(rollout.schedule), progress)
        schedule = self.times.times() if isinstance(self.times, TimeGrid) else rollout.schedule.cpu()
        times = SamplerTimes(schedule).within(self.time_range)
        times = times if self.share_passes == "none" else times.below_one()
        return times if self.noisiest is None else times.noisiest(self.noisiest, progress)

    def draw_times(self, context: PrepareContext, pool: TimePool, number: int) -> Tensor:
        """Draw times other than for each row of pairs: of every image ``(B, number)``, or ``(number,)`` of all."""
        rollout = context.rollout

        def drawn(*key: int) -> Tensor:
            generator = seeded_generator(rollout.seed, STREAM_TIMES, rollout.iteration, *key)
            return pool.draw(number, generator) if self.repeats_times else pool.pick(number, generator)

        if self.times_per == "iteration":
            return drawn()
        # Images are numbered over all ranks, so that the number of ranks does not matter.
        size = BLOCK if self.times_per == "block" else 1
        keys, rows = torch.unique(rollout.image_ids // size, return_inverse=True)
        return torch.stack([drawn(key) for key in keys.tolist()])[rows]

    @property
    def num_drawn(self) -> int:
        """Pairs per image to draw: half as many if each is used twice."""
        return self.num_pairs // 2 if self.antithetic else self.num_pairs

    # --- checks ----------------------------------------------------------------------------------------------------

    def check(self, sizes: Sizes) -> list[str]:
        errors, spec = super().check(sizes) + anchor_errors(self, self.anchor_weight, self.anchor_decay), self.spec
        if self.share_passes != "none":
            where = f"model.objective.share_passes={self.share_passes}"
            if self.time_range is not None and self.time_range[1] < 1:
                errors.append(f"{where} needs t = 1, but time_range={[*self.time_range]} excludes it.")
            if self.share_passes == "group" and sizes.splits_groups:
                errors.append(
                    f"{where} needs whole groups, but updates_per_iteration={sizes.updates_per_iteration} splits the "
                    f"{sizes.prompts_per_iteration} groups. Use a divisor, or data.split_updates=false."
                )
        shares = self.share_passes != "none"  # then t = 1 has a separate pair
        others = self.num_times_in_all - (shares and self.times != "uniform")
        most, number = min(self.noisiest or others, others), self.num_drawn - shares
        wanted = min(1, number) if self.repeats_times else number
        if self.num_drawn < 1 or wanted > most:
            errors.append(
                f"{type(self).__name__} trains each image at {wanted} of {most} times{' below 1' * shares}. Lower "
                "model.objective.num_times, or raise model.objective.noisiest and rollout.steps."
            )
        if self.needs_ode and spec.is_sde:
            errors.append(
                f"model.objective.rollout.solver={spec.solver} is an SDE, but {type(self).__name__} trains only on "
                f"final images and samples with an ODE. Use {spec.as_ode().solver}."
            )
        return errors

    def policy_errors(self, policy: Policy) -> list[str]:
        if self.share_passes == "pure_noise" and policy.path_kind != "flow":
            return [
                f"model.objective.share_passes={self.share_passes} needs a path that ends in pure noise, but that of "
                f"{type(policy).__name__} keeps some of the image. Set it to none."
            ]
        return super().policy_errors(policy)


def anchor_errors(method: Objective, weight: float, decay: float | None) -> list[str]:
    """Return why an anchor is only half set, or replaced by another copy of that name, in one line."""
    own = method.copies_needed().get("anchor")
    if own is not None and (own.keeps.keys(), own.decay, own.moves) != ({"anchor"}, decay, "iteration"):
        return [f"{type(method).__name__} defines a copy named anchor, the name of anchor_weight's. Rename it."]
    if (weight > 0) == (decay is not None):
        return []
    return [
        f"model.objective.anchor_weight={weight} and anchor_decay={decay} must be set together. Use values such as 1.0 "
        "and 0.3, or 0 and null."
    ]
