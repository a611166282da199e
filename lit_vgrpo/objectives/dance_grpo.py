"""DanceGRPO (arXiv 2505.07818): GRPO over a random part of the sampling chain."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageStd
from lit_vgrpo.core.noise import STREAM_STEPS, image_generators
from lit_vgrpo.core.ranges import Range, checked
from lit_vgrpo.core.types import Rollout, RolloutSpec
from lit_vgrpo.objectives.chain import ChainObjective


@checked
@dataclass(eq=False)
class DanceGRPO(ChainObjective):
    """DanceGRPO on a rectified flow: a constant noise level, shared initial noise, no KL.

    For the networks of a variance-preserving path the paper's chain is DDIM with eta 1: see
    :class:`~lit_vgrpo.objectives.ddpo.DDPO`.

    Args:
        train_fraction: Share of the steps that are trained, drawn per image and iteration and rounded down; the last
            step is never among them.

    The other options are those of :class:`~lit_vgrpo.objectives.chain.ChainObjective`; the paper has no KL.
    """

    advantage_std: ClassVar[AdvantageStd] = "group"
    default_rollout: ClassVar[RolloutSpec] = RolloutSpec("dance_sde", steps=16, shared_noise=True)

    train_fraction: Annotated[float, Range(above=0, most=1)] = 0.6

    def num_trained_steps(self, spec: RolloutSpec) -> int:
        # The small term keeps 0.29 * 100 from being 28.
        return max(1, math.floor(self.train_fraction * len(spec.sde_steps) + 1e-9))

    def choose_steps(self, rollout: Rollout) -> Tensor:
        steps, kept = len(rollout.spec.sde_steps), self.num_trained_steps(rollout.spec)
        generators = image_generators(STREAM_STEPS, rollout.seed, rollout.iteration, rollout.image_ids.tolist())
        return torch.stack([torch.randperm(steps, generator=g)[:kept].sort().values for g in generators])
