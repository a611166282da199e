"""Flow-GRPO (arXiv 2505.05470): GRPO over the sampling chain of a flow model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from lit_vgrpo.core.ranges import NonNegativeFloat, NonNegativeInt, OnlyWith, Range, checked
from lit_vgrpo.core.surrogate import mean_over_pixels
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives.chain import ChainObjective, StepPass

FAST_NOISE = 0.8


def guarded_log_ratio(log_ratio: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """Return ``(dlogp + m((mean - mean_old)^2) / (2 std^2)) std``: centred on 0, with one scale for all steps.

    Source: arXiv 2510.22319 (GRPO-Guard).

    Args:
        log_ratio: ``(B, K)``.
        mean: ``(B, K, ...)``, and ``old_mean`` alike: the step's mean now and as it was rolled out.
        std: ``(B, K, 1...)``, standard deviation of the whole step.
    """
    moved = mean_over_pixels((mean - old_mean).square() / (2 * std.square()), 2)
    return (log_ratio + moved) * std.flatten(1)


@checked
@dataclass(eq=False)
class FlowGRPO(ChainObjective):
    """Flow-GRPO, with its later variants: Fast, CPS (choose ``rollout.solver=cps``) and GRPO-Guard.

    The defaults follow the public code (``config/grpo.py``): ``geneval_sd3`` for the whole chain, and
    ``geneval_sd3_fast_nocfg``, which samples with CPS and without guidance, for Fast and for CPS.

    Args:
        clip: Half-width of the ratio's trust region; null for none. ``auto`` is 1e-4, or 1e-5 for Fast and CPS.
        kl_weight: Weight of the KL to the starting weights; 0 or null for none. ``auto`` is 0.04 (OCR, GenEval;
            PickScore has 0.01), or 0 for Fast and CPS.
        fast: Add noise (by default of level 0.8) and train only in a short window; its place is drawn for each
            iteration, and never includes the last step.
        fast_window: Steps of that window.
        fast_range: Steps ``[first, stop)`` that contain the window; null is the first half of them, or as many as the
            window needs.
        drop_zero_advantages: See :class:`~lit_vgrpo.objectives.chain.ChainObjective`; as in the public code, on.
        guard: GRPO-Guard's ratio, and each step's surrogate divided by its ``h``.

    The other options are those of :class:`~lit_vgrpo.objectives.chain.ChainObjective`.
    """

    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("flow_sde", steps=10, guidance=4.5)

    clip: Annotated[float, Range(above=0, below=1)] | Literal["auto"] | None = "auto"  # type: ignore[assignment]
    kl_weight: NonNegativeFloat | Literal["auto"] | None = "auto"  # type: ignore[assignment]
    fast: bool = False
    fast_window: Annotated[int, Range(1, 1000), OnlyWith("fast")] = 3
    fast_range: Annotated[tuple[NonNegativeInt, NonNegativeInt], OnlyWith("fast")] | None = None
    guard: bool = False
    drop_zero_advantages: bool = True

    def __post_init__(self) -> None:
        if self.rollout is None and self.fast:
            self.rollout = RolloutSpec("cps", steps=10)
        super().__post_init__()
        later = self.fast or self.spec.solver == "cps"
        if self.clip == "auto":
            self.clip = 1e-5 if later else 1e-4
        if self.kl_weight == "auto":
            self.kl_weight = 0.0 if later else 0.04
        if self.fast and self.spec.is_sde and self.spec.noise_level is None:
            self.rollout = replace(self.spec, noise_level=FAST_NOISE)

    @property
    def window(self) -> tuple[str, int] | None:
        return ("fast_window", self.fast_window) if self.fast else None

    @property
    def window_range(self) -> tuple[int, int]:
        return self.fast_range or (0, max(self.spec.steps // 2, self.fast_window))

    def window_start(self, iteration: int) -> int:
        return self.drawn_start(iteration)

    def chain_errors(self) -> list[str]:
        errors = super().chain_errors()
        if self.fast and not errors and not self.window_starts:
            errors.append(
                f"model.objective.fast_range={list(self.window_range)} is too short for "
                f"fast_window={self.fast_window} steps. Use a wider range, or null."
            )
        if self.guard and self.spec.solver == "cps":
            errors.append(
                "model.objective.guard=true needs a Gaussian likelihood, which cps does not have. "
                "Set guard=false, or rollout.solver=flow_sde."
            )
        return errors

    @property
    def records_means(self) -> bool:
        return self.guard

    def log_ratio(self, now: StepPass, kept: Mapping[str, Tensor]) -> Tensor:
        log_ratio = super().log_ratio(now, kept)
        return guarded_log_ratio(log_ratio, now.step.mean, kept["old_mean"], now.step.std) if self.guard else log_ratio

    def step_weights(self, t: Tensor, t_next: Tensor) -> Tensor:
        return 1 / (t - t_next) if self.guard else super().step_weights(t, t_next)
