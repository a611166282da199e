"""DanceGRPO (arXiv 2505.07818): GRPO over a random part of the sampling chain."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lit_vgrpo.core.advantages import AdvantageStd
from lit_vgrpo.core.ranges import GuidanceScale, Range, checked
from lit_vgrpo.core.rollout import Rollout, RolloutSpec
from lit_vgrpo.core.sampling import STREAM_STEPS, image_generators
from lit_vgrpo.objectives.chain import ChainObjective


@checked
@dataclass(eq=False)
class DanceGRPO(ChainObjective):
    """DanceGRPO on a rectified flow: a constant noise level, shared initial noise, no KL.

    For the networks of a variance-preserving path the paper's chain is DDIM with eta 1: see
    :class:`~lit_vgrpo.objectives.ddpo.DDPO`.

    Args:
        rollout: how images are sampled; null is dance_sde with 16 steps and shared initial noise.
        clip: half-width of the ratio's trust region; null for none.
        train_fraction: share of the steps that is trained, drawn for each image and iteration, rounded down; the last
            step is never among them.
        advantage_clip: bound on the advantages; null for none.
        training_guidance: guidance of the network while it is trained; null takes the rollout's.
        recompute_old: see :class:`~lit_vgrpo.objectives.chain.ChainObjective`.
    """

    advantage_std: ClassVar[AdvantageStd] = "group"

    rollout: RolloutSpec | None = None
    clip: Annotated[float, Range(above=0, below=1, example=1e-4)] | None = 1e-4
    train_fraction: Annotated[float, Range(above=0, most=1, example=0.6)] = 0.6
    advantage_clip: Annotated[float, Range(above=0, example=5)] | None = 5.0
    training_guidance: GuidanceScale | None = None
    recompute_old: bool = False

    def __post_init__(self) -> None:
        self.rollout = self.rollout or RolloutSpec("dance_sde", steps=16, shared_noise=True)
        super().__post_init__()

    def num_trained_steps(self, spec: RolloutSpec) -> int:
        # The small term keeps 0.29 * 100 from being 28.
        return max(1, math.floor(self.train_fraction * len(spec.sde_steps) + 1e-9))

    def choose_steps(self, rollout: Rollout) -> Tensor:
        steps, kept = len(rollout.spec.sde_steps), self.num_trained_steps(rollout.spec)
        generators = image_generators(STREAM_STEPS, rollout.seed, rollout.iteration, rollout.image_ids.tolist())
        return torch.stack([torch.randperm(steps, generator=g)[:kept].sort().values for g in generators])
