"""Base of the methods that train on the sampling chain: a clipped ratio for every step with noise."""

import copy
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import clamped
from lit_vgrpo.core.noise import STREAM_STEPS, seeded_generator
from lit_vgrpo.core.ranges import GuidanceScale, HalfOpenUnitInterval, NonNegativeFloat, Range
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.solvers import FLOW_SDES, VP_SDES, Transition, log_prob, transition
from lit_vgrpo.core.surrogate import clipped_surrogate, mean_over_pixels, ratio_metrics
from lit_vgrpo.core.types import Experience, Rollout, RolloutSpec, Steps
from lit_vgrpo.objectives.base import Copy, Metrics, Objective, PrepareContext
from lit_vgrpo.objectives.pairs import anchor_errors
from lit_vgrpo.policies.base import Policy

PREDICTIONS = "predictions"
"""Name under which an experience keeps the rollout's predictions with their graph."""


def step_kl(mean: Tensor, reference_mean: Tensor, diffusion: Tensor) -> Tensor:
    """Return ``m((mean - mean_ref)^2) / (2 sigma^2)`` per step (arXiv 2505.05470, without its ``h``), ``(B, K)``."""
    return mean_over_pixels((mean - reference_mean).square() / (2 * diffusion.square()), 2)


class StepPass:
    """A pass of the network on every trained step of a micro-batch: ``M`` images, ``K`` steps each.

    Attributes:
        step: The steps' distributions, ``(M, K, ...)``.

    Args:
        as_rolled_out: If the run resumed without the rollout's predictions, make passes with its batches.
    """

    def __init__(
        self, policy: Policy, micro: Experience, spec: RolloutSpec, guidance: float, as_rolled_out: bool = False
    ) -> None:
        assert micro.steps is not None
        steps = micro.steps.tensors()
        self.solver, self.after, shape = str(spec.solver), steps["after"], steps["t"].shape
        z, t, t_next, second = (steps[name].flatten(0, 1) for name in ("before", "t", "t_next", "second_time"))
        cond, kept = micro.conditioning, micro.kept.get(PREDICTIONS)
        if as_rolled_out and kept is None:
            each = zip(steps["before"].unbind(1), steps["t"].unbind(1), strict=True)
            kept = torch.stack([policy(*step, cond.select(micro.rows), guidance) for step in each], dim=1)
        if kept is None:
            prediction = policy(z, t, cond.select(micro.rows.repeat_interleave(shape[1])), guidance)
        else:
            prediction = kept.flatten(0, 1)
        one = transition(self.solver, policy.path, prediction, z, t, t_next, spec.noise_level, second)
        self.step = Transition(*(value.unflatten(0, shape) for value in (one.mean, one.std, one.diffusion)))

    @cached_property
    def log_prob(self) -> Tensor:
        """The log-probability of the end of every step of the rollout, ``(M, K)``."""
        step, after = self.step, self.after
        flat = Transition(*(value.flatten(0, 1) for value in (step.mean, step.std, step.diffusion)))
        return log_prob(self.solver, after.flatten(0, 1), flat).unflatten(0, after.shape[:2])

    def detach(self) -> "StepPass":
        """Return the pass without its graph."""
        other = copy.copy(self)
        other.step = Transition(self.step.mean.detach(), self.step.std, self.step.diffusion)
        other.log_prob = self.log_prob.detach()
        return other


def mean_of_steps(now: StepPass) -> Tensor:
    """Return the means of the steps ``(M, K, ...)``, for a copy to keep."""
    return now.step.mean


@dataclass(eq=False)
class ChainObjective(Objective):
    """Base of the methods whose actions are the SDE steps of a rollout; holds their common options.

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
        reuse_rollout: Train on the rollout's own passes, so that a trained step passes through the network once instead
            of twice. Their graph is kept until the update, as large as that of a micro-batch of all images of a rank.
            Needs one update per iteration in one micro-batch, and no passes with other weights.
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
    reuse_rollout: bool = False

    # --- trained steps ---------------------------------------------------------------------------------------------

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
        return starts[int(torch.randint(len(starts), (), generator=generator, device="cpu"))]

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
        stop = max(1, spec.sde_steps.stop)  # a method trains on one step at least
        errors, last = [], stop if self.window is None else max(self.window[1], self.window_range[1])
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
        if errors := self.chain_errors():
            return errors
        anchor = anchor_errors(self, self.anchor_weight, self.anchor_decay)
        return super().check(sizes) + anchor + self._reuse_errors(sizes)

    def _reuse_errors(self, sizes: Sizes) -> list[str]:
        """Return why the rollout's passes cannot be trained on, in one line."""
        spec, copies, updates = self.rollout_spec(0), self.copies_needed(), sizes.updates_per_iteration
        others = " and ".join(name for name, copy in copies.items() if copy.needs_pass(updates=1))
        trained, noisy, scale = self.num_trained_steps(spec), len(spec.sde_steps), self.guidance_in("training", None)
        problems = {
            f"data.updates_per_iteration={updates}, and the second update has other weights. Use 1": updates > 1,
            f"the passes of the {others} would swap weights below the graph. Set its weight to 0": bool(others),
            f"training_guidance={scale:g} is not the rollout's. Use null": scale != spec.guidance,
            f"only {trained} of {noisy} steps with noise are trained. Use another method": trained < noisy,
        }
        where = "model.objective.reuse_rollout=true trains on the rollout's passes, but"
        found = [problem for problem, is_one in problems.items() if is_one and self.reuse_rollout][:1]
        return [f"{where} {problem}, or reuse_rollout=false." for problem in found]

    def predictions_per_image(self, sizes: Sizes) -> float:
        return self.num_trained_steps(self.rollout_spec(0))

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        passes = super().prediction_passes(sizes)
        return {name: count for name, count in passes.items() if name != "update" or not self.reuse_rollout}

    @property
    def trains_on_rollout_passes(self) -> bool:
        return self.reuse_rollout

    # --- one iteration ---------------------------------------------------------------------------------------------

    def copies_needed(self) -> dict[str, Copy]:
        # The rollout's log-probabilities are of no use if training has another guidance.
        recomputes = self.recompute_old or self.training_guidance not in (None, self.spec.guidance)
        keeps = {"old": lambda now: now.log_prob} | ({"old_mean": mean_of_steps} if self.records_means else {})
        copies = {"old": Copy(keeps, decay=0.0, asked="iteration" if recomputes else "rollout")}
        if self.kl_weight:
            copies["reference"] = Copy({"reference": mean_of_steps})
        if self.anchor_weight > 0 and self.anchor_decay is not None:
            copies["anchor"] = Copy({"anchor": mean_of_steps}, decay=self.anchor_decay)
        return copies

    def make_experience(self, context: PrepareContext) -> Experience:
        """Return the images with their trained steps; views of the trajectory if all of it is trained."""
        chain = context.rollout.trajectory
        assert chain is not None
        images, steps = chain.log_probs.shape
        t, t_next = chain.times[:-1], chain.times[1:]
        columns = (t, self.step_weights(t, t_next), t_next, t.new_full((1,), chain.second_time))
        t, weight, t_next, second_time = (value.expand(images, steps) for value in columns)
        every = Steps(chain.states[:, :-1], t, weight, chain.states[:, 1:], t_next, second_time)
        kept = {"old": chain.log_probs} | ({} if chain.means is None else {"old_mean": chain.means})
        if (chosen := self.choose_steps(context.rollout)) is not None:
            chosen = chosen.to(chain.states.device)
            image = torch.arange(images, device=chosen.device)[:, None]
            every = every.map(lambda value: value[image, chosen])
            kept = {name: value[image, chosen] for name, value in kept.items()}
        experience = context.experience(steps=every, advantages=clamped(context.advantages, self.advantage_clip))
        if self.copies_needed()["old"].asked == "rollout":
            experience.kept.update(kept)
        if chain.predictions is not None:
            experience.kept[PREDICTIONS] = chain.predictions
        if self.drop_zero_advantages:
            trained = (experience.advantages != 0).float()
            share = self.all_ranks(trained).mean().clamp(min=1e-9)  # an iteration without any takes no step
            experience.weights = trained / share.to(trained.device)
        return experience

    def forward(self, policy: Policy, micro: Experience, guidance: float) -> StepPass:
        return StepPass(policy, micro, self.spec, guidance, self.reuse_rollout)

    def log_ratio(self, now: StepPass, kept: Mapping[str, Tensor]) -> Tensor:
        """Return the log of new over old likelihood of every trained step, ``(M, K)``; carries grad."""
        return now.log_prob - kept["old"]

    def step_weights(self, t: Tensor, t_next: Tensor) -> Tensor:
        """Return the weight of each step in the loss; all ``(n,)``."""
        return torch.ones_like(t)

    def losses(self, now: StepPass, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        assert micro.steps is not None
        log_ratio = self.log_ratio(now, kept)
        gain = clipped_surrogate(log_ratio, micro.advantages[:, None], self.clip)
        return -(micro.steps.weight * gain).mean(dim=1), ratio_metrics(log_ratio, self.clip)

    def pull(self, losses: Tensor, metrics: Metrics, now: StepPass, kept: Mapping[str, Tensor]) -> Tensor:
        for name, metric, weight in (
            ("reference", "kl", self.kl_weight or 0.0),
            ("anchor", "anchor_distance", self.anchor_weight),
        ):
            if name in kept:
                distance = step_kl(now.step.mean, kept[name], now.step.diffusion).mean(dim=1)
                losses, metrics[metric] = losses + weight * distance, distance.detach()
        return losses
