"""Training on the gradient of a differentiable reward: FlowBP-Sparse, ReFL, DRaFT-K and DRaFT-LV."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.noise import STREAM_ACTIVE, STREAM_RENOISED, image_generators, seeded_generator, unit_noise
from lit_vgrpo.core.ranges import Finite, NonNegativeFloat, OnlyWith, Range
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.base import Objective, PrepareContext
from lit_vgrpo.objectives.score_gradient import score_gradient
from lit_vgrpo.policies.base import Policy

Variant = Literal["flowbp", "refl", "draft_k", "draft_lv"]


def active_steps(steps: int, number: int, late_bias: float, generator: torch.Generator) -> list[int]:
    """Draw different steps of a rollout with probabilities in proportion to ``(i + 1)^late_bias``, ascending."""
    weights = torch.arange(1, steps + 1, dtype=torch.float64) ** late_bias
    return sorted(torch.multinomial(weights, number, generator=generator).tolist())


def linearised(losses: Tensor, gradient: Tensor, images: Tensor) -> Tensor:
    """Return ``l + <dl/dx, x - sg(x)>``, which has the value and the gradient of the loss where they were taken.

    Args:
        losses: ``(M, N)``.
        gradient: Their gradient with respect to the images, ``(M, N, C, h, w)``.
        images: ``(M, N, C, h, w)``, up to a constant; carries grad.
    """
    return losses + (gradient * (images - images.detach())).flatten(2).sum(2)


@dataclass(eq=False)
class RewardGradient(Objective):
    """Maximises a differentiable reward by its gradient through the VAE and a few of the sampler's Euler steps.

    The reward's gradient is taken at the rollout's images, once per iteration and before the network's passes, so both
    are never in memory together. With one update per iteration this is the gradient of ``max(0, target - R)`` or
    ``-R``; FlowBP's, which holds the images fixed, is exact in later updates too. Steps are the same for all images of
    an iteration. The pass of guidance without prompt keeps no graph. There are no advantages: every image is trained on.

    Args:
        rollout: Sampling of images, by Euler's method without noise.
        variant: ``flowbp`` runs some steps again at the rollout's latents, and gives each a direct path to the image;
            ``refl`` scores the clean image predicted at one late step; ``draft_k`` runs the last steps again in a
            chain; ``draft_lv`` runs the last step again, on its latents and on copies of the image with new noise.
        num_steps: Steps with gradient of ``flowbp`` (null for 4) and ``draft_k`` (null for 1), or the last steps that
            ``refl`` chooses from (null for a quarter of them).
        num_noises: Copies with new noise of ``draft_lv``.
        late_bias: Steps of ``flowbp`` are drawn with probabilities in proportion to ``(i + 1)^late_bias``.
        rescale: With ``flowbp``, 1 scales the gradient by the time of all steps over that of the chosen, 0 does not.
        target: Reward from which on an image is not trained; null for none.
        decode_crop: Decode and score only a random window with this share of each side, for less memory; null for
            the whole image.

    Source:
        FlowBP-Sparse: arXiv 2606.11075 and its code (github.com/RuoyuWang-2077/FlowBP, Apache-2.0: sd35/flowbp_sparse.py,
        refl.py, draft_lv.py and the configurations). ReFL: arXiv 2304.05977, github.com/THUDM/ImageReward, ReFL.py.
        DRaFT-K and DRaFT-LV: abstract of arXiv 2309.17400.
    """

    takes_reward_gradient: ClassVar[bool] = True
    path_kinds: ClassVar[tuple[str, ...]] = ("flow",)
    trains_on_sampling_steps: ClassVar[bool] = True
    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("euler", steps=25)

    rollout: RolloutSpec | None = None
    variant: Variant = "flowbp"
    _: KW_ONLY
    num_steps: Annotated[int, Range(1, 1000)] | None = None
    num_noises: Annotated[int, Range(1, 1000), OnlyWith("variant", "draft_lv")] = 2
    late_bias: Annotated[NonNegativeFloat, OnlyWith("variant", "flowbp")] = 1.0
    rescale: Annotated[NonNegativeFloat, OnlyWith("variant", "flowbp")] = 0.5
    target: Finite | None = None
    decode_crop: Annotated[float, Range(above=0, most=1)] | None = None

    @property
    def steps(self) -> int:
        """``K``: steps with gradient, or those that one is chosen from."""
        by_default = {"flowbp": 4, "refl": max(1, self.spec.steps // 4), "draft_k": 1, "draft_lv": 1}
        return self.num_steps or by_default[self.variant]

    @property
    def copies_of_image(self) -> int:
        """Images that are scored for each of the rollout's."""
        return 1 + self.num_noises if self.variant == "draft_lv" else 1

    # --- checks and cost -------------------------------------------------------------------------------------------

    def check(self, sizes: Sizes) -> list[str]:
        errors, spec, where = super().check(sizes), self.spec, "model.objective"
        if spec.solver != "euler":
            errors.append(
                f"{where}.rollout.solver={spec.solver}: RewardGradient differentiates Euler's steps. Use euler."
            )
        if self.steps > spec.steps:
            errors.append(
                f"{where}.num_steps={self.steps} exceeds {where}.rollout.steps={spec.steps}. Use at most {spec.steps}."
            )
        if self.variant == "draft_lv" and self.num_steps is not None:
            errors.append(f"{where}.num_steps has no effect with variant=draft_lv. Leave it out, or set num_noises.")
        return errors

    def policy_errors(self, policy: type[Policy]) -> list[str]:
        if not policy.decodes_with_gradient:
            return [f"model.objective=RewardGradient does not work on {policy.__name__}: its decode has no gradient."]
        return super().policy_errors(policy)

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        trained = self.steps if self.variant in ("flowbp", "draft_k") else self.copies_of_image
        previews = {"refl": 1, "draft_lv": self.num_noises}.get(self.variant, 0)
        passes: dict[str, float] = {"update": sizes.uses_per_image * trained}
        return passes | ({"preview": previews} if previews else {})

    def decodes_per_image(self) -> float:
        return self.copies_of_image

    # --- one iteration ---------------------------------------------------------------------------------------------

    def recorded_steps(self, iteration: int) -> Sequence[int]:
        """Return the steps with gradient: a pure function of the iteration and the run's seed.

        Of ``draft_k`` only the first starts at a latent of the rollout.
        """
        steps, generator = self.spec.steps, seeded_generator(self.seed, STREAM_ACTIVE, iteration)
        if self.variant == "flowbp":
            return active_steps(steps, self.steps, self.late_bias, generator)
        if self.variant == "refl":
            return [steps - 1 - int(torch.randint(self.steps, (), generator=generator))]
        return [steps - self.steps]

    def prepare(self, context: PrepareContext) -> Experience:
        rollout, chain = context.rollout, context.rollout.trajectory
        assert chain is not None
        times, first = torch.cat([rollout.schedule.cpu(), torch.zeros(1)]), self.recorded_steps(rollout.iteration)
        steps = torch.arange(first[0], len(times) - 1) if self.variant == "draft_k" else torch.tensor(first)
        before, t = chain.states, times[steps]
        weights = times[steps + 1] - t  # of each velocity in the image
        if self.variant == "flowbp":
            weights = weights * (1 + self.rescale * (times[0] / -weights.sum() - 1))
        elif self.variant == "refl":
            weights = -t
        elif self.variant == "draft_lv":
            before = torch.cat([before, self._noised(context, t)], dim=1)
            t, weights = t.repeat(self.copies_of_image), weights.repeat(self.copies_of_image)
        of_steps = {"t": t, "weight": weights}
        extras = {name: value.expand(len(rollout), -1).to(before.device) for name, value in of_steps.items()}
        experience = context.experience(extras={"before": before, **extras})
        images = self._scored(context, experience)
        owners = torch.arange(len(rollout)).repeat_interleave(images.shape[1])
        found = score_gradient(context, images.flatten(0, 1), owners, self.decode_crop)
        scores, gradient = (values.unflatten(0, images.shape[:2]) for values in found)
        losses = -scores
        if self.target is not None:
            losses = (self.target - scores).relu()
            gradient = gradient * (scores < self.target)[:, :, None, None, None]
        experience.extras.update(score=scores, loss=losses, gradient=-gradient)
        return experience

    def _noised(self, context: PrepareContext, t: Tensor) -> Tensor:
        """Return the images with new noise at the last step's time ``t (1,)``, ``(B, num_noises, C, h, w)``."""
        rollout, shape = context.rollout, (self.num_noises, *context.rollout.latents.shape[1:])
        generators = image_generators(STREAM_RENOISED, rollout.seed, rollout.iteration, rollout.image_ids.tolist())
        noise = unit_noise(generators, shape).to(rollout.latents.device).flatten(0, 1)
        copies = rollout.latents.repeat_interleave(self.num_noises, dim=0)
        noisy = context.policy.path.interpolate(copies, noise, t.expand(len(copies)).to(copies.device))
        return noisy.unflatten(0, (len(rollout), self.num_noises))

    @torch.no_grad()
    def _scored(self, context: PrepareContext, experience: Experience) -> Tensor:
        """Return the images at which the reward's gradient is taken, ``(B, N, C, h, w)``."""
        known = experience.latents[:, None]
        if self.variant in ("flowbp", "draft_k"):
            return known
        start = int(self.variant == "draft_lv")  # the first of these is known
        unknown = replace(experience, extras={name: value[:, start:] for name, value in experience.extras.items()})
        micros = unknown.micro_batches(context.micro_batch_size)
        with context.ledger.phase("preview"):
            moves = torch.cat([self._moves(context.policy, micro) for micro in micros]).to(known.device)
        images = unknown.extras["before"] + moves
        return torch.cat([known, images], dim=1) if start else images

    def _moves(self, policy: Policy, micro: Experience) -> Tensor:
        """Return the weighted velocities at a micro-batch's latents, from a single pass, ``(M, K, C, h, w)``."""
        shape, rows = micro.extras["t"].shape, micro.rows.repeat_interleave(micro.extras["t"].shape[1])
        z, t = (micro.extras[name].flatten(0, 1) for name in ("before", "t"))
        return self._velocity(policy, micro, z, t, rows).unflatten(0, shape) * expanded(micro.extras["weight"])

    def _velocity(self, policy: Policy, micro: Experience, z: Tensor, t: Tensor, rows: Tensor) -> Tensor:
        return policy(z, t, micro.conditioning.select(rows), self.guidance_in("training", policy), detach_negative=True)

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        micro = micro.to(policy.device)
        extras = micro.extras
        if self.variant == "draft_k":
            images = extras["before"]
            for t, weight in zip(extras["t"].unbind(1), extras["weight"].unbind(1), strict=True):
                velocity = self._velocity(policy, micro, images[:, 0], t, micro.rows)
                images = images + (expanded(weight) * velocity)[:, None]
        else:
            images = self._moves(policy, micro)  # without the part that carries no grad
        if self.variant == "flowbp":
            images = images.sum(dim=1, keepdim=True)
        losses = linearised(extras["loss"], extras["gradient"], images)
        length = extras["gradient"].flatten(1).norm(dim=1)
        return losses.mean(), {"trained_reward": extras["score"].mean(dim=1), "image_gradient": length}


def expanded(values: Tensor) -> Tensor:
    """Return values ``(...)`` with the dimensions of latents, ``(..., 1, 1, 1)``."""
    return values[..., None, None, None]
