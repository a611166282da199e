"""Training on the gradient of a differentiable reward: FlowBP-Sparse, ReFL, DRaFT-K and DRaFT-LV."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.batches import in_batches
from lit_vgrpo.core.noise import (
    STREAM_ACTIVE,
    STREAM_CROPS,
    STREAM_RENOISED,
    image_generators,
    seeded_generator,
    unit_noise,
)
from lit_vgrpo.core.probability_paths import expand
from lit_vgrpo.core.ranges import Finite, NonNegativeFloat, OnlyWith, Range, checked
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import Experience, RolloutSpec, Steps
from lit_vgrpo.objectives.base import Metrics, Objective, PrepareContext
from lit_vgrpo.policies.base import Policy

Variant = Literal["flowbp", "refl", "draft_k", "draft_lv"]


def score_gradient(
    context: PrepareContext, latents: Tensor, images: Tensor, crop: float | None = None, halved: bool = False
) -> tuple[Tensor, Tensor]:
    """Decode latents, score them, and return the scores ``(N,)`` and their gradient ``(N, C, h, w)``, float32.

    The VAE's batches are decoded, scored and differentiated one by one, so that only one of them has a graph. Their
    size is fixed: a gradient does not depend on the other images.

    Args:
        context: Its policy decodes, its reward scores.
        latents: Clean latents ``(N, C, h, w)``.
        images: The images of the rollout whose prompts they belong to, ``(N,)``, int64.
        crop: Decode only a window with this share of each side, at a random place of each image.
        halved: Decode at half the resolution.
    """
    if context.is_trial:  # measures the network
        return latents.new_zeros(len(latents)), torch.zeros_like(latents)
    reward, policy, rollout = context.reward, context.policy, context.rollout
    if reward is None:
        raise RuntimeError(
            "This method needs the reward's gradient. Give PrepareContext reward, prompts and data_rows."
        )
    whole, sides = latents.shape[-2:], window(latents.shape[-2:], crop)
    generators = image_generators(STREAM_CROPS, rollout.seed, rollout.iteration, rollout.image_ids.tolist())
    room = [1 + most - side for most, side in zip(whole, sides, strict=True)]
    places = [[int(torch.randint(number, (), generator=drawn)) for number in room] for drawn in generators]

    @torch.enable_grad()
    def scores_and_gradient(part: Tensor, numbers: Tensor) -> Tensor:
        leaf, chosen = part.detach().to(policy.device).float().requires_grad_(), numbers.tolist()
        corners = [places[i] for i in chosen]
        seen = [z[..., y : y + sides[0], x : x + sides[1]] for z, (y, x) in zip(leaf, corners, strict=True)]
        prompts, rows = [context.prompts[i] for i in chosen], [dict(context.data_rows[i]) for i in chosen]
        scores = reward.with_gradient(policy.decode_with_gradient(torch.stack(seen), halved), prompts, rows)
        # None of the rewards may apply to these images.
        gradient = torch.autograd.grad(scores.sum(), leaf)[0] if scores.requires_grad else torch.zeros_like(leaf)
        return torch.cat([scores.detach()[:, None], gradient.flatten(1)], dim=1).to(latents.device)

    both = in_batches(scores_and_gradient, policy.decode_batch_size, latents, images.cpu())
    context.ledger.decoded += len(latents) * context.ledger.ranks
    return both[:, 0].clone(), both[:, 1:].reshape(latents.shape)


def window(sides: Sequence[int], crop: float | None) -> list[int]:
    """Return the sides of the decoded window of latents; ``crop`` is its share of each side, ``None`` for all."""
    return [side if crop is None else max(1, round(crop * side)) for side in sides]


def active_steps(steps: int, number: int, late_bias: float, generator: torch.Generator) -> list[int]:
    """Draw distinct steps of a rollout with probabilities proportional to ``(i + 1)^late_bias``, ascending."""
    weights = torch.arange(1, steps + 1, dtype=torch.float64) ** late_bias
    return sorted(torch.multinomial(weights, number, generator=generator).tolist())


def renoised(context: PrepareContext, number: int, t: Tensor) -> Tensor:
    """Return the rollout's images with new noise at a time ``t (1,)``, ``(B, number, C, h, w)``."""
    rollout, device = context.rollout, context.rollout.latents.device
    generators = image_generators(STREAM_RENOISED, rollout.seed, rollout.iteration, rollout.image_ids.tolist())
    noise = unit_noise(generators, (number, *rollout.latents.shape[1:])).to(device)
    copies = rollout.latents.repeat_interleave(number, dim=0)
    return context.policy.path.interpolate(copies, noise.flatten(0, 1), t.expand(len(copies)).to(device)).view_as(noise)


@checked
@dataclass(eq=False)
class RewardGradient(Objective):
    """Maximises a differentiable reward by its gradient through the VAE and a few of the sampler's Euler steps.

    The reward's gradient is taken once, at the rollout's images and before the updates' passes, so the graphs of the
    VAE and of the network are never in memory together. With one update per iteration this is the gradient of
    ``max(0, target - R)``, or of ``-R``. That of ``flowbp``, which holds the images fixed, is also exact in later
    updates. All images of an iteration share their steps, and all are trained on: there are no advantages. With
    guidance, the pass of the negative prompt keeps no graph.

    Args:
        rollout: Sampling of images, by Euler's method without noise.
        variant: ``flowbp`` runs some steps again at the rollout's latents, each with a direct path to the image;
            ``refl`` scores the clean image predicted at one late step; ``draft_k`` runs the last steps again in a
            chain; ``draft_lv`` runs the last step again, also on copies of the image with new noise.
        num_steps: Steps of ``flowbp`` (null for 4) or ``draft_k`` (null for 1), or the last steps that ``refl`` chooses
            from (null for a quarter of them).
        num_noises: Copies with new noise.
        late_bias: Step ``i`` is chosen with a probability proportional to ``(i + 1)^late_bias``.
        rescale: 1 scales the gradient by the time of all steps over that of the chosen ones; 0 does not scale it.
        target: Images with at least this reward are not trained on; null for no limit.
        decode_crop: Decode and score only a random window with this share of each side, to save memory; null for the
            whole image.
        decode_half: Decode and score at half the resolution, from latents averaged over 2 x 2, to save memory.

    Source:
        FlowBP-Sparse: arXiv 2606.11075 and github.com/RuoyuWang-2077/FlowBP (Apache-2.0), sd35/flowbp_sparse.py; its
        sd35/refl.py and draft_lv.py for the others. ReFL: arXiv 2304.05977 and github.com/THUDM/ImageReward, ReFL.py.
        DRaFT: abstract of arXiv 2309.17400.
    """

    uses_advantages: ClassVar[bool] = False
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
    decode_half: bool = False

    @property
    def steps(self) -> int:
        """Steps with gradient, or those that one is chosen from."""
        by_default = {"flowbp": 4, "refl": max(1, self.spec.steps // 4), "draft_k": 1, "draft_lv": 1}
        return self.num_steps or by_default[self.variant]

    @property
    def copies_of_image(self) -> int:
        """Images scored per image of the rollout."""
        return 1 + self.num_noises if self.variant == "draft_lv" else 1

    @property
    def predicts(self) -> bool:
        """True if predicted clean images are scored, not those of the rollout."""
        return self.variant in ("refl", "draft_lv")

    # --- checks and cost -------------------------------------------------------------------------------------------

    def check(self, sizes: Sizes) -> list[str]:
        errors, spec, where = super().check(sizes), self.spec, "model.objective"
        if spec.solver != "euler":
            errors += [f"{where}.rollout.solver={spec.solver}: RewardGradient differentiates Euler's steps. Use euler."]
        if self.steps > spec.steps:
            errors += [f"{where}.num_steps={self.steps} exceeds rollout.steps={spec.steps}. Use at most {spec.steps}."]
        if self.variant == "draft_lv" and self.num_steps is not None:
            errors += [f"{where}.num_steps has no effect with variant=draft_lv. Leave it out, or set num_noises."]
        return errors

    def predictions_per_image(self, sizes: Sizes) -> float:
        return self.copies_of_image if self.predicts else self.steps

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        passes = super().prediction_passes(sizes)
        return passes | {"preview": self.predictions_per_image(sizes)} if self.predicts else passes

    def decodes_per_image(self) -> float:
        return self.copies_of_image

    # --- one iteration ---------------------------------------------------------------------------------------------

    def recorded_steps(self, iteration: int) -> Sequence[int]:
        """Return the steps with gradient (the first of a chain): a function of the iteration and the run's seed."""
        steps, generator = self.spec.steps, seeded_generator(self.seed, STREAM_ACTIVE, iteration)
        if self.variant == "flowbp":
            return active_steps(steps, self.steps, self.late_bias, generator)
        if self.variant == "refl":
            return [steps - 1 - int(torch.randint(self.steps, (), generator=generator))]
        return [steps - self.steps]

    def make_experience(self, context: PrepareContext) -> Experience:
        rollout, chain = context.rollout, context.rollout.trajectory
        assert chain is not None
        times, first = torch.cat([rollout.schedule.cpu(), torch.zeros(1)]), self.recorded_steps(rollout.iteration)
        steps = torch.arange(first[0], len(times) - 1) if self.variant == "draft_k" else torch.tensor(first)
        before, t = chain.states, times[steps]
        weight = -t if self.predicts else times[steps + 1] - t  # of each velocity in the image
        if self.variant == "flowbp":
            weight = weight * (1 + self.rescale * (times[0] / -weight.sum() - 1))
        if self.variant == "draft_lv":  # the copies are made at a time that the network sees unchanged
            t = torch.cat([t, context.policy.path.snap(t).expand(self.num_noises)])
            before, weight = torch.cat([before, renoised(context, self.num_noises, t[1:2])], dim=1), -t
        shape = len(rollout), max(len(t), before.shape[1])
        t, weight = (value.expand(shape).to(before.device) for value in (t, weight))
        experience = context.experience(steps=Steps(before, t, weight))
        images = self._predicted(context, experience) if self.predicts else rollout.latents[:, None]
        owners = torch.arange(len(rollout)).repeat_interleave(images.shape[1])
        scored = score_gradient(context, images.flatten(0, 1), owners, self.decode_crop, self.decode_half)
        scores, gradient = (values.unflatten(0, images.shape[:2]) for values in scored)
        # NaN, where a reward failed or none applies, is not trained on.
        trained = scores < (math.inf if self.target is None else self.target)
        losses = torch.where(trained, (self.target or 0.0) - scores, 0.0)
        gradient = torch.where(expand(trained, gradient), -gradient, 0.0)
        experience.kept.update(score=scores, loss=losses, gradient=gradient)
        return experience

    @torch.no_grad()
    def _predicted(self, context: PrepareContext, experience: Experience) -> Tensor:
        """Return the clean images that the network predicts at the trained steps, ``(B, K, C, h, w)``."""
        policy, guidance = context.policy, self.guidance_in("training", context.policy)
        assert experience.steps is not None
        before, micros = experience.steps.before, experience.micro_batches(context.micro_batch_size)
        with context.ledger.phase("preview"):
            moves = [self.forward(policy, micro.to(policy.device), guidance).to(before.device) for micro in micros]
        return before + torch.cat(moves)

    def forward(self, policy: Policy, micro: Experience, guidance: float) -> Tensor:
        """Return the images of the trained steps, up to a part without grad, or a chain's end; ``(M, K, C, h, w)``."""
        assert micro.steps is not None
        steps, rows = micro.steps, micro.rows
        if self.variant == "draft_k":
            images = steps.before[:, 0]
            for t, weight in zip(steps.t.unbind(1), steps.weight.unbind(1), strict=True):
                velocity = policy(images, t, micro.conditioning.select(rows), guidance, detach_negative=True)
                images = images + expand(weight, velocity) * velocity
            return images[:, None]
        cond = micro.conditioning.select(rows.repeat_interleave(steps.t.shape[1]))
        velocity = policy(steps.before.flatten(0, 1), steps.t.flatten(), cond, guidance, detach_negative=True)
        velocity = velocity.unflatten(0, steps.t.shape)
        return velocity * expand(steps.weight, velocity)

    def losses(self, now: Tensor, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        images = now.sum(dim=1, keepdim=True) if self.variant == "flowbp" else now
        gradient = micro.kept["gradient"]
        # l + <dl/dx, x - sg(x)> has the value and the gradient of the loss where they were taken.
        losses = micro.kept["loss"] + (gradient * (images - images.detach())).flatten(2).sum(2)
        metrics = {"trained_reward": micro.kept["score"].mean(dim=1), "image_gradient": gradient.flatten(1).norm(dim=1)}
        return losses.mean(dim=1), metrics
