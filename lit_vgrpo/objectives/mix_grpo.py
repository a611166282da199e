"""MixGRPO (arXiv 2507.21802): SDE steps and training inside a sliding window, ODE steps outside."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal

from lit_vgrpo.core.advantages import AdvantageAggregate, AdvantageStd
from lit_vgrpo.core.ranges import OnlyWith, PositiveInt, Range, checked
from lit_vgrpo.core.types import RolloutSpec
from lit_vgrpo.objectives.chain import ChainObjective

DECAY_RATE, DECAY_FROM = 0.1, 13
FLASH_SHARE = 0.4


@checked
@dataclass(eq=False)
class MixGRPO(ChainObjective):
    """Flow-GRPO's SDE and loss inside a window of the schedule, which moves from the noisiest steps to the cleanest.

    The window's place is a pure function of the iteration, and of the run's seed if it is random. It is never shorter
    than ``window_size`` and never includes the last step.

    Args:
        window_size: Number of steps that add noise and are trained.
        window_strategy: ``progressive`` moves by ``window_stride`` every ``window_interval`` iterations and starts over
            at the end; ``decay`` does so with shorter stays at later places, ``ceil(tau0 exp(-0.1 relu(l - 13)))``
            iterations at place ``l`` (the public code's ``exp_decay``); ``random`` draws a place for each iteration;
            ``frozen`` stays at the noisiest steps.
        window_stride: Steps the window moves by.
        window_interval: Iterations the window stays, tau0.
        flash: Sample what follows the window with DPM-Solver++ 2M in 0.4 times as many steps. A rollout then costs more
            as the window moves.

    The other options are those of :class:`~lit_vgrpo.objectives.chain.ChainObjective`; the paper has no KL.
    """

    advantage_std: ClassVar[AdvantageStd] = "group"
    advantage_aggregate: ClassVar[AdvantageAggregate] = "advantages"
    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("flow_sde", steps=25, shared_noise=True)

    window_size: Annotated[int, Range(1, 1000)] = 4
    window_strategy: Literal["progressive", "random", "decay", "frozen"] = "progressive"
    window_stride: Annotated[PositiveInt, OnlyWith("window_strategy", "progressive", "decay")] = 1
    window_interval: Annotated[PositiveInt, OnlyWith("window_strategy", "progressive", "decay")] = 25
    flash: bool = False

    @property
    def window(self) -> tuple[str, int]:
        return "window_size", self.window_size

    @cached_property
    def _cycle(self) -> list[int]:
        """Return the window's place at every iteration of one pass through the schedule."""
        rate, cycle = DECAY_RATE if self.window_strategy == "decay" else 0.0, list[int]()
        for place in self.window_starts[:: self.window_stride]:
            stay = self.window_interval * math.exp(-rate * max(0, place - DECAY_FROM))
            cycle += [place] * math.ceil(stay)
        return cycle

    def window_start(self, iteration: int) -> int:
        if self.window_strategy == "frozen":
            return 0
        if self.window_strategy == "random":
            return self.drawn_start(iteration)
        return self._cycle[iteration % len(self._cycle)]

    def rollout_spec(self, iteration: int) -> RolloutSpec:
        spec = super().rollout_spec(iteration)
        return replace(spec, tail=FLASH_SHARE) if self.flash and spec.is_sde else spec
