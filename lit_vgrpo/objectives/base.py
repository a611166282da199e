"""A training method: where the network is asked, which copies of the weights it keeps, and a pure loss.

Files with methods have no ``from __future__ import annotations``: a recipe's parser reads the type hints of dataclasses
from the module of the last class, where a string from a base class is undefined.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageAggregate, AdvantageStd
from lit_vgrpo.core.gather import all_gather
from lit_vgrpo.core.ranges import GuidanceScale, checked
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sampling import rollout_batches
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Decay, Snapshot
from lit_vgrpo.core.surrogate import Pairs
from lit_vgrpo.core.types import Experience, Rollout, RolloutRequest, RolloutSpec, Steps
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import Weighted

Metrics = dict[str, Tensor]
"""Detached values for the log, one per image ``(M,)``."""


@dataclass(frozen=True)
class Copy:
    """Weights other than the policy's current ones: those of the start, or an average that follows the policy.

    Attributes:
        keeps: What a pass with these weights leaves for the loss, by name: functions of what
            :meth:`Objective.forward` returns, one row per image.
        decay: ``copy <- d copy + (1 - d) weights``. With 1 it stays at the start. With 0 it is the policy as of its
            last move: it takes no memory, and no pass while the policy has not moved since.
        moves: When it moves.
        asked: When its passes are made; ``rollout`` if sampling the images leaves the same values.
        samples_from: Gradient step from which it samples the images; ``None`` for never.
    """

    keeps: Mapping[str, Callable[[Any], Tensor]] = field(default_factory=dict)
    decay: float | Decay = 1.0
    moves: Literal["iteration", "update"] = "iteration"
    asked: Literal["iteration", "update", "rollout"] = "iteration"
    samples_from: int | None = None

    def needs_pass(self, updates: int) -> bool:
        """Return whether passes are needed, in an iteration with this number of updates."""
        has_moved = self.decay != 0 or (self.moves == "iteration" and updates > 1)
        return bool(self.keeps) and self.asked != "rollout" and has_moved


@dataclass
class PrepareContext:
    """An iteration's images, and what a method needs to pass them through the network before the first update.

    Attributes:
        policy: The policy with its weights before the first update.
        rollout: This rank's images.
        advantages: ``(B,)``, float32.
        micro_batch_size: Images per forward pass; the same as in the updates, since kernels round by batch size.
        updates: Gradient steps of this iteration; the policy has moved from the second on.
        ledger: Counter of extra network passes.
        off_policy: ``(K,)``, int64: the images that the first update does not train on, if every update takes a
            separate share; ``None`` if all updates train on all images.
        weights: ``(B,)``, the images' weights in the loss, 0 for those that a reward failed to score; ``None`` for
            equal ones.
        is_trial: The images are dummies for measuring memory.
        reward: The reward, for a method without advantages, see
            :func:`~lit_vgrpo.objectives.reward_gradient.score_gradient`.
        prompts: Each image's prompt, for such a method.
        data_rows: Each image's data row, likewise.
    """

    policy: Policy
    rollout: Rollout
    advantages: Tensor
    micro_batch_size: int
    updates: int = 1
    ledger: PassLedger = field(default_factory=PassLedger)
    off_policy: Tensor | None = None
    weights: Tensor | None = None
    is_trial: bool = False
    reward: Weighted | None = None
    prompts: Sequence[str] = ()
    data_rows: Sequence[Mapping[str, Any]] = ()

    def experience(
        self, pairs: Pairs | None = None, steps: Steps | None = None, advantages: Tensor | None = None
    ) -> Experience:
        """Return the images as experience, with the advantages given here or those of the iteration."""
        rollout, device = self.rollout, self.rollout.latents.device
        return Experience(
            latents=rollout.latents,
            advantages=(self.advantages if advantages is None else advantages).to(device),
            conditioning=rollout.conditioning,
            rows=rollout.rows,
            group_ids=rollout.group_ids.to(device),
            group_size=rollout.group_size,
            pairs=pairs,
            steps=steps,
            weights=None if self.weights is None else self.weights.to(device),
        )


@checked
class Objective(ABC):
    """A training method as a plain class, independent of any trainer.

    A method defines where the network is asked (:meth:`make_experience`, :meth:`forward`), its copies
    (:meth:`copies_needed`) and a pure loss (:meth:`losses`). This class makes the passes of the copies, moves and saves
    them, and counts the cost. The calls of one iteration, in order: :meth:`roll_out`, :meth:`prepare`, then for every
    update :meth:`before_update`, :meth:`loss` on each of its micro-batches and :meth:`after_update`, then
    :meth:`after_iteration`.

    Attributes:
        copies: The copies of the trained weights, by name; part of the checkpoint, except those that never move.
        num_updates: Gradient steps done, over all iterations; decays count these.
        all_ranks: Concatenates every rank's ``(B, ...)`` in rank order; collective.
        rollout_device: Device of an iteration's tensors; ``None`` keeps them on the network's device.
        seed: The run's seed, which the trainer's module sets.

    Args:
        training_guidance: Guidance of the network while it is trained, and of the copies it is compared with; ``None``
            takes the rollout's if the method trains on the sampling steps or the network embeds the scale, else 1.
        reference_guidance: Guidance of the weights of the start; ``None`` takes the training's.
    """

    TO_PASS: ClassVar[str] = "Pass an instance, such as objective=VGRPO()"
    needs_reward: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = True
    """False if it trains on every image, without advantages."""
    takes_reward_gradient: ClassVar[bool] = False
    """True if it trains on the gradient of a differentiable reward."""
    advantage_std: ClassVar[AdvantageStd] = "global"
    advantage_aggregate: ClassVar[AdvantageAggregate] = "rewards"
    path_kinds: ClassVar[tuple[str, ...]] = ("flow", "vp")
    trains_on_sampling_steps: ClassVar[bool] = False
    default_rollout: ClassVar[RolloutSpec | None] = None

    rollout: RolloutSpec | None = None
    training_guidance: float | None = None
    reference_guidance: float | None = None
    replay: bool = False
    """True if an iteration also trains on the previous one's images."""

    def __init__(
        self, training_guidance: GuidanceScale | None = None, reference_guidance: GuidanceScale | None = None
    ) -> None:
        self.training_guidance = training_guidance
        self.reference_guidance = reference_guidance
        self.__post_init__()

    def __post_init__(self) -> None:
        """Use the method's default rollout, or its solver, if none is given, and start without copies and updates.

        A dataclass that defines ``__post_init__`` itself must call this one.
        """
        if self.rollout is None and self.default_rollout is not None:
            self.rollout = replace(self.default_rollout)
        if self.trains_on_sampling_steps and self.rollout is not None and self.rollout.solver is None:
            self.rollout = replace(self.rollout, solver=(self.default_rollout or self.rollout).solver)
        self.rollout_device: torch.device | None = None
        self.copies: dict[str, Snapshot] = {}
        self.num_updates = 0
        self.seed = 0
        self.all_ranks: Callable[[Tensor], Tensor] = all_gather

    # --- what a method defines -------------------------------------------------------------------------------------

    @abstractmethod
    def make_experience(self, context: PrepareContext) -> Experience:
        """Return the images of an iteration, with the pairs or the steps at which the network is asked."""

    @abstractmethod
    def forward(self, policy: Policy, micro: Experience, guidance: float) -> Any:
        """Pass a micro-batch through the network with the current weights; on the policy's device, carries grad."""

    @abstractmethod
    def losses(self, now: Any, kept: Mapping[str, Tensor], micro: Experience) -> tuple[Tensor, Metrics]:
        """Return a loss per image ``(M,)``, and metrics; a pure function.

        Args:
            now: What :meth:`forward` returns for the policy.
            kept: What the passes of :meth:`copies_needed` keep, by name, all of them in every update.
            micro: The images, with their advantages.
        """

    @abstractmethod
    def predictions_per_image(self, sizes: Sizes) -> float:
        """Return the predictions per image of an update; one with guidance counts once."""

    def copies_needed(self) -> dict[str, Copy]:
        """Return the weights that the method compares the policy with, or samples with, by name."""
        return {}

    def pull(self, losses: Tensor, metrics: Metrics, now: Any, kept: Mapping[str, Tensor]) -> Tensor:
        """Return the losses ``(M,)`` with the pulls towards copies, such as the KL to the start, and add metrics."""
        return losses

    # --- checks and cost -------------------------------------------------------------------------------------------

    @property
    def spec(self) -> RolloutSpec:
        """Sampling of the images, if it is the same in all iterations."""
        assert self.rollout is not None, f"{type(self).__name__} has no rollout"
        return self.rollout

    def rollout_spec(self, iteration: int) -> RolloutSpec:
        """Return how the images of an iteration are sampled."""
        return self.spec

    def check(self, sizes: Sizes) -> list[str]:
        """Return settings that cannot work together, one line each; an override calls ``super()``."""
        errors = self.rollout_spec(0).errors()
        if self.reference_guidance is not None and "reference" not in self.copies_needed():
            errors.append(
                f"model.objective.reference_guidance={self.reference_guidance} has no effect without a pull to the "
                "start, as by kl_weight. Set it to null."
            )
        return errors

    def row_error(self, row: Mapping[str, Any]) -> str | None:
        """Return why the method cannot train on a prompt's row, in one line, or ``None``."""
        return None

    def policy_errors(self, policy: Policy) -> list[str]:
        """Return why this method does not work on a family of policies: at most one line."""
        if policy.path_kind not in self.path_kinds:
            path = {"flow": "a rectified flow", "vp": "a variance-preserving path"}[policy.path_kind]
            method = type(self).__name__
            return [f"model.objective={method} does not work on {type(policy).__name__}: it is not defined on {path}."]
        spec, where = self.rollout_spec(0), "model.objective.rollout"
        if spec.solver not in (policy.sde_solvers if spec.is_sde else (None, *policy.solvers)):
            known = " or ".join((*policy.solvers, *policy.sde_solvers))
            return [f"{where}.solver={spec.solver} is not a solver of {type(policy).__name__}. Use {known}."]
        return []

    def passes_per_image(self, sizes: Sizes, policy: Policy | None = None) -> dict[str, float]:
        """Return network passes per image by phase of the ledger; guidance counts twice, a backward is not counted.

        With replay, the passes are those of every iteration except the first.

        Args:
            policy: Owner of the network; ``None`` means one that embeds no guidance scale.
        """

        def factor(guidance: float) -> int:
            return (1 if guidance == 1.0 else 2) if policy is None else policy.guidance_factor(guidance)

        spec = self.rollout_spec(0)
        passes: dict[str, float] = {"rollout": spec.network_calls * factor(spec.guidance)}
        for phase, count in self.prediction_passes(sizes).items():
            use: Literal["training", "reference"] = "reference" if phase == "reference" else "training"
            passes[phase] = (1 + self.replay) * count * factor(self.guidance_in(use, policy))
        return passes

    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        """Return predictions per image and phase, excluding the rollout; one with guidance counts once."""
        asked = self.predictions_per_image(sizes)
        passes: dict[str, float] = {"update": sizes.uses_per_image * asked}
        for name, copy in self.copies_needed().items():
            if copy.needs_pass(sizes.updates_per_iteration):
                times = sizes.uses_per_image if copy.asked == "update" else 1
                passes[name] = asked * (times if copy.decay != 0 else sizes.later_share)
        return passes

    def compares_passes(self, sizes: Sizes) -> bool:
        """Return whether the loss compares a pass with others of the same weights, as a ratio does."""
        copies = self.copies_needed().values()
        return any(c.keeps and (c.asked == "rollout" or c.needs_pass(sizes.updates_per_iteration)) for c in copies)

    def decodes_per_image(self) -> float:
        """Return the VAE's passes with gradient per image."""
        return 0

    def guidance_in(self, use: Literal["training", "reference"], policy: Policy | None) -> float:
        """Return the guidance scale during training, or of the weights of the start."""
        if use == "reference" and self.reference_guidance is not None:
            return self.reference_guidance
        if self.training_guidance is not None:
            return self.training_guidance
        as_sampled = self.trains_on_sampling_steps or (policy is not None and policy.embeds_guidance)
        return self.rollout_spec(0).guidance if as_sampled else 1.0

    @property
    def trains_on_reward(self) -> bool:
        """True if the loss depends on the reward, which is otherwise only logged."""
        return self.needs_reward and (self.uses_advantages or self.takes_reward_gradient)

    # --- the rollout -----------------------------------------------------------------------------------------------

    def connect(self, rollout_device: torch.device | None, seed: int = 0) -> None:
        """Set the attributes that a trainer's module knows; called before :meth:`setup`."""
        self.rollout_device, self.seed = rollout_device, seed

    def setup(self, policy: Policy) -> None:
        """Copy the loaded policy's weights as the method needs."""
        self.copies |= {name: Snapshot(policy) for name, copy in self.copies_needed().items() if copy.decay != 0}

    def acting(self, policy: Policy) -> AbstractContextManager[Any]:
        """Swap in the weights that sample the images, if they are not the policy's."""
        for name, copy in self.copies_needed().items():
            if name in self.copies and copy.samples_from is not None and self.num_updates >= copy.samples_from:
                return self.copies[name].swapped_into(policy)
        return nullcontext()

    def rollout_batches(self, policy: Policy, request: RolloutRequest) -> Generator[Rollout, None, None]:
        """Sample the images of a request with the weights that act, one forward batch at a time."""
        drawn = rollout_batches(
            policy,
            request,
            self.rollout_spec(request.iteration),
            device=self.rollout_device,
            record_means=self.records_means,
            record=self.recorded_steps(request.iteration),
            with_graph=self.trains_on_rollout_passes,
        )
        with self.acting(policy), closing(drawn) as batches:
            yield from batches

    def roll_out(self, policy: Policy, request: RolloutRequest) -> Rollout:
        """Sample all images of a request with the weights that act."""
        return Rollout.joined([*self.rollout_batches(policy, request)])

    @property
    def records_means(self) -> bool:
        """True if the loss needs the mean of every SDE step as it was rolled out."""
        return False

    @property
    def trains_on_rollout_passes(self) -> bool:
        """True if the rollout's passes of SDE steps are those that are trained: it keeps their graph."""
        return False

    def recorded_steps(self, iteration: int) -> Sequence[int]:
        """Return the ODE steps whose initial latents the loss needs, ascending."""
        return ()

    # --- the updates -----------------------------------------------------------------------------------------------

    def prepare(self, context: PrepareContext) -> Experience:
        """Compute the fixed inputs of the loss before the first update."""
        experience = self.make_experience(context)
        for name, copy in self.copies_needed().items():
            if copy.asked != "iteration" or not copy.needs_pass(context.updates):
                continue
            # The first update trains the policy as it is now: its pass has what a copy with decay 0 would keep.
            off_policy = context.off_policy if copy.decay == 0 else None
            part = experience if off_policy is None else experience.select(off_policy.to(experience.latents.device))
            micros = part.micro_batches(context.micro_batch_size)
            for key, parts in self.kept_by(context.policy, name, micros, context.ledger).items():
                values = torch.cat(parts)
                if off_policy is not None:  # the others get NaN
                    whole = values.new_full((len(experience), *values.shape[1:]), math.nan)
                    values = whole.index_copy(0, off_policy.to(values.device), values)
                experience.kept[key] = values
        return experience

    def before_update(self, policy: Policy, micros: Sequence[Experience], ledger: PassLedger | None = None) -> None:
        """Make the passes of the copies that move with every update."""
        for name, copy in self.copies_needed().items():
            if copy.asked == "update" and copy.needs_pass(updates=1):
                for key, parts in self.kept_by(policy, name, micros, ledger).items():
                    for micro, values in zip(micros, parts, strict=True):
                        micro.kept[key] = values

    def kept_by(
        self, policy: Policy, name: str, micros: Sequence[Experience], ledger: PassLedger | None
    ) -> dict[str, list[Tensor]]:
        """Pass micro-batches through the network with the weights of a copy; return what it keeps of each, by name."""
        copy, weights, device = self.copies_needed()[name], self.copies.get(name), micros[0].latents.device
        guidance = self.guidance_in("reference" if name == "reference" else "training", policy)
        kept: dict[str, list[Tensor]] = {key: [] for key in copy.keeps}
        if weights is not None:
            weights.to(policy.device)
        swapped = nullcontext() if weights is None else weights.swapped_into(policy)
        with (ledger or PassLedger()).phase(name), torch.no_grad(), swapped:
            for micro in micros:
                output = self.forward(policy, micro.to(policy.device), guidance)
                for key, function in copy.keeps.items():
                    kept[key].append(micro.keep_shared(key, function(output).to(device)))
        return kept

    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, Metrics]:
        """Return the scalar loss of a micro-batch, and metrics."""
        micro = micro.to(policy.device)
        now = self.forward(policy, micro, self.guidance_in("training", policy))
        kept = self._kept(now, micro)
        losses, metrics = self.losses(now, kept, micro)
        for name, values in {"losses": losses, **metrics}.items():
            if values.shape != (len(micro),):
                raise ValueError(
                    f"{type(self).__name__}.losses returned {name} of shape {tuple(values.shape)} for {len(micro)} "
                    "images. Return one value per image: take the mean over its pairs or steps."
                )
        losses = self.pull(losses, metrics, now, kept)
        return (losses if micro.weights is None else losses * micro.weights).mean(), metrics

    def after_update(self, policy: Policy) -> None:
        """Count a gradient step, and move the copies that follow steps."""
        self.num_updates += 1
        self._move_copies(policy, "update")

    def after_iteration(self, policy: Policy) -> None:
        """Move the copies that follow iterations."""
        self._move_copies(policy, "iteration")

    def _move_copies(self, policy: Policy, moment: str) -> None:
        for name, copy in self.copies_needed().items():
            if name in self.copies and copy.moves == moment and copy.decay != 1:
                decay = copy.decay(self.num_updates) if isinstance(copy.decay, Decay) else copy.decay
                self.copies[name].move_towards(policy, decay)

    def _kept(self, now: Any, micro: Experience) -> dict[str, Tensor]:
        """Return what the copies keep; where the weights were the current ones, it is of the current pass, detached."""
        own, kept = cache(now.detach), {}
        for copy in self.copies_needed().values():
            for key, function in copy.keeps.items():
                value = micro.kept_values(key)
                if copy.decay == 0:
                    value = function(own()) if value is None else torch.where(value.isnan(), function(own()), value)
                elif value is None:
                    raise RuntimeError(f"The experience lacks {key}. Call prepare, and before_update for every update.")
                kept[key] = value
        return kept

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values only; the frozen reference comes from the policy's checkpoint."""
        copies = {name: copy.state_dict() for name, copy in self._moving_copies().items()}
        return {"num_updates": self.num_updates, "copies": copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`.

        Raises:
            RuntimeError: The checkpoint was written with another method or other settings.
        """
        copies = self._moving_copies()
        if state["copies"].keys() != copies.keys():
            saved, needed = (", ".join(sorted(names)) or "none" for names in (state["copies"], copies))
            raise RuntimeError(
                f"The checkpoint has copies of the weights ({saved}) that differ from those of {type(self).__name__} "
                f"({needed}). Resume with the recipe that wrote it (RUN/config.yaml)."
            )
        self.num_updates = state["num_updates"]
        for name, copy in copies.items():
            copy.load_state_dict(state["copies"][name])

    def start_over(self, policy: Policy) -> None:
        """Start as in a first run: no gradient step, and copies that move equal to the current weights."""
        self.num_updates = 0
        for copy in self._moving_copies().values():
            copy.move_towards(policy, decay=0.0)

    def _moving_copies(self) -> dict[str, Snapshot]:
        needed = self.copies_needed()
        return {name: copy for name, copy in self.copies.items() if needed[name].decay != 1}
