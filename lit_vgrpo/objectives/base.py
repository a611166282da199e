"""Contract of a training method: its rollout, what it keeps, and its loss.

Files with methods have no ``from __future__ import annotations``: a recipe's parser reads the type hints of dataclasses
from the module of the last class, where a string from a base class is undefined.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageAggregate, AdvantageStd
from lit_vgrpo.core.gather import of_all_ranks
from lit_vgrpo.core.ranges import GuidanceScale, checked
from lit_vgrpo.core.records import PassLedger
from lit_vgrpo.core.sampling import rollout_batches
from lit_vgrpo.core.sizes import Sizes
from lit_vgrpo.core.snapshots import Snapshot
from lit_vgrpo.core.surrogate import Pairs, SharePasses
from lit_vgrpo.core.types import Experience, Rollout, RolloutRequest, RolloutSpec
from lit_vgrpo.policies.base import Policy
from lit_vgrpo.rewards import Weighted


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
        later: ``(K,)``, int64: the images that the first update does not train on, if every update takes a
            separate share; ``None`` if all updates train on all images.
        is_trial: The images are dummies for measuring memory.
        reward: The reward, for a method without advantages, see
            :func:`~lit_vgrpo.objectives.score_gradient.score_gradient`.
        prompts: Each image's prompt, for such a method.
        data_rows: Each image's data row, likewise.
    """

    policy: Policy
    rollout: Rollout
    advantages: Tensor
    micro_batch_size: int
    updates: int = 1
    ledger: PassLedger = field(default_factory=PassLedger)
    later: Tensor | None = None
    is_trial: bool = False
    reward: Weighted | None = None
    prompts: Sequence[str] = ()
    data_rows: Sequence[Mapping[str, Any]] = ()

    def later_of(self, experience: Experience) -> Experience:
        """Return the images whose policy has moved by the time they are trained on, in the order of the updates."""
        return experience if self.later is None else experience.select(self.later.to(experience.latents.device))

    def placed(self, values: Tensor) -> Tensor:
        """Scatter values of the later images ``(K, ...)`` to all images ``(B, ...)``, with NaN for the others."""
        if self.later is None:
            return values
        places = values.new_full((len(self.rollout), *values.shape[1:]), math.nan)
        places[self.later.to(values.device)] = values
        return places

    def experience(
        self, pairs: Pairs | None = None, extras: dict[str, Tensor] | None = None, advantages: Tensor | None = None
    ) -> Experience:
        """Return the images as experience, with the advantages given here or those of the iteration."""
        rollout = self.rollout
        values = (self.advantages if advantages is None else advantages).to(rollout.latents.device)
        return Experience(rollout.latents, values, rollout.conditioning, rollout.rows, pairs, extras or {})


@checked
class Objective(ABC):
    """A training method as a plain class, independent of any trainer.

    The calls of one iteration, in order: :meth:`roll_out`, :meth:`prepare`, then for every update
    :meth:`before_update`, :meth:`loss` on each of its micro-batches and :meth:`after_update`, then
    :meth:`after_iteration`.

    Attributes:
        copies: The copies of the trained weights that the method keeps, by name; part of the checkpoint, except
            ``"reference"``, the copy of the start.
        num_updates: Gradient steps done, over all iterations; decays by steps count these.
        all_ranks: Concatenates every rank's ``(B, ...)`` in rank order; collective.
        rollout_device: Device of an iteration's tensors; ``None`` keeps them on the network's device.
        seed: The run's seed, which the trainer's module sets.

    Args:
        training_guidance: Guidance of the network while it is trained, and of the copies it is compared with; ``None``
            takes the rollout's if the method trains on the sampling steps or the network embeds the scale, else 1.
        reference_guidance: Guidance of the weights of the start; ``None`` takes the training's.

    A method that overrides :meth:`check`, :meth:`setup` or :meth:`after_iteration` must call ``super()``: this class
    keeps the anchor, for which a method declares the options ``anchor_weight`` and ``anchor_decay``, and the copy of
    the start, for which it declares ``kl_weight``.
    """

    needs_reward: ClassVar[bool] = True
    uses_advantages: ClassVar[bool] = True
    """False if it trains on every image, without advantages."""
    takes_reward_gradient: ClassVar[bool] = False
    """True if it trains on the gradient of a differentiable reward."""
    advantage_std: ClassVar[AdvantageStd] = "global"
    advantage_aggregate: ClassVar[AdvantageAggregate] = "rewards"
    of_later_updates: ClassVar[tuple[str, ...]] = ()  # options without effect in an iteration's first update
    path_kinds: ClassVar[tuple[str, ...]] = ("flow", "vp")
    trains_on_sampling_steps: ClassVar[bool] = False
    default_rollout: ClassVar[RolloutSpec | None] = None
    acting_copy: ClassVar[str] = ""  # name of the copy that samples the images

    rollout: RolloutSpec | None = None
    training_guidance: float | None = None
    reference_guidance: float | None = None
    anchor_weight: float = 0.0
    anchor_decay: float | None = None
    kl_weight: float | None = 0.0
    replay: bool = False
    antithetic: bool = False
    share_passes: SharePasses = "none"
    decode_crop: float | None = None
    decode_half: bool = False

    def __init__(
        self, training_guidance: GuidanceScale | None = None, reference_guidance: GuidanceScale | None = None
    ) -> None:
        self.training_guidance = training_guidance
        self.reference_guidance = reference_guidance
        self.__post_init__()

    def __post_init__(self) -> None:
        """Use the method's default rollout if none is given, and start without copies and updates.

        A dataclass that defines ``__post_init__`` itself must call this one.
        """
        if self.rollout is None and self.default_rollout is not None:
            self.rollout = replace(self.default_rollout)
        self.rollout_device: torch.device | None = None
        self.copies: dict[str, Snapshot] = {}
        self.num_updates = 0
        self.seed = 0
        self.all_ranks: Callable[[Tensor], Tensor] = of_all_ranks

    @property
    def spec(self) -> RolloutSpec:
        """Sampling of the images, if it is the same in all iterations."""
        assert self.rollout is not None, f"{type(self).__name__} has no rollout"
        return self.rollout

    def rollout_spec(self, iteration: int) -> RolloutSpec:
        """Return how the images of an iteration are sampled."""
        return self.spec

    def check(self, sizes: Sizes) -> list[str]:
        """Return settings that cannot work together, one line each."""
        errors = self.rollout_spec(0).errors()
        if (self.anchor_weight > 0) != (self.anchor_decay is not None):
            errors.append(
                f"model.objective.anchor_weight={self.anchor_weight} and anchor_decay={self.anchor_decay} must be "
                "set together. Use values such as 1.0 and 0.3, or 0 and null."
            )
        unused = {} if self.needs_reference else {"reference_guidance": "without a pull to the start, as by kl_weight"}
        if sizes.updates_per_iteration == 1:
            unused |= dict.fromkeys(self.of_later_updates, "with updates_per_iteration=1: the policy has not moved")
        for name, why in unused.items():
            if (value := getattr(self, name)) is not None:
                errors.append(f"model.objective.{name}={value} has no effect {why}. Set it to null.")
        return errors

    def row_error(self, row: Mapping[str, Any]) -> str | None:
        """Return why the method cannot train on a prompt's row, in one line, or ``None``."""
        return None

    def policy_errors(self, policy: type[Policy]) -> list[str]:
        """Return why this method does not work on a family of policies: at most one line."""
        if policy.path_kind not in self.path_kinds:
            path = {"flow": "a rectified flow", "vp": "a variance-preserving path"}[policy.path_kind]
            method = type(self).__name__
            return [f"model.objective={method} does not work on {policy.__name__}: it is not defined on {path}."]
        spec, where = self.rollout_spec(0), "model.objective.rollout"
        if spec.solver not in (policy.sde_solvers if spec.is_sde else policy.solvers):
            known = " or ".join((*policy.solvers, *policy.sde_solvers))
            return [f"{where}.solver={spec.solver} is not a solver of {policy.__name__}. Use {known}."]
        return []

    def passes_per_image(self, sizes: Sizes, policy: Policy | None = None) -> dict[str, float]:
        """Return network passes per image by phase of the ledger; guidance counts twice, a backward is not counted.

        With replay, the passes are those of every iteration except the first.

        Args:
            policy: Owner of the network; ``None`` means one that embeds no guidance scale.
        """
        spec = self.rollout_spec(0)
        passes: dict[str, float] = {"rollout": spec.network_calls * _guidance_factor(spec.guidance, policy)}
        training = _guidance_factor(self.guidance_in("training", policy), policy)
        reference = _guidance_factor(self.guidance_in("reference", policy), policy)
        for phase, count in self.prediction_passes(sizes).items():
            passes[phase] = (1 + self.replay) * count * (reference if phase == "reference" else training)
        return passes

    def decodes_per_image(self) -> float:
        """Return the VAE's passes with gradient per image."""
        return 0

    @abstractmethod
    def prediction_passes(self, sizes: Sizes) -> dict[str, float]:
        """Return predictions per image and phase, excluding the rollout; one with guidance counts once."""

    def guidance_in(self, use: Literal["training", "reference"], policy: Policy | None) -> float:
        """Return the guidance scale during training, or of the weights of the start."""
        if use == "reference" and self.reference_guidance is not None:
            return self.reference_guidance
        if self.training_guidance is not None:
            return self.training_guidance
        as_sampled = self.trains_on_sampling_steps or (policy is not None and policy.embeds_guidance)
        return self.rollout_spec(0).guidance if as_sampled else 1.0

    def connect(self, rollout_device: torch.device | None, seed: int = 0) -> None:
        """Set the attributes that a trainer's module knows; called before :meth:`setup`."""
        self.rollout_device, self.seed = rollout_device, seed

    def setup(self, policy: Policy) -> None:
        """Copy the loaded policy's weights as the method needs."""
        if self.needs_reference:
            self.copies["reference"] = Snapshot(policy)
        if self.keeps_anchor:
            self.copies["anchor"] = Snapshot(policy)

    def acting(self, policy: Policy) -> AbstractContextManager[Any]:
        """Swap in the weights that roll out: those of :attr:`acting_copy` if there is one, else the policy's."""
        copy = self.copies.get(self.acting_copy)
        return nullcontext() if copy is None else copy.swapped_into(policy)

    def rollout_batches(self, policy: Policy, request: RolloutRequest) -> Generator[Rollout, None, None]:
        """Sample the images of a request with the weights that act, one forward batch at a time."""
        drawn = rollout_batches(
            policy,
            request,
            self.rollout_spec(request.iteration),
            device=self.rollout_device,
            record_means=self.records_means,
            record=self.recorded_steps(request.iteration),
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

    def recorded_steps(self, iteration: int) -> Sequence[int]:
        """Return the ODE steps whose initial latents the loss needs, ascending."""
        return ()

    @abstractmethod
    def prepare(self, context: PrepareContext) -> Experience:
        """Compute the fixed inputs of the loss before the first update."""

    @abstractmethod
    def loss(self, policy: Policy, micro: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scalar loss of a micro-batch, and detached metrics, one value per image ``(M,)``."""

    def before_update(self, policy: Policy, micros: Sequence[Experience], ledger: PassLedger | None = None) -> None:  # noqa: B027
        """Add to the micro-batches of one update the values that depend on the current weights."""

    def after_update(self, policy: Policy) -> None:
        """Count a gradient step; methods override this to move copies that follow steps."""
        self.num_updates += 1

    def after_iteration(self, policy: Policy) -> None:
        """Move the copies that follow iterations."""
        if self.anchor is not None and self.anchor_decay is not None:
            self.anchor.move_towards(policy, self.anchor_decay)

    # --- the anchor: a slowly moving copy of the weights that pulls the policy; not from a paper ---------------------

    @property
    def keeps_anchor(self) -> bool:
        """True if there is an anchor."""
        return self.anchor_weight > 0 and self.anchor_decay is not None

    @property
    def anchor(self) -> Snapshot | None:
        """The slowly moving copy, if any."""
        return self.copies.get("anchor")

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares with the predictions of the starting weights."""
        return bool(self.kl_weight)

    def pull_passes(self, predictions: float) -> dict[str, float]:
        """Return the reference's and the anchor's predictions per image, if needed: ``predictions`` each."""
        needed = {"reference": self.needs_reference, "anchor": self.keeps_anchor}
        return {name: predictions for name, is_needed in needed.items() if is_needed}

    @contextmanager
    def with_copy(self, policy: Policy, name: str, ledger: PassLedger | None = None) -> Iterator[None]:
        """Swap in the weights of ``copies[name]``, and count the passes inside under that name."""
        copy = self.copies[name]
        copy.to(policy.device)
        with (ledger or PassLedger()).phase(name), copy.swapped_into(policy):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values only; the frozen reference comes from the policy's checkpoint."""
        return {
            "num_updates": self.num_updates,
            "copies": {name: copy.state_dict() for name, copy in self._moving_copies().items()},
        }

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

    def _moving_copies(self) -> dict[str, Snapshot]:
        return {name: copy for name, copy in self.copies.items() if name != "reference"}


def _guidance_factor(guidance: float, policy: Policy | None) -> int:
    if policy is not None:
        return policy.guidance_factor(guidance)
    return 1 if guidance == 1.0 else 2
