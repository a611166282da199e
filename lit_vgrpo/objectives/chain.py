"""Base of the methods that train on the sampling chain: a clipped ratio for every step with noise."""

from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import clamped
from lit_vgrpo.core.noise import STREAM_STEPS, seeded_generator
from lit_vgrpo.core.ranges import GuidanceScale, HalfOpenUnitInterval, NonNegativeFloat, Range
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.solvers import FLOW_SDES, VP_SDES, Transition, log_prob, transition
from lit_vgrpo.core.surrogate import clipped_surrogate, mean_over_pixels, ratio_metrics
from lit_vgrpo.core.types import Experience, Rollout, RolloutSpec
from lit_vgrpo.objectives.base import Objective, PrepareContext
from lit_vgrpo.objectives.pairs import old_values
from lit_vgrpo.policies.base import Policy


def step_kl(mean: Tensor, reference_mean: Tensor, diffusion: Tensor) -> Tensor:
    """Return ``m((mean - mean_ref)^2) / (2 sigma^2)`` per step, without its ``h``; ``(B, K, ...) -> (B, K)``.

    Source:
        arXiv 2505.05470.
    """
    return mean_over_pixels((mean - reference_mean).square() / (2 * diffusion.square()), 2)


@dataclass(eq=False)
class ChainObjective(Objective):
    """Base of the methods whose actions are the SDE steps of a rollout; holds their common options.

    An experience's ``extras`` hold for each image its ``K`` trained steps: ``before`` and ``after (B, K, C, h, w)``,
    ``t``, ``t_next``, ``second_time`` and ``log_prob (B, K)``, and if needed ``old_mean``, ``reference_mean``,
    ``anchor_mean`` and the image's ``weight (B,)``.
    The old log-probabilities are those of the rollout, so there are no extra passes for them by default.

    Args:
        rollout: Sampling of images; an SDE of the policy's path. Null takes the method's default.
        anchor_weight: Weight of the pull to the anchor, :func:`step_kl` to its means of the trained steps; 0 saves its
            passes.
        anchor_decay: ``anchor <- d anchor + (1 - d) weights`` after each iteration; null for no anchor.
        clip: Half-width of the ratio's trust region; null for none.
        advantage_clip: Bound on the advantages; null for none.
        drop_zero_advantages: Leave images without advantage, such as those of a group without spread, out of the loss.
            The loss is then the mean over the iteration's other images. If off, the KL and the anchor act on them too.
            Their passes are not saved.
        kl_weight: Weight of the KL of each step to the starting weights; 0 or null switches it and its passes off.
        training_guidance: Guidance scale of the policy during training; null takes the rollout's. With any other scale
            the old log-probabilities are recomputed, as with ``recompute_old``.
        reference_guidance: Guidance scale of the starting weights; null takes the training's.
        recompute_old: Recompute the old log-probabilities in the training's batches. In 16-bit precision those of the
            rollout's batches round differently, so the ratio is not exactly 1 before the update. Images that only an
            iteration's first update trains on need no separate passes for it.
    """

    path_kinds: ClassVar[tuple[str, ...]] = ("flow",)
    trains_on_sampling_steps: ClassVar[bool] = True

    rollout: RolloutSpec | None = None
    _: KW_ONLY
    anchor_weight: NonNegativeFloat = 0.0
    anchor_decay: HalfOpenUnitInterval | None = None
    clip: Annotated[float, Range(above=0, below=1)] | None = 1e-4
    advantage_clip: Annotated[float, Range(above=0)] | None = 5.0
    drop_zero_advantages: bool = False
    kl_weight: NonNegativeFloat | None = 0.0
    training_guidance: GuidanceScale | None = None
    reference_guidance: GuidanceScale | None = None
    recompute_old: bool = False

    # --- trained steps---------------------------------------------------------------------------------------------

    @property
    def window(self) -> tuple[str, int] | None:
        """Name and value of the option with the window's number of steps, for a method that places the window."""
        return None

    @property
    def window_range(self) -> tuple[int, int]:
        """Steps ``[first, stop)`` that may contain the window: all but the last, which has far less noise."""
        return 0, self.spec.steps - 1

    def window_start(self, iteration: int) -> int:
        """First step of the window: a pure function of the iteration and the run's seed."""
        return 0

    @property
    def window_starts(self) -> range:
        """Steps at which the window may start."""
        assert self.window is not None
        first, stop = self.window_range
        return range(first, stop - self.window[1] + 1)

    def drawn_start(self, iteration: int) -> int:
        """Draw the window's first step from the run's seed and the iteration."""
        starts, generator = self.window_starts, seeded_generator(self.seed, STREAM_STEPS, iteration)
        return starts[int(torch.randint(len(starts), (), generator=generator))]

    def rollout_spec(self, iteration: int) -> RolloutSpec:
        if self.window is None or self.chain_errors():
            return self.spec
        start = self.window_start(iteration)
        return replace(self.spec, window=(start, start + self.window[1]))

    def choose_steps(self, rollout: Rollout) -> Tensor | None:
        """Positions ``(B, K)`` of the trained steps among the rollout's SDE steps; ``None`` trains on all of them."""
        return None

    def num_trained_steps(self, spec: RolloutSpec) -> int:
        """``K``: trained steps per image."""
        return len(spec.sde_steps)

    # --- checks and cost -------------------------------------------------------------------------------------------

    def chain_errors(self) -> list[str]:
        """Return the reasons that this rollout cannot be trained on, one line each."""
        spec, name, where = self.spec, type(self).__name__, "model.objective.rollout"
        if not spec.is_sde:
            known = " or ".join(FLOW_SDES if "flow" in self.path_kinds else VP_SDES)
            return [
                f"{where}.solver={spec.solver} is an ODE: its steps have no likelihood for {name} to train on. "
                f"Use {known}."
            ]
        errors, last = [], spec.sde_steps.stop if self.window is None else max(self.window[1], self.window_range[1])
        if spec.noise_level == 0 or (spec.solver == "cps" and (spec.noise_level or 0) > 1):
            errors.append(
                f"{where}.noise_level={spec.noise_level} gives {spec.solver} no likelihood. "
                "Use a number above 0 and at most 1, or null."
            )
        if self.window is not None and spec.window is not None:
            errors.append(f"{where}.window is set by {name} itself. Leave it out and set {self.window[0]}.")
        elif last > spec.steps - 1:
            errors.append(
                f"{name} would train on the last of {where}.steps={spec.steps}, whose noise is far smaller than the "
                f"others'. Train on at most {spec.steps - 1} of them, or use more steps."
            )
        return errors

    def check(self, sizes: Sizes) -> list[str]:
        return self.chain_errors() or super().check(sizes)

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        steps = self.num_trained_steps(self.rollout_spec(0))
        passes: dict[str, float] = {"update": steps * sizes.uses_per_image}
        if self._recomputes_old and sizes.updates_per_iteration > 1:
            passes["old"] = steps * sizes.later_share
        return passes | self.pull_passes(steps)

    @property
    def _recomputes_old(self) -> bool:
        """True if the rollout's log-probabilities are not used, such as those of another guidance."""
        return self.recompute_old or self.guidance_in("training", None) != self.spec.guidance

    # --- one iteration ---------------------------------------------------------------------------------------------

    def prepare(self, context: PrepareContext) -> Experience:
        advantages = clamped(context.advantages, self.advantage_clip)
        experience = context.experience(extras=self._chosen(context.rollout), advantages=advantages)
        if self.drop_zero_advantages:
            kept = (experience.advantages != 0).float()
            share = self.all_ranks(kept).mean().clamp(min=1e-9)  # an iteration without any takes no step
            experience.extras["weight"] = kept / share.to(kept.device)
        if self._recomputes_old:
            self._store_old(context, experience)
        if self.kl_weight:
            experience.extras["reference_mean"] = self._means_of(context, experience, "reference")
        if self.anchor is not None:
            experience.extras["anchor_mean"] = self._means_of(context, experience, "anchor")
        return experience

    def _means_of(self, context: PrepareContext, experience: Experience, name: str) -> Tensor:
        """Return the means of the trained steps ``(B, K, ...)`` under the weights of ``copies[name]``."""
        policy = context.policy
        guidance = self.guidance_in("reference" if name == "reference" else "training", policy)
        with self.with_copy(policy, name, context.ledger):
            parts = experience.micro_batches(context.micro_batch_size)
            return torch.cat([self._transition(policy, micro, guidance).mean for micro in parts])

    def _store_old(self, context: PrepareContext, experience: Experience) -> None:
        """Recompute the rollout's steps in the batches of training, so that the ratio is 1 before any update.

        The first update has the old policy's weights, so its steps are the old ones and need no passes.
        """
        policy, extras = context.policy, experience.extras
        names = [name for name in ("log_prob", "old_mean") if name in extras]
        if context.updates == 1:
            for name in names:
                del extras[name]
            return
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        with context.ledger.phase("old"), torch.no_grad():
            for micro in context.later_of(experience).micro_batches(context.micro_batch_size):
                step = self._transition(policy, micro, self.guidance_in("training", policy))
                values = {"log_prob": self._log_prob(micro, step), "old_mean": step.mean}
                for name in names:
                    found[name].append(values[name])
        extras |= {name: context.placed(torch.cat(values)) for name, values in found.items()}

    def _chosen(self, rollout: Rollout) -> dict[str, Tensor]:
        """Return the trained steps of every image, by name; views of the trajectory if all of it is trained."""
        chain = rollout.trajectory
        assert chain is not None
        images, steps = chain.log_probs.shape
        tensors = {
            "before": chain.states[:, :-1],
            "after": chain.states[:, 1:],
            "log_prob": chain.log_probs,
            "t": chain.times[:-1].expand(images, steps),
            "t_next": chain.times[1:].expand(images, steps),
            "second_time": chain.log_probs.new_full((1, 1), chain.second_time).expand(images, steps),
        }
        if chain.means is not None:
            tensors["old_mean"] = chain.means
        chosen = self.choose_steps(rollout)
        if chosen is None:
            return tensors
        chosen = chosen.to(chain.states.device)
        image = torch.arange(images, device=chosen.device)[:, None]
        return {name: values[image, chosen] for name, values in tensors.items()}

    def _transition(self, policy: Policy, micro: Experience, guidance: float) -> Transition:
        """Return the trained steps' distributions ``(M, K, ...)`` under the current weights, from a single pass."""
        home, micro = micro.latents.device, micro.to(policy.device)
        shape = micro.extras["t"].shape
        z, t, t_next, second = (micro.extras[n].flatten(0, 1) for n in ("before", "t", "t_next", "second_time"))
        cond = micro.conditioning.select(micro.rows.repeat_interleave(shape[1]))
        prediction = policy(z, t, cond, guidance)
        spec = self.spec
        step = transition(spec.solver, policy.path, prediction, z, t, t_next, spec.noise_level, second)
        return Transition(*(value.unflatten(0, shape).to(home) for value in (step.mean, step.std, step.diffusion)))

    def log_ratio(self, micro: Experience, step: Transition) -> Tensor:
        """Return the log of new over old likelihood of every trained step, ``(M, K)``; carries grad."""
        log_prob = self._log_prob(micro, step)
        return log_prob - old_values(micro, "log_prob", log_prob)

    def _log_prob(self, micro: Experience, step: Transition) -> Tensor:
        """Return the log-probability ``(M, K)`` of the end of every trained step of the rollout."""
        after = micro.extras["after"]
        flat = Transition(*(value.flatten(0, 1) for value in (step.mean, step.std, step.diffusion)))
        return log_prob(self.spec.solver, after.flatten(0, 1), flat).unflatten(0, after.shape[:2])

    def step_weight(self, micro: Experience) -> Tensor | float:
        """Return the weight of each step's surrogate in the loss, broadcastable to ``(M, K)``."""
        return 1.0

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        step = self._transition(policy, micro, self.guidance_in("training", policy))
        log_ratio, advantages = self.log_ratio(micro, step), micro.advantages[:, None]
        gain, metrics = clipped_surrogate(log_ratio, advantages, self.clip), ratio_metrics(log_ratio, self.clip)
        losses = -(self.step_weight(micro) * gain).mean(dim=1)
        if self.kl_weight:
            kl = step_kl(step.mean, micro.extras["reference_mean"], step.diffusion)
            losses = losses + self.kl_weight * kl.mean(dim=1)
            metrics["kl"] = kl.detach().mean(dim=1)
        if "anchor_mean" in micro.extras:
            distance = step_kl(step.mean, micro.extras["anchor_mean"], step.diffusion)
            losses = losses + self.anchor_weight * distance.mean(dim=1)
            metrics["anchor_distance"] = distance.detach().mean(dim=1)
        return (losses * micro.extras.get("weight", 1.0)).mean(), metrics
