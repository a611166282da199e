"""Training on the gradient of a differentiable reward: FlowBP-Sparse, ReFL, DRaFT-K and DRaFT-LV."""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.noise import STREAM_ACTIVE, seeded_generator
from lit_vgrpo.core.ranges import Finite, NonNegativeFloat, OnlyWith, Range, checked
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.base import Objective, PrepareContext
from lit_vgrpo.objectives.score_gradient import active_steps, expanded, linearised, renoised, score_gradient
from lit_vgrpo.policies.base import Policy

Variant = Literal["flowbp", "refl", "draft_k", "draft_lv"]


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

    def policy_errors(self, policy: type[Policy]) -> list[str]:
        if not policy.decodes_with_gradient:
            return [f"model.objective=RewardGradient does not work on {policy.__name__}: its decode has no gradient."]
        return super().policy_errors(policy)

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        passes: float = self.copies_of_image if self.predicts else self.steps
        return {"update": sizes.uses_per_image * passes, **({"preview": passes} if self.predicts else {})}

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

    def prepare(self, context: PrepareContext) -> Experience:
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
        of_steps = (value.expand(shape).to(before.device) for value in (t, weight))
        experience = context.experience(extras=dict(zip(("before", "t", "weight"), (before, *of_steps), strict=True)))
        images = self._predicted(context, experience) if self.predicts else rollout.latents[:, None]
        owners = torch.arange(len(rollout)).repeat_interleave(images.shape[1])
        found = score_gradient(context, images.flatten(0, 1), owners, self.decode_crop, self.decode_half)
        scores, gradient = (values.unflatten(0, images.shape[:2]) for values in found)
        trained = scores < (math.inf if self.target is None else self.target)  # not where a reward failed
        losses = torch.where(trained, (self.target or 0.0) - scores, 0.0)
        experience.extras.update(
            score=scores, loss=losses, gradient=torch.where(expanded(trained, gradient), -gradient, 0.0)
        )
        return experience

    @torch.no_grad()
    def _predicted(self, context: PrepareContext, experience: Experience) -> Tensor:
        """Return the clean images that the network predicts at the trained steps, ``(B, K, C, h, w)``."""
        micros, before = experience.micro_batches(context.micro_batch_size), experience.extras["before"]
        with context.ledger.phase("preview"):
            return before + torch.cat([self._moves(context.policy, micro).to(before.device) for micro in micros])

    def _moves(self, policy: Policy, micro: Experience) -> Tensor:
        """Return the weighted velocities at a micro-batch's latents, from a single pass, ``(M, K, C, h, w)``."""
        micro = micro.to(policy.device)
        z, t, weight = (micro.extras[name] for name in ("before", "t", "weight"))
        rows = micro.rows.repeat_interleave(t.shape[1])
        velocities = self._velocity(policy, micro, z.flatten(0, 1), t.flatten(), rows)
        by_time = velocities.unflatten(0, t.shape)
        return by_time * expanded(weight, by_time)

    def _velocity(self, policy: Policy, micro: Experience, z: Tensor, t: Tensor, rows: Tensor) -> Tensor:
        """Return the guided velocities at ``z (N, C, h, w)``; carries the grad of the prompts' pass."""
        return policy(z, t, micro.conditioning.select(rows), self.guidance_in("training", policy), detach_negative=True)

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        micro = micro.to(policy.device)
        extras = micro.extras
        if self.variant == "draft_k":
            images = extras["before"]
            for t, weight in zip(extras["t"].unbind(1), extras["weight"].unbind(1), strict=True):
                velocity = self._velocity(policy, micro, images[:, 0], t, micro.rows)
                images = images + (expanded(weight, velocity) * velocity)[:, None]
        else:
            images = self._moves(policy, micro)  # without the part that carries no grad
        if self.variant == "flowbp":
            images = images.sum(dim=1, keepdim=True)
        losses = linearised(extras["loss"], extras["gradient"], images)
        length = extras["gradient"].flatten(1).norm(dim=1)
        return losses.mean(), {"trained_reward": extras["score"].mean(dim=1), "image_gradient": length}
