"""Flow-GRPO (arXiv 2505.05470): GRPO over the sampling chain of a flow model."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.noise import STREAM_STEPS, seeded_generator
from lit_vgrpo.core.ranges import NonNegativeFloat, Range, checked
from lit_vgrpo.core.solvers import Transition
from lit_vgrpo.core.surrogate import mean_over_pixels
from lit_vgrpo.core.types import Experience, RolloutSpec
from lit_vgrpo.objectives.chain import ChainObjective

PUBLISHED_CLIP = {"cps": 1e-5}
DEFAULT_CLIP = 1e-4


def guarded_log_ratio(log_ratio: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """Return ``(dlogp + m((mean - mean_old)^2) / (2 std^2)) std``: centred on 0, with one scale for all steps.

    Args:
        log_ratio: ``(B, K)``.
        mean: ``(B, K, ...)``, and ``old_mean`` alike: the step's mean now and as it was rolled out.
        std: ``(B, K, 1...)``, standard deviation of the whole step.

    Source:
        arXiv 2510.22319 (GRPO-Guard).
    """
    moved = mean_over_pixels((mean - old_mean).square() / (2 * std.square()), 2)
    return (log_ratio + moved) * std.flatten(1)


@checked
@dataclass(eq=False)
class FlowGRPO(ChainObjective):
    """Flow-GRPO, with its later variants: Fast, CPS (choose ``rollout.solver=cps``) and GRPO-Guard.

    Args:
        clip: Half-width of the ratio's trust region; null takes the solver's published one (1e-4, cps 1e-5).
        kl_weight: Weight of the KL to the starting weights; published: 0.04 (OCR, GenEval) and 0.01 (PickScore).
        fast: Add noise and train only in a short window; its place is drawn for each iteration, and never includes the
            last step.
        fast_window: Steps of that window.
        guard: GRPO-Guard's ratio, and each step's surrogate divided by its ``h``.

    The other options are those of :class:`~lit_vgrpo.objectives.chain.ChainObjective`.
    """

    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("flow_sde", steps=10, guidance=4.5)

    clip: Annotated[float, Range(above=0, below=1)] | None = None
    kl_weight: NonNegativeFloat = 0.04
    fast: bool = False
    fast_window: Annotated[int, Range(1, 1000)] = 2
    guard: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip is None:
            self.clip = PUBLISHED_CLIP.get(self.spec.solver, DEFAULT_CLIP)

    @property
    def window(self) -> tuple[str, int] | None:
        return ("fast_window", self.fast_window) if self.fast else None

    def window_start(self, iteration: int) -> int:
        generator = seeded_generator(STREAM_STEPS, iteration)
        return int(torch.randint(self.last_start + 1, (), generator=generator))

    def chain_errors(self) -> list[str]:
        errors = super().chain_errors()
        if self.guard and self.spec.solver == "cps":
            errors.append(
                "model.objective.guard=true is made for a Gaussian likelihood, which cps does not use. "
                "Set guard=false, or rollout.solver=flow_sde."
            )
        return errors

    @property
    def records_means(self) -> bool:
        return self.guard

    def log_ratio(self, micro: Experience, step: Transition) -> Tensor:
        log_ratio = super().log_ratio(micro, step)
        if not self.guard:
            return log_ratio
        return guarded_log_ratio(log_ratio, step.mean, micro.extras["old_mean"], step.std)

    def step_weight(self, micro: Experience) -> Tensor | float:
        return 1 / (micro.extras["t"] - micro.extras["t_next"]) if self.guard else 1.0
